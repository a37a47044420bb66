"""Summary of a session in sentences and rows, shared by the terminal and the report.

Nothing here depends on colours, columns or tags, and nothing here measures. A session that failed or is still
running gives a shorter summary that says so.
"""

from flatout.render.formatting import (
    count,
    duration,
    factor,
    finite,
    interval,
    milliseconds,
    on_device,
    plural,
    rounded,
    safe_text,
    sentence,
    shell,
    size,
)
from flatout.schema.enums import Status
from flatout.schema.records import Ratio
from flatout.schema.session import (
    FASTER_BESIDE,
    GuardRecord,
    LeverRecord,
    NamedLeverRecord,
    RanksRecord,
    SessionOutcome,
    SessionRecord,
    TimeMemoryPoint,
)

MAX_DETAILS = 3000

RESULTS = {
    "same": "same results",
    "equivalent": "equivalent results",
    "failed": "but the results changed",
    "not checked": "results not checked",
}


def frontier(session: SessionRecord) -> list[TimeMemoryPoint]:
    """Return the measured points of time and memory, largest memory first."""
    return sorted(
        (point for point in session.frontier if finite(point.peak_bytes)),
        key=lambda point: -(point.peak_bytes or 0),
    )


def relative_time(point: TimeMemoryPoint) -> tuple[float, float | None, float | None]:
    """Return the step time relative to the first point, and the ends of its interval."""
    ratio = point.ratio
    if ratio is None or not (median := finite(ratio.median)):
        return 1.0, None, None
    low, high = (1 / end if end else None for end in (finite(ratio.high), finite(ratio.low)))
    return 1 / median, low, high


def headline(session: SessionRecord) -> str:
    """Return the verdict in a few words: ``1.31 times as fast, same results``."""
    gain = session.gain
    low = finite(session.speedup.low) if session.speedup else None
    likely = "probably " if low is not None and low <= 1 else ""
    results = RESULTS.get(session.guard.verdict, RESULTS["not checked"])
    speed_text = f"{likely}{factor(gain)[:-1]} times as fast, {results}"
    if gain is None and session.kept:
        speed_text = FASTER_BESIDE
    match session.outcome:
        case SessionOutcome.FAILED:
            return "The tuning failed"
        case SessionOutcome.RUNNING:
            return f"Still tuning: so far {speed_text}" if gain else "Still tuning: nothing to report yet"
        case SessionOutcome.FITS:
            speed = "beside other programs it is unknown at what speed"
            if session.speedup:
                speed = f"at {factor(session.speedup.median)[:-1]} times the speed"
            return f"Fits into {size(session.memory_limit_bytes)}, {speed}, {results}"
        case SessionOutcome.FASTER | SessionOutcome.CHANGED:
            return speed_text[0].upper() + speed_text[1:]
        case SessionOutcome.UNDECIDED:
            return "No verdict is possible now"
        case _:
            return "No faster plan found: run the program as it is"


def message(session: SessionRecord) -> str:
    """Return the tuner's message without a leading headline, or "" if it adds nothing to the headline."""
    text = sentence(session.message.strip().partition("\n")[0])
    prefix = f"{headline(session)}: "
    text = text[len(prefix) :] if text.lower().startswith(prefix.lower()) else text
    text = text[:1].upper() + text[1:]
    return "" if text.rstrip(".").lower() == headline(session).lower() else text


def details(session: SessionRecord) -> str:
    """Return the rest of the message: the last lines of a failed program's output."""
    rest = session.message.strip().partition("\n")[2].strip("\n")
    return safe_text(rest if len(rest) <= MAX_DETAILS else "… " + rest[2 - MAX_DETAILS :], MAX_DETAILS)


STATUS_ORDER: dict[str, int] = {Status.APPLIED: 0, Status.REJECTED: 1, Status.SKIPPED: 2}


def levers_in_order(session: SessionRecord) -> list[LeverRecord]:
    """Return applied, then rejected, then skipped levers, each fastest first."""
    return sorted(session.levers, key=lambda r: (STATUS_ORDER.get(r.status, 3), -(finite(r.ratio) or 0.0)))


def lever_reason(lever: LeverRecord) -> str:
    """Return the recorded reason. An applied lever without one gets a comment on its ratio."""
    if lever.reason or lever.status != Status.APPLIED:
        return lever.reason
    low = finite(lever.low)
    if low is None:
        return "measured only as part of the plan"
    return f"{'' if low > 1 else 'probably '}faster with the other levers on"


def with_interval(ratio: object, low: object, high: object, n: object) -> str:
    """Format a ratio with its interval: ``1.31x (1.28–1.35, n=6)``."""
    interval_text = interval_and_n(low, high, n)
    return factor(ratio) + (f" ({interval_text})" if interval_text else "")


def interval_and_n(low: object, high: object, n: object) -> str:
    pairs = f"n={count(n)}" if finite(n) else ""
    return ", ".join(part for part in (interval(low, high), pairs) if part)


def ratio_text(ratio: Ratio) -> str:
    """Format a ratio: ``1.80x (1.60–2.00)``. An estimate has no interval."""
    interval_text = f" ({interval(ratio.low, ratio.high)})" if ratio.low < ratio.high else ""
    return factor(ratio.median) + interval_text


LAST_SHARE = 0.1  # final losses are averaged over this share of the steps that both runs have


