"""The page of a session, for the terminal and as HTML."""

from collections.abc import Sequence

from flatout.render import formatting, machine, summary
from flatout.render.formatting import MISSING, factor, finite, is_positive, milliseconds, per_second, size
from flatout.render.losses import loss_figure
from flatout.render.page import (
    PAGE,
    TERMINAL,
    Cell,
    Figure,
    Page,
    PagePart,
    Paragraph,
    Section,
    Table,
    dateline,
)
from flatout.render.phases import ProgramPhases, phase_section
from flatout.render.plot import Interval, Plot, intervals, ratio_scale, ratio_ticks
from flatout.schema.enums import Status
from flatout.schema.records import CONFIDENCE
from flatout.schema.session import LeverRecord, ProgramFigures, SessionOutcome, SessionRecord

MAX_LEVERS_DRAWN = 40  # levers
MORE_MEMORY = 10  # percent; more is explained

EFFECTS = {
    "exact": "The results stay the same, bit for bit.",
    "rounding": "The same maths with different rounding, in the same number format.",
    "precision": "The same maths, with products or communication in half precision.",
    "resampled": "The same distribution, different random draws.",
    "changes_math": "Changes the maths.",
}
GUARD_OUTCOMES = {  # text, note and kind of a cell
    True: ("passed", "", "applied"),
    False: ("failed", "", "rejected"),
    None: ("not made", "", "skipped"),
}
METHODS = {"live": "switched live", "processes": "interleaved processes"}
GOOD_OUTCOMES = (SessionOutcome.FASTER, SessionOutcome.FITS)
BAD_OUTCOMES = (SessionOutcome.FAILED, SessionOutcome.CHANGED)
RATIO_NOTE = (
    "Trust the ratio with its interval: it comes from interleaved pairs. The other figures are taken over all runs of each program; "
    "on a noisy machine their quotient differs from the ratio."
)


def session_page(session: SessionRecord) -> Page:
    """Return the page, a shorter one for a session that failed or is still running."""
    sections = [
        _before_and_after(session),
        _ranks(session),
        _phases(session),
        _frontier(session),
        *_levers(session),
        _guard(session),
        _named_levers(session),
        _summary(session),
    ]
    if session.comparisons:
        sections.append(_comparisons(session))
    sections.append(Section("The machine and the program", [Table((), machine.facts(session))], PAGE))
    return Page(
        "tuning report",
        summary.headline(session),
        "session.json",
        sections,
        summary.message(session),
        summary.details(session),
        session.command,
        dateline(session.created, machine.device(session)),
        "good" if session.outcome in GOOD_OUTCOMES else "bad" if session.outcome in BAD_OUTCOMES else "",
        summary.next_step(session),
        session.flatout,
    )


def _best(session: SessionRecord) -> ProgramFigures:
    """Return the figures of the best plan. Without one, the record repeats the plain figures."""
    return ProgramFigures() if session.speedup is None else session.best


def _before_and_after(session: SessionRecord) -> Section:
    plain, best, ratio = session.baseline, _best(session), session.speedup
    change: str | Cell = ""
    if ratio is not None and finite(ratio.median) is not None:
        change = Cell(factor(ratio.median), summary.interval_and_n(ratio.low, ratio.high, ratio.n))
    # A warm-up of exactly zero was not measured: the first step of any program is slower than the rest.
    warmups = [
        formatting.duration(side.warmup_ms / 1000) if finite(side.warmup_ms) else MISSING
        for side in (plain, best)
    ]
    rows: list[tuple[str, str, str, str | Cell]] = [
        (
            f"time of a {plain.unit or 'step'}",
            milliseconds(plain.step_ms),
            milliseconds(best.step_ms),
            change,
        ),
        ("throughput", per_second(plain.samples_per_s), per_second(best.samples_per_s), ""),
        (
            "peak memory of the process",
            size(plain.peak_memory_bytes),
            size(best.peak_memory_bytes),
            _change(plain.peak_memory_bytes, best.peak_memory_bytes, session.memory_reason),
        ),
        ("warm-up", warmups[0], warmups[1], ""),
    ]
    rows = [row for row in rows if row[1:3] != (MISSING, MISSING)]
    if all(row[2] == MISSING for row in rows):
        return Section("The program as it is", [Table((), [row[:2] for row in rows])])
    emphasised = [(name, before, Cell(after, kind="strong"), change) for name, before, after, change in rows]
    return Section(
        "Before and after",
        [Table(("", ">plain", ">tuned", "change"), emphasised), Paragraph(RATIO_NOTE, "note")],
    )


