"""Terminal output of `flatout doctor`: problems with the commands that fix them, notes, passed checks."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from flatout.render.formatting import one_line, plural, rounded
from flatout.render.page import Table
from flatout.render.terminal import name_grid, table_grid
from flatout.schema.machine_snapshot import CeilingsRecord, CheckResult, Verdict

MAX_OTHER_CORES = 0.5  # above this load of other processes, the figures underestimate the machine
STYLES = {
    Verdict.PROBLEM: "bold red",
    Verdict.WARNING: "bold yellow",
    Verdict.NOTE: "bold",
    Verdict.NOT_CHECKED: "dim",
    Verdict.OK: "green",
}


def doctor_page(checks: Sequence[CheckResult]) -> RenderableType:
    """Return problems and warnings in full, notes with their command, and one line per theme for the rest."""
    by_verdict = {verdict: [check for check in checks if check.verdict == verdict] for verdict in Verdict}
    parts: list[RenderableType] = [_headline(by_verdict), ""]
    for verdict in (Verdict.PROBLEM, Verdict.WARNING):
        for check in by_verdict[verdict]:
            parts += [*_full_entry(check, STYLES[verdict]), ""]
    if by_verdict[Verdict.NOTE]:
        parts += [Text("notes", style="bold"), _notes(by_verdict[Verdict.NOTE]), ""]
    for verdict in (Verdict.NOT_CHECKED, Verdict.OK):
        if by_verdict[verdict]:
            parts += [Text(verdict.value, style=STYLES[verdict]), _theme_lines(by_verdict[verdict]), ""]
    return Group(*parts[:-1])


def _headline(by_verdict: Mapping[Verdict, Sequence[CheckResult]]) -> Text:
    verdicts = [verdict for verdict in (Verdict.PROBLEM, Verdict.WARNING) if by_verdict[verdict]]
    if not verdicts:
        return Text("this machine is ready", style="bold green")
    text = " and ".join(plural(len(by_verdict[verdict]), verdict.value) for verdict in verdicts)
    ready = "" if verdicts[0] == Verdict.PROBLEM else "this machine is ready, with "
    return Text(ready + text, style=STYLES[verdicts[0]])


def _full_entry(check: CheckResult, style: str) -> Iterable[RenderableType]:
    yield Text.assemble(
        (check.verdict, style), (f"  {check.code} {check.name}", "bold"), (f"  {check.theme}", "dim")
    )
    yield Padding(Text(one_line(check.observed) + ".", overflow="fold"), (0, 0, 0, 4))
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
        note = Text.assemble((f"{check.code} ", "dim"), one_line(check.observed), overflow="fold")
        lines.append(Padding(note, (0, 0, 0, 2)))
        if check.fix:
            lines.append(_command(check.fix, 8))
    return Group(*lines)


def _theme_lines(checks: Sequence[CheckResult]) -> RenderableType:
    return name_grid(
        (f"  {theme}", "; ".join(check.observed for check in members))
        for theme, members in groupby(checks, key=lambda check: check.theme)
    )


def ceilings_table(record: CeilingsRecord) -> RenderableType:
    """Return the measured ceilings with quartiles, and the reason for each missing one."""
    rows = []
    for ceiling in record.ceilings:
        scale, unit = _unit(ceiling.name)
        value, low, high = (
            rate if rate is None else rate / scale for rate in (ceiling.value, ceiling.low, ceiling.high)
        )
        best = f"{rounded(value)} {unit}" if value is not None else "not run"
        quartiles = "-" if low is None or high is None else f"{rounded(low)} to {rounded(high)}"
        note, n = ceiling.note.removeprefix("not run: "), str(ceiling.n or "-")
        rows.append((_title(ceiling.name), ceiling.device, best, quartiles, n, note))
    load = ""
    if record.busy_cores is not None:
        load = f"; other processes used {rounded(record.busy_cores)} cores just before"
        if record.busy_cores > MAX_OTHER_CORES:
            load += ", so the real peak rates are higher: measure again when the machine is idle"
    return Group(
        table_grid(Table(("peak rate", "device", ">best", ">quartiles", ">n", "how"), rows)),
        Text(f"{plural(record.threads, 'thread')}{load}", style="dim"),
    )


def _unit(name: str) -> tuple[float, str]:
    return 1e9, "GFLOP/s" if name.endswith("_flops") else "GB/s"


def _title(name: str) -> str:
    return name.removesuffix("_flops").removesuffix("_bytes_per_s").replace("_", " ")