def named_sentence(named: NamedLeverRecord) -> str:
    """Return the speed of a plan selected by name, and its final loss next to the plain one."""
    if named.ratio is None or finite(named.ratio.median) is None:
        return sentence(f"not measured: {named.why_not}")
    speed = f"{with_interval(named.ratio.median, named.ratio.low, named.ratio.high, named.ratio.n)} as fast"
    steps = min(len(named.plain_losses), len(named.losses))
    last = max(1, round(LAST_SHARE * steps))
    last_losses = [
        [value for value in map(finite, losses[steps - last : steps]) if value is not None]
        for losses in (named.losses, named.plain_losses)
    ]
    if not all(last_losses):
        return sentence(speed)
    loss, plain = (rounded(sum(values) / len(values)) for values in last_losses)
    return f"{speed}; after {plural(steps, 'loss')} its loss is {loss}, the plain program's is {plain} (mean of the last {count(last)})."


def guard_sentence(guard: GuardRecord) -> str:
    verdict = "same, bit for bit" if guard.verdict == "same" else guard.verdict or "not checked"
    return f"{verdict}: {guard.why}" if guard.why else verdict


def payback_sentence(session: SessionRecord) -> str:
    """Return the step at which the tuned program overtakes the plain one, with the reason."""
    if not session.gain or session.guard.verdict == "failed":
        return ""
    extra_ms = (finite(session.best.warmup_ms) or 0.0) - (finite(session.baseline.warmup_ms) or 0.0)
    saved, before, after = "", finite(session.baseline.step_ms), finite(session.best.step_ms)
    if before is not None and after is not None and before > after:
        saved = f", and each step saves {milliseconds(before - after)}"
    steps = finite(session.payback_steps)
    if steps is None:
        return "The step is not known."
    if steps <= 0:
        return f"From the first step: the plan needs no extra warm-up{saved}."
    cost = "by then the warm-up has paid off"
    if extra_ms > 0:
        cost = f"the tuned program warms up for {duration(extra_ms / 1000)} longer{saved}"
    return f"At step {count(steps)}: {cost}."


def next_step(session: SessionRecord) -> tuple[str, str]:
    """Return why, and the next command for the user."""
    if not session.command:
        return ("", "")
    device = on_device(session.machine)
    command = shell([*device, *session.command])
    ranks = session.ranks
    with_ranks = f"--{'gpus' if ranks.gpus else 'procs'} {ranks.procs} " if ranks is not None else ""
    match session.outcome:
        case SessionOutcome.FASTER | SessionOutcome.FITS:
            named = f"--plan {shell([session.plan_path])} " if session.plan_path else ""
            return ("Run the real job under this plan:", f"flatout run {with_ranks}{named}{command}")
        case SessionOutcome.RUNNING:
            return ("Continue; finished measurements are reused:", f"flatout tune {with_ranks}{command}")
        case SessionOutcome.FAILED:
            return ("Fix the error above, then tune again:", f"flatout tune {with_ranks}{command}")
        case _:
            return (
                "Run it as it is:",
                f"flatout run {with_ranks}{command}" if with_ranks or device else command,
            )


def effort(session: SessionRecord) -> str:
    """Return ``14 comparisons in 9 min 40 s, of a budget of 10 min 00 s``, or "" before the first."""
    if not session.comparisons and not finite(session.spent_s):
        return ""
    text = plural(len(session.comparisons), "comparison")
    if finite(session.spent_s):
        text += f" in {duration(session.spent_s)}"
    if finite(session.budget_s):
        text += f", of a budget of {duration(session.budget_s)}"
    if session.overrun:
        text += f"; {session.overrun}"
    return text


def other_programs(session: SessionRecord) -> str:
    """Return a warning if other programs used the machine during the session, else ""."""
    text = f"{session.disturbance}; on an idle machine another plan may be the fastest"
    return text if session.disturbance else ""


def noise_floor_text(session: SessionRecord) -> str:
    """Return the noise floor as ``0.99x (0.98–1.01, n=6)``, or ""."""
    floor = session.noise_floor
    known = floor is not None and finite(floor.median) is not None
    return with_interval(floor.median, floor.low, floor.high, floor.n) if floor and known else ""


MAX_SHARE_OF_IDEAL = 1.1  # a share of ideal scaling above this is implausible


def ranks_sentence(ranks: RanksRecord) -> str:
    """Return the speed-up over one process in a sentence."""
    ranks_text, ratio = plural(ranks.procs, "rank"), ranks.ratio
    median = finite(ratio.median) if ratio is not None else None
    if ratio is None or median is None:
        return sentence(f"{ranks_text}; {ranks.why_not}") if ranks.why_not else f"{ranks_text}."
    interval_text, procs, high = interval(ratio.low, ratio.high), finite(ranks.procs), finite(ratio.high)
    shown = f" ({interval_text})" if interval_text else ""
    text = f"{ranks_text} are {factor(median)[:-1]} times as fast as one process{shown}"
    share = median / procs if procs else 0.0
    if share:
        text += f": {100 * share:.0f} % of {count(procs)} times its speed"
    if high is not None and high < 1:
        return text + ". One process is faster here: run without ranks."
    if share > MAX_SHARE_OF_IDEAL:
        text += ". Ranks alone cannot explain that: one process does not use this machine well. `flatout tune` without ranks may find out why"
    return text + "."