def _ranks(session: SessionRecord) -> Section:
    text = summary.ranks_sentence(session.ranks) if session.ranks else ""
    return Section("Ranks compared with one process", [Paragraph(text, "verdict")])


def _change(before: object, after: object, why_more: str) -> Cell:
    a, b = finite(before), finite(after)
    if not a or b is None:
        return Cell("")
    change = round(100 * (b - a) / abs(a))
    text = f"{change:+,d} %".replace("-", "−") if change else "unchanged"
    return Cell(text, why_more if change >= MORE_MEMORY else "")


def _phases(session: SessionRecord) -> Section:
    plain, best = session.baseline, _best(session)
    sides = [
        ProgramPhases.read(name, figures.phases, figures.step_ms)
        for name, figures in (("plain", plain), ("tuned", best))
    ]
    before, after = (side.phases for side in sides)
    changes = {
        name: f"{formatting.signed(after[name].median_ms - before[name].median_ms, 1)} ms"
        for name in before.keys() & after.keys()
    }
    unit = plain.unit or "step"
    return phase_section(f"Where the time of a {unit} goes", sides, changes, PAGE, unit)


def _frontier(session: SessionRecord) -> Section:
    rows = []
    for point in summary.frontier(session):
        time, low, high = summary.relative_time(point)
        interval = f" ({formatting.interval(low, high)})" if low is not None and high is not None else ""
        outcome = "chosen" if point.chosen else "fits" if point.fits else "does not fit"
        rows.append((point.plan, size(point.peak_bytes), factor(time) + interval, outcome))
    limit = f", of {size(session.memory_limit_bytes)}" if session.memory_limit_bytes else ""
    columns = ("plan", f">peak of the tensors in a step{limit}", "time of a step", "outcome")
    return Section("Time against memory", [Table(columns, rows)])


def _levers(session: SessionRecord) -> list[Section]:
    """Return the levers for the page, and for the terminal those that were measured or applied."""
    ordered = summary.levers_in_order(session)
    tried = [lever for lever in ordered if lever.status != Status.SKIPPED]
    skipped = formatting.plural(len(ordered) - len(tried), "lever")
    left_out = f"{skipped} left out; `flatout levers --why` says why" if len(ordered) > len(tried) else ""
    columns = ("lever", "outcome", "ratio", "reason")
    page: list[PagePart] = [
        Figure(
            speedup_plot(session, ordered),
            "Speed-up of each lever with the rest of the plan on: the dot is the ratio, the line its interval. A full dot was kept, a "
            "hollow one was not. Right of 1x is faster. A grey band shows how much two processes of the plain program may differ.",
        ),
        Table(columns, [_lever_row(lever, detailed=True) for lever in ordered]),
    ]
    return [
        Section("Speed-up of each lever", page, PAGE),
        Section("", [Table(columns, [_lever_row(lever) for lever in tried]), Paragraph(left_out)], TERMINAL),
    ]


def speedup_plot(session: SessionRecord, levers: Sequence[LeverRecord]) -> Plot | None:
    """Return the speed-ups of the measured levers, with the whole plan last. None without data."""
    rows = []
    for lever in [lever for lever in levers if is_positive(lever.ratio)][:MAX_LEVERS_DRAWN]:
        kind = "kept" if lever.status == Status.APPLIED else "dropped"
        rows.append(_interval(formatting.lever(lever.name, lever.value), kind, lever))
    if not rows:
        return None
    total, floor = session.speedup, session.noise_floor
    if total and is_positive(total.median):
        plan = LeverRecord("", None, "", total.median, total.low, total.high)
        rows.append(_interval("all together", "total", plan))
    band = (floor.low, floor.high) if floor and is_positive(floor.low) and is_positive(floor.high) else None
    bounds = [v for row in rows for v in (row.value, row.low, row.high) if v is not None]
    scale = ratio_scale([*bounds, *(band or ())])
    ticks = [(tick, f"{tick:g}x") for tick in ratio_ticks(scale)]
    label = "Speed-up of each lever: " + "; ".join(row.text for row in rows)
    return intervals(label, rows, scale, ticks, band)


