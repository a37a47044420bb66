"""Renders records as terminal tables, HTML pages and other formats.

Runs in: the flatout command; in the user's program for the crash report and the live line.
Imports: schema, job, rich, markupsafe; no torch, clocks or processes, and nothing here prints.
Start with: page.py. A page is sections of texts, tables and charts; report.py, profile_page.py, compare_page.py
and others build one from a record. page.py writes it as HTML, terminal.py for a terminal, markdown.py for CI.
plot.py draws all charts. summary.py says a session in sentences. formatting.py formats values.
"""
