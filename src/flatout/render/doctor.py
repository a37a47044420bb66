"""Terminal output of `flatout doctor`: problems with the commands that fix them, notes, passed checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.render.formatting import NOTHING, figure, one_line, several
from flatout.schema.ceilings import CeilingsRecord
from flatout.schema.machine_snapshot import CheckResult, Verdict

BUSY_CORES = 0.5  # above this load of other processes, the figures underestimate the machine
STYLES = {
    Verdict.PROBLEM: "bold red",
    Verdict.WARNING: "bold yellow",
    Verdict.NOTE: "bold",
    Verdict.UNSEEN: "dim",
    Verdict.OK: "green",
}


def doctor_page(checks: Sequence[CheckResult]) -> RenderableType:
    """Return problems and warnings in full, notes with their command, and one line per theme for the rest."""
    by_verdict = {verdict: [check for check in checks if check.verdict == verdict] for verdict in Verdict}
    parts: list[RenderableType] = [_headline(by_verdict), ""]
    for verdict in (Verdict.PROBLEM, Verdict.WARNING):
        for check in by_verdict[verdict]:
            parts += [*_in_full(check, STYLES[verdict]), ""]
    if by_verdict[Verdict.NOTE]:
        parts += [Text("notes", style="bold"), _notes(by_verdict[Verdict.NOTE]), ""]
    for verdict in (Verdict.UNSEEN, Verdict.OK):
        if by_verdict[verdict]:
            parts += [Text(verdict.value, style=STYLES[verdict]), _by_theme(by_verdict[verdict]), ""]
    return Group(*parts[:-1])


def _headline(by_verdict: Mapping[Verdict, Sequence[CheckResult]]) -> Text:
    counts = [
        (several(len(by_verdict[verdict]), verdict.value), verdict)
        for verdict in (Verdict.PROBLEM, Verdict.WARNING)
        if by_verdict[verdict]
    ]
    if not counts:
        return Text("this machine is ready", style="bold green")
    words = " and ".join(count for count, _ in counts)
    return Text(
        words if counts[0][1] == Verdict.PROBLEM else f"this machine is ready, with {words}",
        style=STYLES[counts[0][1]],
    )


def _in_full(check: CheckResult, style: str) -> Iterable[RenderableType]:
    yield Text.assemble(
        (check.verdict, style), (f"  {check.code} {check.name}", "bold"), (f"  {check.theme}", "dim")
    )
    yield Padding(Text(one_line(check.seen) + ".", overflow="fold"), (0, 0, 0, 4))
    if check.why:
        yield Padding(Text(one_line(check.why), style="dim", overflow="fold"), (0, 0, 0, 4))
    for line in check.evidence[:6]:
        yield Padding(Text("| " + one_line(line, 200), style="dim", overflow="fold"), (0, 0, 0, 6))
    if check.fix:
        yield _command(check.fix, 6)


def _command(fix: str, indent: int) -> RenderableType:
    # No line breaks here: the terminal wraps by itself, and the command still copies as one line.
    return Text(" " * indent + one_line(fix, 2000), style="bold cyan", no_wrap=True, overflow="ignore")


def _notes(checks: Sequence[CheckResult]) -> RenderableType:
    lines: list[RenderableType] = []
    for check in checks:
        lines.append(
            Padding(
                Text.assemble((f"{check.code} ", "dim"), one_line(check.seen), overflow="fold"), (0, 0, 0, 2)
            )
        )
        if check.fix:
            lines.append(_command(check.fix, 8))
    return Group(*lines)


def _by_theme(checks: Sequence[CheckResult]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for theme, members in groupby(checks, key=lambda check: check.theme):
        table.add_row(
            Text(f"  {one_line(theme)}", style="dim"),
            Text("; ".join(one_line(check.seen) for check in members)),
        )
    return table


def ceilings_table(record: CeilingsRecord) -> RenderableType:
    """Return the measured ceilings with quartiles, and the reason for each missing one."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in ("figure", "device", "best", "quartiles", "n", "how"):
        table.add_column(justify="right" if name in ("best", "quartiles", "n") else "left", overflow="fold")
    table.add_row(
        *(Text(name, style="dim") for name in ("peak rate", "device", "best", "quartiles", "n", "how"))
    )
    for each in record.ceilings:
        scale, unit = _unit(each.name)
        values = [None if value is None else value / scale for value in (each.value, each.low, each.high)]
        spread = NOTHING if None in values else f"{figure(values[1])} to {figure(values[2])}"
        table.add_row(
            Text(_title(each.name)),
            Text(each.device),
            Text(f"{figure(values[0])} {unit}" if values[0] is not None else "not run"),
            Text(spread.replace(NOTHING, "-")),
            Text(str(each.n) if each.n else "-"),
            Text(one_line(each.note.removeprefix("not run: ")), style="dim"),
        )
    busy = (
        ""
        if record.busy_cores is None
        else f"; other processes used {figure(record.busy_cores)} cores just before"
    )
    if (record.busy_cores or 0.0) > BUSY_CORES:
        busy += ", so the real peak rates are higher: measure again when the machine is idle"
    return Group(
        Text("peak rates", style="bold"),
        Padding(table, (0, 0, 0, 2)),
        Text(f"  {several(record.threads, 'thread')}{busy}", style="dim"),
    )


def _unit(name: str) -> tuple[float, str]:
    if name.endswith("_flops"):
        return 1e9, "GFLOP/s"
    return (1e9, "GB/s") if name.endswith("_bytes_per_s") else (1e-3, "ms")


def _title(name: str) -> str:
    return name.removesuffix("_flops").removesuffix("_bytes_per_s").removesuffix("_s").replace("_", " ")
