"""Finds the lever that causes a failure. No lever is blamed if the plain program ends in the same way.

A program that failed with several levers starts again with fewer, until removing any lever makes the failure
disappear.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flatout.measure.clock import seconds
from flatout.schema.errors import last_line
from flatout.schema.plan import Choice, Plan, spell
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.candidates import in_order
from flatout.tune.comparison import ProgramResult
from flatout.tune.gone import program_failed
from flatout.tune.tuning import Tuning

LONGEST_S = 30.0  # of training, to see whether the plain program passes the same tick
FEWEST_BLOCKS = 6  # of a program that finishes by itself; its blocks are shortened to allow this many


def came_to_its_end(tuning: Tuning, gone: TrialRecord, ticks: int) -> bool:
    """Whether the program finished like the plain one.

    Raises ProgramFailed if it failed, and the plain program fails there too.
    """
    ticks = max(ticks, _trained(gone))
    if gone.status == "ended":
        _note_length(tuning, ticks)
        return True
    if gone.status != "failed" or not ticks:
        return False
    if tuning.length_ticks is not None:
        return abs(ticks - tuning.length_ticks) <= 2 * tuning.interleaver.block_ticks + 1
    own = _plain_failure(tuning, ticks)
    if own is not None:
        raise program_failed(
            own.record, f"the program fails by itself after about {ticks} {tuning.interleaver.unit}s"
        )
    return False


def _trained(gone: TrialRecord) -> int:
    """Return the ticks that a program trained for, including its last, incomplete block."""
    return max(0, (len(set(gone.loss_steps)) if gone.unit == "step" else len(gone.losses)) - 1)


def _note_length(tuning: Tuning, ticks: int) -> None:
    """Record the length of a short program: it is restarted as often as needed, with short blocks."""
    warm = tuning.warm_ticks
    tuning.length_ticks = max(ticks, tuning.length_ticks or 0)
    tuning.interleaver.longest_ticks = max(
        2, min(tuning.interleaver.longest_ticks, (tuning.length_ticks - warm) // FEWEST_BLOCKS)
    )


def _plain_failure(tuning: Tuning, ticks: int) -> ProgramGone | None:
    """Return how the plain program fails shortly after this many ticks; None if it does not, or is not seen to in time."""
    interleaver, beyond = tuning.interleaver, _beyond(tuning, ticks)
    if tuning.furthest_plain > beyond or beyond * interleaver.tick_ms / 1000 > LONGEST_S:
        return None
    tuning.watcher.stage("checking", "whether the plain program fails there too")
    failed = _failure(tuning, (), beyond)
    return failed if isinstance(failed, ProgramGone) else None


def program_ended(tuning: Tuning, on: Collection[str], seen: ProgramResult) -> None:
    """Handle a program that did not complete: ignore a regular end, otherwise leave the lever out."""
    choices = [tuning.choices[key] for key in on if key in tuning.choices]
    if seen.left_out is not None:
        name, reason = seen.left_out
        for choice in choices:
            if choice.name == name:
                reject(tuning, choice, reason)
    elif seen.gone is not None and not came_to_its_end(tuning, seen.gone, seen.ticks):
        blame(tuning, choices, seen.gone, seen.ticks)


def _beyond(tuning: Tuning, ticks: int) -> int:
    """Return a tick that is certainly after the failure of a program last seen at ``ticks``."""
    return ticks + 2 * tuning.interleaver.block_ticks + 1


def blame(tuning: Tuning, choices: Sequence[Choice], gone: TrialRecord, ticks: int) -> None:
    """Reject the lever with which the program fails, or exclude the pair that does not work together."""
    guilty = [choice for choice in choices if choice.name in tuning.candidates]
    said, beyond = last_line(gone.reason), _beyond(tuning, max(ticks, _trained(gone)))
    if not guilty:
        return
    while len(guilty) > 1 and seconds() < tuning.explore_until_s:
        tuning.watcher.stage("checking", f"which of {in_order(guilty).describe()} makes the program fail")
        half = len(guilty) // 2
        parts = [guilty[:half], guilty[half:]] + (
            [[c for c in guilty if c is not one] for one in guilty] if len(guilty) > 2 else []
        )
        smaller = next((part for part in parts if part and _failure(tuning, part, beyond) is not None), None)
        if smaller is None:
            break
        guilty = smaller
    if len(guilty) == 1:
        reject(tuning, guilty[0], f"the program fails with it: {said}")
    elif len(guilty) == 2:
        tuning.forbid(guilty[0].name, guilty[1].name)
        tuning.note(
            in_order(guilty).describe(), "together", None, f"they do not work together: {said}", seconds()
        )
    else:
        for choice in guilty:
            reject(
                tuning,
                choice,
                f"the program failed with {in_order(guilty).describe()}; there was no time to find the lever responsible: {said}",
            )


def reject(tuning: Tuning, choice: Choice, reason: str) -> None:
    """Remove this value of a lever from the search."""
    candidate = tuning.candidates[choice.name]
    candidate.without(choice.value, reason)
    tuning.drop(spell(choice.name, choice.value))
    tuning.note(spell(choice.name, choice.value), "processes", None, reason, seconds())


def _failure(tuning: Tuning, choices: Sequence[Choice], ticks: int) -> ProgramGone | LeverFailed | None:
    """Return how the program fails with these choices within ``ticks``; None if it gets there or finishes."""
    try:
        trial = tuning.enter(in_order(choices) if choices else Plan()).trial
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
