"""Render a `flatout.Loop` in a notebook: progress, speed, and the result of each lever, as a piece of HTML."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from flatout.render.formatting import one_line

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
    bar = (
        Markup('<progress value="{}" max="{}" style="width:16em"></progress> ').format(
            min(done, total), total
        )
        if total
        else ""
    )
    of = f" of {total:,}" if total else ""
    parts = [
        Markup("<div><strong>{}</strong><br>{}{} steps done</div>").format(
            one_line(title, 120), bar, f"{done:,}{of}"
        ),
        _table([(name, text) for name, text in facts]),
        _table(levers),
    ]
    return str(Markup("").join(parts))


def _table(rows: Sequence[tuple[str, ...]]) -> Markup:
    if not rows:
        return Markup("")
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td style="{}">{}</td>').format(CELL, escape(one_line(cell, 300))) for cell in row
            )
        )
        for row in rows
    )
    return Markup('<table style="{}">{}</table>').format(STYLE, body)
