"""Render records as terminal tables, HTML pages and other formats.

Nothing here uses torch, clocks or processes, and nothing here prints.

    story.py      summary of a session in sentences and rows
    machine.py    lines about the machine, the software and the program
    wording.py    formatting of values
    terminal.py   summary as tables for a terminal (rich)
    page.py       shared setup of all pages: no scripts, no requests, everything escaped
    report.py     summary as one self-contained page (jinja2)
    charts.py   bar charts, forest plots and curves as inline SVG, built with svg.py
    profile_*.py  the same for a profile: summary, terminal, report, charts
    curves.py     thinning of loss curves for plots
"""

from flatout.render.profile_report import profile_html
from flatout.render.report import report_html
from flatout.render.terminal import plan_table, session_tables, why_left_out

__all__ = ["plan_table", "profile_html", "report_html", "session_tables", "why_left_out"]
