"""Renders records as terminal tables, HTML pages and other formats.

Runs in: the flatout command; in the user's program for the crash report and the live line.
Imports: schema, job, rich, jinja2; no torch, clocks or processes, and nothing here prints.
Start with: summary.py (a session in sentences and rows), shared by terminal.py (tables) and report.py (page).
page.py sets up all pages (no scripts, no requests, everything escaped). charts.py draws inline SVG with
svg.py. formatting.py formats values. profile_*.py are the same for a profile. curves.py thins loss curves,
and machine.py describes machine, software and program.
"""
