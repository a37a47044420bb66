"""The page of `flatout compare`, for the terminal and as HTML."""

from collections.abc import Sequence

from flatout.render.formatting import (
    MISSING,
    duration,
    finite,
    milliseconds,
    one_line,
    per_second,
    plural,
    rounded,
    sentence,
    shell,
    signed,
    size,
)
from flatout.render.losses import loss_figure
from flatout.render.page import BOTH, PAGE, TERMINAL, Cell, Page, Paragraph, Section, Table, dateline, notes
from flatout.render.phases import ProgramPhases, phase_section
from flatout.render.profile_page import place_of
from flatout.schema.compare import Blame, BlameRow, Change, CompareRecord, SideRecord

Row = tuple[str, str, str, str]
AGAINST_A_BASELINE = (
    "A is a stored baseline, measured earlier in processes of its own. The interval covers the difference between processes, but not what "
    "has changed on the machine since: its load, temperature and clock. To exclude those, compare revisions or commands, which alternate."
)
IN_PAIRS = (
    "Both programs ran in pairs of fresh processes with the same seed. Blocks of steps alternated, A B B A, while the other program was "
    "stopped. Two processes of one program differ for their whole life, so the interval is that of the mean over pairs."
)
MAX_INTERVAL_SHARE = 10.0  # a share; an interval beyond it says nothing
GATE_STATUS = {"passed": "applied", "failed": "rejected", "cannot tell": "skipped"}
TRAINING = {
    "same": "B learns the same as A",
    "equivalent": "B learns the same as A, up to rounding",
    "different": "B learns something else than A",
    "cannot tell": "Cannot tell whether B learns the same as A",
}
LOSS_TONE = {"same bits": " good", "within the spread": " good", "different": " bad"}


def headline(record: CompareRecord) -> str:
    """Say in one line whether B is faster or slower, with the interval."""
    change = record.step_time
    if change is None or finite(change.value) is None:
        return "Nothing was compared"
    interval = f"({_interval_text(change)}, n={change.n})"
    if not change.significant:
        return f"No difference in step time beyond the noise {interval}"
    direction = "slower" if change.value > 0 else "faster"
    if record.disturbance:
        return f"B is {direction} beside other programs, cannot tell how much: {record.disturbance}"
    return f"B is {direction}: {change_text(change.value)} time per {_unit(record)} {interval}"


def change_text(share: float) -> str:
    """Format a share: ``+5.1 %``."""
    value = finite(share)
    if value is None:
        return MISSING
    return f"{signed(100 * value, 0 if abs(value) >= 1 else 1)} %"


def _unit(record: CompareRecord) -> str:
    return one_line(record.b.unit if record.b is not None else "step", 24)


def _with_interval(change: Change | None) -> str:
    """Format a change with its interval: ``+5.1 % (+4.2 to +6.0)``."""
    if change is None:
        return ""
    return change_text(change.value) + (f" ({interval})" if (interval := _interval_text(change)) else "")


def _interval_text(change: Change) -> str:
    if finite(change.high) is None or change.high > MAX_INTERVAL_SHARE:
        return "too few pairs for an interval"
    low, high = change_text(change.low), change_text(change.high)
    return "" if MISSING in (low, high) else f"{low.removesuffix(' %')} to {high.removesuffix(' %')}"


def rows(record: CompareRecord) -> list[Row]:
    """Return rows of name, A, B and change."""
    a, b = _sides(record)
    table: list[Row] = [
        (
            f"time of a {_unit(record)}",
            milliseconds(a.step_ms),
            milliseconds(b.step_ms),
            _with_interval(record.step_time),
        ),
        ("throughput", per_second(a.samples_per_s), per_second(b.samples_per_s), ""),
        ("start-up, until steady", duration(a.start_s), duration(b.start_s), _with_interval(record.start)),
        ("peak memory", size(a.peak_memory_bytes), size(b.peak_memory_bytes), _with_interval(record.memory)),
        *(
            (name, a.versions.get(name, MISSING), b.versions.get(name, MISSING), "")
            for name in sorted({*a.versions, *b.versions})
            if a.versions.get(name) != b.versions.get(name)
        ),
    ]
    return [row for row in table if row[1:3] != (MISSING, MISSING)]


def _changes(record: CompareRecord) -> dict[str, str]:
    return {
        name: f"{signed(value, 2)} ms ({signed(low, 2)} to {signed(high, 2)})"
        for name, (value, low, high) in record.phases_ms.items()
    }


