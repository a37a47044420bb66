"""Room 1: records in, something to read out. No torch, no clocks, no processes; nothing here prints.

    story.py      what a session has to tell, in words and rows
    machine.py    the lines about machine, software and program
    wording.py    how a value is spelled
    terminal.py   the story as tables for a terminal (rich)
    page.py       what every page has in common: no script, no request, everything escaped
    report.py     the story as one self-contained page (jinja2), with the pictures of
    pictures.py   bars, forest and curves, drawn as inline SVG by svg.py
    profile_*.py  the same of a profile: story, terminal, report, pictures
    curves.py     thins the loss curves for drawing
"""

from flatout.render.profile_report import profile_html
from flatout.render.report import report_html
from flatout.render.terminal import plan_table, session_tables

__all__ = ["plan_table", "profile_html", "report_html", "session_tables"]
