"""Render a `flatout.Loop` in a notebook: progress, speed, and the result of each lever, as a piece of HTML."""

from collections.abc import Sequence

from flatout.render.plot import element

STYLE = "border-collapse:collapse;font-size:90%;margin:.4em 0"
CELL = "text-align:left;padding:.1em 1em .1em 0;vertical-align:top"


def loop_html(
    title: str,
    done: int,
    total: int | None,
    facts: Sequence[tuple[str, str]],
    levers: Sequence[tuple[str, str, str]],
) -> str:
    """Return the view of a Loop. ``levers`` are (name, result, evidence or reason)."""
    bar = [element("progress", value=min(done, total), max=total, style="width:16em")] if total else []
    total_text = f" of {total:,}" if total else ""
    tables = [
        element(
            "table",
            *(element("tr", *(element("td", cell, style=CELL) for cell in row)) for row in rows),
            style=STYLE,
        )
        for rows in (facts, levers)
        if rows
    ]
    head = element("div", element("strong", title), element("div", *bar, f" {done:,}{total_text} steps done"))
    return str(element("div", head, *tables))
