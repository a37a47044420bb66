"""Write a page as Markdown, for the summary of a CI job."""

import re
from collections.abc import Iterable

from flatout.render.formatting import one_line
from flatout.render.page import PAGE, Cell, Items, Page, PagePart, Paragraph, Table

STATUS_MARKS = {"applied": "✅ ", "rejected": "❌ ", "skipped": "❔ "}


def markdown(page: Page) -> str:
    """Return the headline, and every section without its charts."""
    lines = [f"### {_text(page.headline)}", ""]
    for section in page.sections:
        if section.where != PAGE and section.visible:
            lines += [f"**{_text(section.title)}**", ""] if section.title else []
            lines += [line for part in section.visible for line in _part(part)]
    return "\n".join(lines) + "\n"


def _part(part: PagePart) -> list[str]:
    match part:
        case Paragraph(text):
            return [_text(text), ""]
        case Items(items):
            return [*(f"* {_text(item)}" for item in items), ""]
        case Table(columns, rows):
            width = max(map(len, rows))
            names = [*columns, *[""] * (width - len(columns))]
            alignments = ["---:" if name.startswith(">") else "---" for name in names]
            return [
                _row(name.removeprefix(">") for name in names),
                f"|{'|'.join(alignments)}|",
                *map(_row, rows),
                "",
            ]
        case _:
            return []


def _row(cells: Iterable[str | Cell]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return _text(cell)
    return (
        STATUS_MARKS.get(cell.kind, "") + _text(cell.text) + (f" ({_text(cell.note)})" if cell.note else "")
    )


def _text(value: object) -> str:
    """Return one line in which no character is markup: labels and paths come from the user's repository."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!])", r"\\\1", one_line(value, 600))
