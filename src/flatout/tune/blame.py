"""Finds the lever that causes a failure. No lever is blamed if the plain program ends in the same way.

A program that failed with several levers starts again with fewer, until removing any lever makes the failure
disappear.
"""

from collections.abc import Collection, Sequence

from flatout.measure.clock import seconds
from flatout.schema.errors import error_line
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.candidates import ordered_plan
from flatout.tune.comparison import ProgramResult
from flatout.tune.endings import failure_error
from flatout.tune.tuning import Tuning

MAX_TRAINING_S = 30.0  # to see whether the plain program passes the same tick
SHORT_TRAINING_S = 3.0  # worth it even at the end of the budget
MIN_BLOCKS = 6  # of a program that finishes by itself; its blocks are shortened to allow this many


def ended_like_plain(tuning: Tuning, record: TrialRecord, ticks: int) -> bool:
    """Whether the program finished like the plain one.

    Raises ProgramFailed if it failed, and the plain program fails there too.
    """
    ticks = max(ticks, _trained_ticks(record))
    if record.status == "ended":
        _note_length(tuning, ticks)
        return True
    if record.status != "failed" or not ticks:
        return False
    if tuning.length_ticks is not None:
        return abs(ticks - tuning.length_ticks) <= 2 * tuning.interleaver.block_ticks + 1
    plain_failure = _plain_failure(tuning, ticks)
    if plain_failure is not None:
        headline = f"the program fails by itself after about {ticks} {tuning.interleaver.unit}s"
        raise failure_error(plain_failure.record, headline)
    return False


def _trained_ticks(record: TrialRecord) -> int:
    """The ticks that a program trained for, including its last, incomplete block."""
    return max(0, (len(set(record.loss_steps)) if record.unit == "step" else len(record.losses)) - 1)


def _note_length(tuning: Tuning, ticks: int) -> None:
    """Record the length of a short program: it is restarted as often as needed, with short blocks."""
    warmup_ticks = tuning.warmup_ticks
    tuning.length_ticks = max(ticks, tuning.length_ticks or 0)
    tuning.interleaver.longest_ticks = max(
        2, min(tuning.interleaver.longest_ticks, (tuning.length_ticks - warmup_ticks) // MIN_BLOCKS)
    )


def _plain_failure(tuning: Tuning, ticks: int) -> ProgramGone | None:
    """How the plain program fails shortly after this many ticks; None if it does not, or is not seen to in time."""
    interleaver, end_tick = tuning.interleaver, _tick_past_failure(tuning, ticks)
    training_s = end_tick * interleaver.tick_ms / 1000
    if tuning.max_plain_tick > end_tick or training_s > min(
        MAX_TRAINING_S, max(SHORT_TRAINING_S, tuning.remaining_s())
    ):
        return None
    tuning.stage("checking", "whether the plain program fails there too")
    failure = _failure(tuning, (), end_tick)
    return failure if isinstance(failure, ProgramGone) else None


def handle_end(tuning: Tuning, active: Collection[str], result: ProgramResult) -> None:
    """Handle a program that did not complete: ignore a regular end, otherwise leave the lever out."""
    choices = [tuning.choices[key] for key in active if key in tuning.choices]
    if result.failed_lever is not None:
        name, reason = result.failed_lever
        for choice in choices:
            if choice.name == name:
                reject(tuning, choice, reason)
    elif result.end_record is not None and not ended_like_plain(tuning, result.end_record, result.ticks):
        blame(tuning, choices, result.end_record, result.ticks)


def _tick_past_failure(tuning: Tuning, ticks: int) -> int:
    return ticks + 2 * tuning.interleaver.block_ticks + 1


def blame(tuning: Tuning, choices: Sequence[Choice], record: TrialRecord, ticks: int) -> None:
    """Reject the lever with which the program fails, or exclude the pair that does not work together."""
    suspects = [choice for choice in choices if choice.name in tuning.candidates]
    message, end_tick = (
        error_line(record.reason),
        _tick_past_failure(tuning, max(ticks, _trained_ticks(record))),
    )
    if not suspects:
        return
    while len(suspects) > 1 and seconds() < tuning.explore_until_s:
        tuning.stage("checking", f"which of {ordered_plan(suspects).describe()} makes the program fail")
        half = len(suspects) // 2
        parts = [suspects[:half], suspects[half:]] + (
            [[c for c in suspects if c is not suspect] for suspect in suspects] if len(suspects) > 2 else []
        )
        smaller = next(
            (part for part in parts if part and _failure(tuning, part, end_tick) is not None), None
        )
        if smaller is None:
            break
        suspects = smaller
    if len(suspects) == 1:
        reject(tuning, suspects[0], f"the program fails with it: {message}")
    elif len(suspects) == 2:
        tuning.exclude_pair(suspects[0].name, suspects[1].name)
        plan, why = ordered_plan(suspects).describe(), f"they do not work together: {message}"
        tuning.record_comparison(plan, "together", None, why, seconds())
    else:
        plan = ordered_plan(suspects).describe()
        untried = [c for c in suspects if c.text not in tuning.measured_keys]
        for choice in untried or suspects:  # the others have trained before
            why = (
                f"the program failed with {plan}; there was no time to find the lever responsible: {message}"
            )
            reject(tuning, choice, why)


def reject(tuning: Tuning, choice: Choice, reason: str) -> None:
    """Remove this value of a lever from the search."""
    candidate = tuning.candidates[choice.name]
    candidate.reject_value(choice.value, reason)
    tuning.drop_factor(choice.text)
    tuning.record_comparison(choice.text, "processes", None, reason, seconds())


def _failure(tuning: Tuning, choices: Sequence[Choice], ticks: int) -> ProgramGone | LeverFailed | None:
    """How the program fails with these choices within ``ticks``; None if it gets there or finishes."""
    try:
        trial = tuning.start_paused(ordered_plan(choices) if choices else Plan()).trial
    except (ProgramGone, LeverFailed) as error:
        return error
    try:
        if ticks > trial.ticks_done:
            tuning.interleaver.run(trial, ticks - trial.ticks_done)
    except ProgramGone as gone:
        return None if gone.record.status == "ended" else gone
    finally:
        tuning.interleaver.dismiss(trial)
    return None
