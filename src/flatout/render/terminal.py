"""Terminal output of sessions and plans, as rich renderables for 80 columns or more.

Untrusted text is always wrapped in ``Text``: rich parses plain strings in tables as markup such as ``[red]``.
flatout's own signs are plain ASCII, so that terminals without UTF-8 show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.render import before_after, ranks_summary, summary
from flatout.render.formatting import (
    NOTHING,
    drawable,
    interval,
    legible,
    lever,
    one_line,
    setting,
    several,
    size,
    times,
)
from flatout.schema.enums import Status
from flatout.schema.plan import Plan
from flatout.schema.session import LeverRecord, SessionOutcome, SessionRecord

STYLES = {"applied": "bold green", "rejected": "bold red", "skipped": "bold"}
ORIGINS = {
    "default": "flatout's own default",
    "user": "requested by you",
    "tuner": "found by the tuner",
    "file": "from the plan file",
}
OUTCOMES = {
    SessionOutcome.FASTER: "bold green",
    SessionOutcome.FITS: "bold green",
    SessionOutcome.FAILED: "bold red",
    SessionOutcome.CHANGED: "bold red",
}


def session_tables(session: SessionRecord) -> RenderableType:
    """Return the output of `flatout tune` and `flatout report`."""
    lines: list[RenderableType] = [
        Text(summary.headline(session), style=OUTCOMES.get(session.outcome, "bold"))
    ]
    message = summary.message(session)
    if message:
        lines.append(text(message))
    details = summary.details(session)
    if details:
        lines += ["", Padding(Text(details, style="dim", overflow="fold"), (0, 0, 0, 2))]
    lines += section(_before_after(session))
    lines += section(_ranks(session))
    lines += section(_frontier(session))
    lines += section(_levers(session))
    lines += section(_predictions(session))
    lines += section(
        pairs([(each.plan, text(summary.named_sentence(each))) for each in session.named])
        if session.named
        else None
    )
    closing = [
        ("guard", summary.guard_sentence(session.guard)),
        ("pays back", summary.payback_sentence(session)),
        ("tried", summary.effort(session)),
    ]
    if session.speedup is not None and session.obstacle:
        closing.append(("more", text(session.obstacle).plain))
    if summary.other_programs(session):
        closing.append(("other programs", summary.other_programs(session)))
    if summary.noise(session):
        closing.append(
            (
                "noise floor",
                f"{summary.noise(session)}: two processes of the plain program may differ by this much",
            )
        )
    lines += section(pairs([(name, text(words)) for name, words in closing if words]))
    return Group(*lines)


def print_session(console: Console, session: SessionRecord) -> None:
    """Print the tables, and the next command in one line: it is copied."""
    console.print(session_tables(session))
    following = summary.next_step(session)
    if following.command:
        lines = Text.assemble(f"\n{following.why}\n  ", (following.command, "bold"))
        console.print(lines, soft_wrap=True)


def plan_table(plan: Plan, code: Mapping[str, str], reasons: Mapping[str, str]) -> RenderableType:
    """Return each choice of a Plan with its origin, its evidence and the equivalent code.

    ``code`` and ``reasons`` are keyed by lever name. A reason is an argument against a choice or, for a lever
    outside the Plan, why it was left out.
    """
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
            lines.append(
                Padding(
                    Text(legible(code[choice.name], 4000).strip("\n"), style="cyan", overflow="fold"),
                    (1, 0, 0, 4),
                )
            )
        lines.append("")
    if not lines:
        lines = [Text("The plan is empty: the program runs as it is."), ""]
    absent = [(name, text(reason)) for name, reason in reasons.items() if plan.get(name) is None]
    if absent:
        lines += [Text("not in the plan", style="dim"), pairs(absent)]
    return Group(*lines[:-1] if lines[-1] == "" else lines)


def section(table: RenderableType | None) -> list[RenderableType]:
    return [] if table is None else ["", table]


def _before_after(session: SessionRecord) -> Table | None:
    rows = before_after.before_after(session)
    both = before_after.both_sides(rows)
    table = table_of("", "plain", "tuned", "change") if both else table_of("", "plain")
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in rows:
        if not both:
            table.add_row(Text(row.what, style="dim"), text(row.plain))
            continue
        table.add_row(
            Text(row.what, style="dim"),
            text(row.plain),
            text(row.tuned),
            text(row.change + (f" ({row.spread})" if row.spread else "")),
        )
    return table if rows else None


def _levers(session: SessionRecord) -> RenderableType | None:
    """Return applied and rejected levers, one a line, below their reason.

    Levers that were left out are counted.
    """
    records = summary.levers_in_order(session)
    lines: list[RenderableType] = []
    groups: dict[tuple[str, str], list[LeverRecord]] = {}
    for record in records:
        if record.status != Status.SKIPPED:
            groups.setdefault((one_line(record.status, 20), summary.because(record)), []).append(record)
    last = ""
    for (status, reason), members in groups.items():
        if last not in ("", status):
            lines.append("")
        last = status
        heading = Text.assemble((status, STYLES.get(status, "bold")), text(f": {reason}") if reason else "")
        lines += [heading, *(_lever(record) for record in members)]
    skipped = sum(record.status == Status.SKIPPED for record in records)
    if skipped:
        lines += [
            *([""] if lines else []),
            Text(f"{several(skipped, 'lever')} left out; `flatout levers --why` says why"),
        ]
    return Group(*lines) if lines else None


def _lever(record: LeverRecord) -> RenderableType:
    """Return ``  1.31x (1.20-1.43)  channels_last``; a long value continues below its name."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=19, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Padding(_ratio(record), (0, 0, 0, 2)), Text(_ascii(lever(record.name, record.value))))
    return grid


