"""Terminal output of pages and plans, as rich renderables for 60 columns or more.

Untrusted text is always wrapped in ``Text``: rich parses plain strings in tables as markup such as ``[red]``.
flatout's own signs are plain ASCII, so that terminals without UTF-8 show them.
"""

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from flatout.render import summary
from flatout.render.formatting import MISSING, capital, one_line, safe_text, setting
from flatout.render.page import PAGE, Cell, Code, Items, Page, PagePart, Paragraph, Table
from flatout.schema.enums import Status
from flatout.schema.plan import Plan
from flatout.schema.session import SessionRecord

STYLES = {"applied": "bold green", "rejected": "bold red", "skipped": "dim", "strong": "bold", "note": "dim"}
STYLES |= {"good": "bold green", "bad": "bold red"}
ORIGINS = {
    "default": "flatout's own default",
    "user": "requested by you",
    "tuner": "found by the tuner",
    "file": "from the plan file",
}
MAX_ROWS = 40  # of a table; the record has all


def terminal(page: Page) -> RenderableType:
    """Return a page for the terminal, without its charts and its next command."""
    lines: list[RenderableType] = [
        Text(_ascii(safe_text(page.headline, 4000)), overflow="fold", style=STYLES.get(page.tone, "bold"))
    ]
    if page.subtitle:
        lines.append(text(page.subtitle))
    if page.details:
        details = Text(safe_text(page.details, 4000), style="dim", overflow="fold")
        lines += ["", Padding(details, (0, 0, 0, 2))]
    for section in page.sections:
        parts = [rendered for part in section.visible if (rendered := _part(part)) is not None]
        if section.where != PAGE and parts:
            lines += ["", *([text(section.title, "dim")] if section.title else []), *parts]
    return Group(*lines)


def print_page(console: Console, page: Page) -> None:
    """Print a page, and the next command in one line: it is copied."""
    console.print(terminal(page))
    why, command = page.next_step
    if command:
        console.print(Text.assemble(f"\n{why}\n  ", (command, "bold")), soft_wrap=True)


def _part(part: PagePart) -> RenderableType | None:
    match part:
        case Table():
            return table_grid(part)
        case Paragraph(content, "output") | Code(content):
            return Padding(Text(safe_text(content, 4000), overflow="fold"), (0, 0, 0, 2))
        case Paragraph(_, "note"):
            return None
        case Paragraph(content, kind):
            return text(content, STYLES.get(kind.rpartition(" ")[2], ""))
        case Items(items):
            return Group(*(text(f"- {item}") for item in items))
        case _:
            return None


def table_grid(table: Table) -> RenderableType:
    """Return a table, or its rows alone where it has no columns."""
    grid = (
        Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        if any(table.columns)
        else Grid.grid(padding=(0, 2, 0, 0))
    )
    width = max((len(row) for row in table.rows), default=0)
    for name in (*table.columns, *[""] * (width - len(table.columns))):
        right = name.startswith(">")
        grid.add_column(text(name.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    for row in table.rows[:MAX_ROWS]:
        grid.add_row(
            *(_cell(cell, "" if number or table.columns else "dim") for number, cell in enumerate(row))
        )
    left = len(table.rows) - MAX_ROWS
    return Group(grid, Text(f"{left} more in the record", style="dim")) if left > 0 else grid


def _cell(cell: str | Cell, style: str) -> Text:
    if isinstance(cell, str):
        return text(cell, style)
    return text(cell.text + (f" ({cell.note})" if cell.note else ""), STYLES.get(cell.kind, ""))


def plan_table(plan: Plan, code: Mapping[str, str], reasons: Mapping[str, str]) -> RenderableType:
    """Return each choice of a Plan with its origin, its evidence and the equivalent code.

    ``code`` and ``reasons`` are keyed by lever name. A reason is an argument against a choice or, for a lever
    outside the Plan, why it was left out."""
    lines: list[RenderableType] = []
    for choice in plan:
        title = Text.assemble(
            (one_line(choice.name, 80), "bold"),
            " = ",
            one_line(setting(choice.value)),
            (f"   {ORIGINS[choice.origin]}", "dim"),
        )
        notes = [text(choice.evidence)] if choice.evidence else []
        if choice.name in reasons:
            notes.append(Text("but: ", style="yellow") + text(reasons[choice.name]))
        lines += [title, *(Padding(note, (0, 0, 0, 2)) for note in notes)]
        if code.get(choice.name):
            # Keep the line breaks, and let only the terminal wrap: users copy this code.
            copied = Text(safe_text(code[choice.name], 4000).strip("\n"), style="cyan", overflow="fold")
            lines.append(Padding(copied, (1, 0, 0, 4)))
        lines.append("")
    if not lines:
        lines = [Text("The plan is empty: the program runs as it is."), ""]
    absent = [(name, reason) for name, reason in reasons.items() if plan.get(name) is None]
    if absent:
        lines += [Text("not in the plan", style="dim"), name_grid(absent)]
    return Group(*lines[:-1] if lines[-1] == "" else lines)


def why_left_out(session: SessionRecord, session_name: str, name: str | None = None) -> RenderableType:
    """Return every lever that was left out of a session, or only the one of this name, with its reason.

    ``which`` names the session in a message."""
    rows = [
        (lever.name, summary.lever_reason(lever))
        for lever in session.levers
        if lever.status == Status.SKIPPED and name in (None, lever.name)
    ]
    if rows:
        return name_grid(rows)
    if session.status in ("failed", "running"):
        failed = session.status == "failed"
        ended = f"failed: {session.message.strip()}" if failed else "has not ended; its command continues it."
        content = Text(safe_text(f"{capital(session_name)} {ended}", 4000), overflow="fold")
        return Group(content, "", Text("`flatout levers --why --job DIRECTORY` shows another session."))
    if name is None:
        return Text("No lever was left out.")
    status = next((lever.status for lever in session.levers if lever.name == name), "")
    return text(
        f"{name} was not left out: it was {status}." if status else f"{name} is not in {session_name}"
    )


def name_grid(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Return a grid with names on the left and sentences on the right."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(max_width=36, overflow="fold")
    grid.add_column(overflow="fold")
    for name, content in rows:
        grid.add_row(text(name, "dim"), text(content))
    return grid


def text(content: object, style: str = "") -> Text:
    return Text(_ascii(one_line(content, 4000)), style=style, overflow="fold")


def _ascii(content: str) -> str:
    """Replace flatout's own typographic signs with ASCII. Other letters stay."""
    for sign, plain in ((MISSING, "-"), ("−", "-"), ("×", "x"), ("…", "..."), ("·", "-"), ("\u00a0", " ")):
        content = content.replace(sign, plain)
    return content