def _sides(record: CompareRecord) -> tuple[SideRecord, SideRecord]:
    assert record.a is not None
    assert record.b is not None
    return record.a, record.b


def compare_page(record: CompareRecord, terminal_lines: Sequence[str] = ()) -> Page:
    """Return the page. ``terminal_lines``: lines of the terminal, at the end."""
    a, b = _sides(record)
    change = record.step_time
    slower, faster = change is not None and change.low > 0, change is not None and change.high < 0
    phases = [ProgramPhases.read(name, side.phases, side.step_ms) for name, side in (("A", a), ("B", b))]
    results = (Cell(gate.verdict, kind=GATE_STATUS.get(gate.verdict, "skipped")) for gate in record.gates)
    gate_rows = [
        (gate.name, gate.limit, cell, sentence(gate.why))
        for gate, cell in zip(record.gates, results, strict=True)
    ]
    losses = record.losses
    loss_verdict = Paragraph(
        f"{losses.verdict}: {sentence(losses.why)}", "verdict" + LOSS_TONE.get(losses.verdict, "")
    )
    sections = [
        Section("", [Table((), [_label(name, side) for name, side in (("A", a), ("B", b))])]),
        Section("Gates", [Table(("gate", "limit", "result", "explanation"), gate_rows)]),
        Section("Training", [Paragraph(*_training(record))] if record.training is not None else []),
        *(_blame_sections(record, record.blame) if record.blame is not None else ()),
        Section("A and B", [Table(("", ">A", ">B", "change"), rows(record))]),
        phase_section("Where the time of a step goes", phases, _changes(record), BOTH),
        Section("Losses", [loss_verdict, loss_figure(*_loss_curves(a, b), ("A", "B"))]),
        notes(map(sentence, record.notes)),
        Section("", [Paragraph(line) for line in terminal_lines], TERMINAL),
        Section(
            "How it was measured", [Paragraph(AGAINST_A_BASELINE if record.baseline else IN_PAIRS)], PAGE
        ),
    ]
    return Page(
        "comparison",
        headline(record),
        "compare.json",
        sections,
        dateline=dateline(
            record.created,
            record.machine.get("machine", ""),
            record.device,
            f"{plural(b.processes, 'process')} of B",
            f"measured in {duration(record.seconds)}",
        ),
        tone="bad" if record.gate_failed or slower else "good" if faster else "",
        version=record.flatout,
    )


def _blame_sections(record: CompareRecord, blame: Blame) -> list[Section]:
    blamed = [row for row in blame.rows if row.blamed]
    rest = 1 - sum(row.share for row in blamed)
    table = [
        (
            _ms_text(row),
            f"{100 * row.share:.0f} %",
            f"{rounded(row.a_calls)} -> {rounded(row.b_calls)}",
            f"{row.before} -> {row.name}: {row.change}" if row.before else f"{row.name}: {row.change}",
            Cell(place_of(row.place, record.cwd), row.place.text if row.place is not None else ""),
        )
        for row in blamed
    ]
    if table:
        table.append((signed(rest * blame.ms, 3), f"{100 * rest:.0f} %", "", "all others", Cell("")))
    whole = Paragraph(f"{_ms_text(blame)} ms per {_unit(record)}: {blame.verdict}.", "verdict")
    columns = (">ms", ">share", ">calls", "what changed", "where")
    parts = Section("What accounts for the difference, B - A", [whole, Table(columns, table)])
    return [parts, notes((one_line(line, 160) for line in blame.settings), "Settings that differ")]


def _ms_text(part: Blame | BlameRow) -> str:
    return f"{signed(part.ms, 3)} ({signed(part.low, 3)} to {signed(part.high, 3)})"


def _training(record: CompareRecord) -> tuple[str, str]:
    assert record.training is not None
    verdict = record.training.verdict
    tone = {"different": " bad", "cannot tell": ""}.get(verdict, " good")
    return f"{TRAINING[verdict]}: {sentence(record.training.why)}", f"verdict{tone}"


def _label(name: str, side: SideRecord) -> tuple[str, Cell]:
    command, revision = shell(side.command), one_line(side.revision, 12)
    details = [command if command != side.label else "", revision if revision not in side.label else ""]
    return name, Cell(side.label, ", ".join(filter(None, details)))


def _loss_curves(a: SideRecord, b: SideRecord) -> tuple[list[list[float]], list[list[float]]]:
    seeds = [(a.losses[seed], b.losses[seed]) for seed in a.losses if seed in b.losses]
    return [first[: len(second)] for first, second in seeds], [
        second[: len(first)] for first, second in seeds
    ]