def why_left_out(
    session: SessionRecord, which: str = "the session", name: str | None = None
) -> RenderableType:
    """Return every lever that was left out of a session, or only the one of this name, with its reason.

    ``which`` names the session in a message."""
    rows = [
        (record.name, text(summary.because(record)))
        for record in session.levers
        if record.status == Status.SKIPPED and name in (None, record.name)
    ]
    lines: list[RenderableType] = [pairs(rows)] if rows else []
    if session.status in ("failed", "running") and not rows:
        ended = (
            f"failed: {session.message.strip()}"
            if session.status == "failed"
            else "has not ended; its command continues it."
        )
        said = f"{which[:1].upper()}{which[1:]} {ended}"
        lines = [
            Text(legible(said, 4000), overflow="fold"),
            "",
            Text("`flatout levers --why --job DIRECTORY` shows another session."),
        ]
    elif name is not None and not rows:
        status = next((record.status for record in session.levers if record.name == name), "")
        lines = [
            text(f"{name} was not left out: it was {status}." if status else f"{name} is not in {which}")
        ]
    return Group(*lines) if lines else Text("No lever was left out.")


def _frontier(session: SessionRecord) -> Table | None:
    """Return the table of time against memory for a session with a memory limit."""
    limit = f", of {size(session.memory_limit_bytes)}" if session.memory_limit_bytes else ""
    grid = table_of("plan", f"peak of the tensors in a step{limit}", "time of a step", "")
    for row in summary.frontier_rows(session):
        grid.add_row(*map(text, row))
    return grid if grid.rows else None


def _ranks(session: SessionRecord) -> RenderableType | None:
    found = session.ranks
    if found is None:
        return None
    lines: list[RenderableType] = [text(ranks_summary.summary(session))]
    if found.paces:
        grid = table_of("", "waits for data", "computes", "exchange", "samples")
        for row in ranks_summary.rows(found):
            grid.add_row(*map(text, row))
        lines.append(grid)
    return Group(*lines, *map(text, ranks_summary.remarks(found)))


def _predictions(session: SessionRecord) -> Table | None:
    """Return the predicted speed-ups of the profile next to the measured ones."""
    grid = table_of("the profile found", "predicted", "measured", "with")
    for row in summary.predicted_and_measured(session):
        grid.add_row(*map(text, row))
    return grid if grid.rows else None


def _ratio(record: LeverRecord) -> Text:
    if drawable(record.ratio) is None:
        return Text("-")
    inside = interval(record.low, record.high, "-")
    return Text(times(record.ratio) + (f" ({inside})" if inside else ""))


def pairs(rows: Iterable[tuple[str, Text]]) -> Table:
    """Return a grid with names on the left and sentences on the right."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=36, overflow="fold")
    table.add_column(overflow="fold")
    for name, words in rows:
        table.add_row(Text(_ascii(one_line(name, 80)), style="dim"), words)
    return table


def table_of(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def text(words: object) -> Text:
    return Text(_ascii(one_line(words)), overflow="fold")


_PLAIN_SIGNS: Sequence[tuple[str, str]] = ((NOTHING, "-"), ("−", "-"), ("×", "x"), ("…", "..."))


def _ascii(text: str) -> str:
    """Replace flatout's own typographic signs with ASCII. Other letters stay."""
    for sign, plain in _PLAIN_SIGNS:
        text = text.replace(sign, plain)
    return text