def _interval(name: str, kind: str, lever: LeverRecord) -> Interval:
    low, high = (
        float(end) if end is not None and is_positive(end) else None for end in (lever.low, lever.high)
    )
    interval = formatting.interval(low, high)
    text = f"{name}  {factor(lever.ratio)}{f' ({interval})' if interval else ''}"
    return Interval(text, float(lever.ratio or 1), low, high, kind)


def _lever_row(lever: LeverRecord, detailed: bool = False) -> tuple[str | Cell, ...]:
    known = finite(lever.ratio) is not None
    n = lever.n if detailed else None
    ratio = summary.with_interval(lever.ratio, lever.low, lever.high, n) if known else ""
    reason = summary.lever_reason(lever)
    if not detailed:
        return (
            formatting.lever(lever.name, lever.value),
            Cell(lever.status, kind=_status(lever)),
            ratio,
            reason,
        )
    return (
        Cell(lever.name, "" if lever.value is None else formatting.setting(lever.value), "code"),
        Cell(lever.status, kind=_status(lever)),
        Cell(ratio, METHODS.get(lever.how, lever.how) if known else ""),
        Cell(reason, EFFECTS.get(lever.effect, lever.effect) if lever.status != Status.SKIPPED else ""),
    )


def _status(lever: LeverRecord) -> str:
    return lever.status if lever.status in set(Status) else "skipped"


def _guard(session: SessionRecord) -> Section:
    guard = session.guard
    chart = loss_figure(guard.plain_losses, guard.tuned_losses)
    tones = {"same": " good", "equivalent": " good", "failed": " bad"}
    rows = []
    for check in guard.checks:
        figures = formatting.short(check.value), formatting.short(check.limit)
        rows.append((check.name, Cell(*GUARD_OUTCOMES[check.passed]), *figures, check.why))
    shown = rows or chart is not None or session.outcome in (*GOOD_OUTCOMES, SessionOutcome.CHANGED)
    sentence = summary.guard_sentence(guard) if shown else ""
    verdict = Paragraph(sentence, "verdict" + tones.get(guard.verdict, ""))
    table = Table(("check", "result", ">value", ">limit", "explanation"), rows)
    return Section("Does it still learn the same?", [verdict, chart, table], PAGE)


def _named_levers(session: SessionRecord) -> Section:
    parts: list[Paragraph | Figure | None] = [
        Paragraph(
            "These levers change what the model learns, so the tuner never chooses them. Each ran interleaved with the plain program, "
            "from the same seed and over the same steps.",
            "note",
        )
    ]
    for named in session.named_levers:
        parts.append(Paragraph(f"With `{named.plan}`: {summary.named_sentence(named)}"))
        parts.append(loss_figure([named.plain_losses], [named.losses], ("plain", "with the lever")))
    return Section("Levers selected by name", parts)


def _summary(session: SessionRecord) -> Section:
    noise = summary.noise_floor_text(session)
    noise = noise and f"{noise}: two processes of the plain program may differ by this much"
    rows = (
        ("guard", summary.guard_sentence(session.guard)),
        ("pays back", summary.payback_sentence(session)),
        ("tried", summary.effort(session)),
        ("more", session.obstacle if session.kept else ""),
        ("other programs", summary.other_programs(session)),
        ("noise floor", noise),
    )
    return Section("Summary", [Table((), [row for row in rows if row[1]])])


def _comparisons(session: SessionRecord) -> Section:
    effects = ", ".join(effect.replace("_", " ") for effect in session.effects)
    how = (
        "No ratio here compares one run with a later one: the speed of a computer varies. Levers were switched block by block in one program, "
        "or spread over many short processes that started together. One regression over all blocks gives the expected factor of each lever, with "
        f"the rest of the plan on. The speed of the plan is that of its fresh pairs alone. Intervals: {CONFIDENCE:.0%}. Only levers with these effects were considered: {effects or 'none'}."
    )
    return Section(
        "How it was measured",
        [Paragraph(how), Paragraph(f"{summary.effort(session)}; session.json has each of them.")],
        PAGE,
    )
