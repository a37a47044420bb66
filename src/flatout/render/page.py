"""A page: sections of texts, tables and charts. `html` writes it for a browser, `terminal` for a terminal.

A builder (`report`, `profile_page`, `compare_page`, ...) makes a `Page` from a record, once for both. The HTML
has no scripts and makes no requests. It can be mailed, printed and opened from disk: its content security
policy allows only its own style sheet, identified by digest. `svg.element` cleans and escapes every text.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from flatout.render.formatting import day, shell
from flatout.render.plot import Plot, element


@dataclass(frozen=True)
class Cell:
    """A cell of a table. ``kind``: ``code``, ``strong``, ``applied``, ``rejected``, ``skipped``, or a colour
    of the charts, which gives it a swatch. ``link``: a file beside the page."""

    text: str
    note: str = ""
    kind: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """A table. A column whose name begins with ``>`` is aligned right. Without columns it has no head."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. ``kind``: ``note`` (on pages only), ``verdict`` (with ``good`` or ``bad``), or ``output``, which keeps its lines."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A chart, on pages only. ``legend``: pairs of a CSS class and a name."""

    chart: Plot | None
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Code:
    text: str


PagePart = Table | Paragraph | Items | Figure | Code
MAX_ROWS = 150  # of a table; the rest is in the record
BOTH, PAGE, TERMINAL = "both", "page", "terminal"


@dataclass(frozen=True)
class Section:
    """A part of a page, left out if it is empty. ``where``: BOTH, PAGE or TERMINAL."""

    title: str
    parts: Sequence[PagePart | None]
    where: str = BOTH

    @property
    def visible(self) -> list[PagePart]:
        """The parts that hold something; none if only paragraphs of the kind ``note`` are left."""
        parts = [part for part in self.parts if part is not None and _has_content(part)]
        only_notes = all(isinstance(part, Paragraph) and part.kind == "note" for part in parts)
        return [] if only_notes else parts


@dataclass(frozen=True)
class Page:
    """``source`` names the file with all figures. ``tone``: ``good``, ``bad`` or "". ``following``: why, and
    the next command."""

    page_kind: str
    headline: str
    source: str
    sections: Sequence[Section]
    subtitle: str = ""
    details: str = ""  # of a failure: lines of output
    command: Sequence[str] = ()
    dateline: Sequence[str] = ()
    tone: str = ""
    next_step: tuple[str, str] = ("", "")
    version: str = ""


def notes(lines: Iterable[str], title: str = "Notes") -> Section:
    return Section(title, [Items(list(lines)[:20])])


def html(page: Page) -> str:
    """Return the page as one HTML document."""
    head = (
        element("p", f"flatout · {page.page_kind}", class_="kicker"),
        element("h1", page.headline),
        *([_paragraph(page.subtitle, "deck")] if page.subtitle else []),
        *([element("pre", page.details, class_="output")] if page.details else []),
        *([element("p", element("code", shell(page.command)), class_="command")] if page.command else []),
        element("p", " · ".join(filter(None, page.dateline)), class_="dateline"),
    )
    why, command = page.next_step
    body = [element("header", *head, class_=page.tone or None)]
    sections = [section for section in page.sections if section.where != TERMINAL and section.visible]
    if command:
        sections.insert(min(1, len(sections)), Section("Next step", [Paragraph(why), Code(command)]))
    for section in sections:
        title = [element("h2", section.title)] if section.title else []
        body.append(element("section", *title, *map(_part, section.visible)))
    origin = f"Made by flatout {page.version} from {page.source} in the same folder. "
    body.append(element("footer", element("p", origin + "This page has no scripts and loads nothing.")))
    sheet, digest = _style()
    return (
        Markup(_TEMPLATE)
        .format(
            digest=digest,
            version=page.version,
            title=element("title", f"{page.headline} – flatout"),
            sheet=sheet,
            body=Markup("\n").join(body),
        )
        .replace("\r", "")
    )


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="flatout {version}">
{title}
<style>{sheet}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


@cache
def _style() -> tuple[Markup, str]:
    sheet = files("flatout.render").joinpath("page.css").read_text(encoding="utf-8")
    return Markup(sheet), base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()


def _has_content(part: PagePart) -> bool:
    match part:
        case Table(_, rows):
            return bool(rows)
        case Items(items):
            return bool(items)
        case Figure(chart):
            return chart is not None
        case Paragraph(text) | Code(text):
            return bool(text)


def _part(part: PagePart) -> Markup:
    match part:
        case Table():
            return _table(part)
        case Paragraph(text, "output"):
            return element("pre", text, class_="output")
        case Paragraph(text, kind):
            return _paragraph(text, kind)
        case Items(items):
            return element("ul", *(element("li", *_spans(item)) for item in items))
        case Code(text):
            return element("pre", element("code", text))
        case Figure(chart, caption, legend):
            assert chart is not None
            entries = [element("span", _swatch(kind), name) for kind, name in legend]
            return element(
                "figure",
                *([element("div", *entries, class_="legend")] if entries else []),
                chart.markup(),
                element("figcaption", *_spans(caption)),
            )


def _paragraph(text: str, kind: str = "") -> Markup:
    return element("p", *_spans(text), class_=kind or None)


def _spans(text: str) -> list[str]:
    """Split a text at its backquoted parts, which become code."""
    return [
        element("code", piece) if number % 2 else piece
        for number, piece in enumerate(re.split(r"`([^`\n]+)`", text))
        if piece
    ]


def _swatch(kind: str) -> Markup:
    return element("i", class_=f"swatch {kind}")


def _table(table: Table) -> Markup:
    """Return a table. On a narrow screen, each row becomes a block, and each cell gets its column's name."""
    names = [name.removeprefix(">") for name in table.columns]
    aligns = ["right" if name.startswith(">") else None for name in table.columns]
    head = [element("th", name, scope="col", class_=align) for name, align in zip(names, aligns, strict=True)]
    body = []
    for row in table.rows[:MAX_ROWS]:
        cells = []
        for number, content in enumerate(row):
            cell = content if isinstance(content, Cell) else Cell(content)
            label = names[number] if number < len(names) else ""
            align = aligns[number] if number < len(aligns) else None
            cells.append(
                element(
                    "td" if number else "th",
                    *_content(cell),
                    scope=None if number else "row",
                    data_label=label if number and label else None,
                    class_=align,
                )
            )
        body.append(element("tr", *cells))
    if len(table.rows) > MAX_ROWS:
        omitted = f"{len(table.rows) - MAX_ROWS} more are in the record."
        body.append(element("tr", element("td", omitted, colspan=len(table.rows[0]))))
    parts = [element("thead", element("tr", *head))] if any(names) else []
    return element("table", *parts, element("tbody", *body), class_=None if any(names) else "pairs")


def _content(cell: Cell) -> list[str]:
    text = _spans(cell.text)
    match cell.kind:
        case "code":
            text = [element("code", cell.text)]
        case "strong":
            text = [element("strong", cell.text)]
        case "applied" | "rejected" | "skipped":
            text = [element("span", cell.text, class_=f"status {cell.kind}")]
        case kind if kind:
            text = [_swatch(kind), cell.text]
    if cell.link:
        text = [element("a", *text, href=cell.link)]
    return [*text, *([element("small", cell.note)] if cell.note else [])]


def dateline(created: str, *parts: str) -> list[str]:
    return [day(created) if created else "", *parts]


# A `flatout.Loop` in a notebook.

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
