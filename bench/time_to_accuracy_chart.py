"""Draws the chart of time_to_accuracy.py: a panel for each program, with its metric over wall-clock time.

The chart is readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN, ACROSS = 400, 240, 40, 2
PLAIN, TUNED = "#d1495b", "#2a6fdb"


def chart(programs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns an SVG; empty without programs.

    Wide pale lines are plain, thin ones tuned, and the dashed line is the metric to reach.
    """
    if not programs:
        return ""
    down = -(-len(programs) // ACROSS)
    panels = []
    for at, (name, entry) in enumerate(programs.items()):
        x, y = (at % ACROSS) * WIDTH, 24 + at // ACROSS * HEIGHT
        panels.append(f'<g transform="translate({x},{y})">{_panel(name, entry)}</g>')
    width, height = WIDTH * min(ACROSS, len(programs)), 24 + down * HEIGHT
    legend = (
        f'<text x="{MARGIN}" y="18"><tspan fill="{PLAIN}">plain (wide)</tspan>  <tspan fill="{TUNED}">tuned (thin)</tspan>'
        f"  each line a seed; dashed: the metric to reach</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12" fill="#333">'
        f'<rect width="100%" height="100%" fill="#fff"/>{legend}{"".join(panels)}</svg>\n'
    )


def _panel(name: str, entry: Mapping[str, Any]) -> str:
    points = [point for run in entry["runs"] for point in run["points"]]
    latest = max(at for at, _ in points)
    low, high = (
        min(entry["target"], *(value for _, value in points)),
        max(entry["target"], *(value for _, value in points)),
    )
    reach = high - low or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        return MARGIN + at / latest * (WIDTH - 1.5 * MARGIN), HEIGHT - MARGIN - (value - low) / reach * (
            HEIGHT - 2 * MARGIN
        )

    lines = []
    for run in sorted(entry["runs"], key=lambda run: run["side"]):  # plain below tuned
        style = (
            f'stroke="{PLAIN}" stroke-width="6" stroke-opacity="0.35"'
            if run["side"] == "plain"
            else f'stroke="{TUNED}" stroke-width="1.5"'
        )
        places = " ".join("{:.1f},{:.1f}".format(*place(at, value)) for at, value in run["points"])
        lines.append(f'<polyline points="{places}" fill="none" {style}/>')
        x, y = place(*run["points"][-1])
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{PLAIN if run["side"] == "plain" else TUNED}"/>'
        )
    level = place(0, entry["target"])[1]
    return (
        f'<text x="{MARGIN}" y="26" font-weight="bold">{escape(name)}: {escape(entry["metric"]["name"])}</text>'
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN / 2}" y1="{level:.1f}" y2="{level:.1f}" stroke="#777" stroke-dasharray="4 3"/>{"".join(lines)}'
        f'<text x="2" y="{MARGIN + 4}">{high:.3g}</text><text x="2" y="{HEIGHT - MARGIN + 4}">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 14}">0 s</text><text x="{WIDTH - MARGIN / 2}" y="{HEIGHT - 14}" text-anchor="end">{latest:.0f} s</text>'
    )
