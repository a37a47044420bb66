"""Find the levers that speed up the steps of this training.

Blocks of real steps run with and without a lever (A B B A). This module is pure: the caller reports the time
of each step, and the search returns the levers for the next one. Levers are tried one after another on top of
those already kept. A lever is kept if the whole interval of its ratio is a gain, so a tie goes to the plain
program. The number of steps is bounded by the budget, whatever the times are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from flatout.measure.statistics import Round, block_ms, compare
from flatout.schema.enums import Effect
from flatout.schema.plan import Choice, Plan, spell
from flatout.schema.records import Ratio
from flatout.trial.blocks import BLOCK_MS, FEWEST_ROUNDS, decided

SHARE = 0.2  # of the coming steps
MOST_STEPS = 600
FEWEST_OF_A_BLOCK, MOST_OF_A_BLOCK = 2, 50
SWITCHES = 2  # in A B B A; the step after each is not timed
WORTH_A_LEVER = 1.01  # smaller gains are not worth a lever
PLAIN_STEPS = 3  # to measure the length of a step
NEEDS_MEMORY = "a step ran out of memory with it"


@dataclass(frozen=True)
class TuningSample:
    """``failed``: why the requested levers were not active in this step, or why it had to be repeated."""

    ms: float
    failed: str = ""


@dataclass(frozen=True)
class Tried:
    """The result of one lever.

    ``ratio``: how many times as fast it makes a step; None if it was not measured.
    """

    choice: Choice
    effect: Effect
    kept: bool
    reason: str
    ratio: Ratio | None = None

    @property
    def evidence(self) -> str:
        return (
            f"{self.ratio.median:.3g} times as fast [{self.ratio.low:.3g}, {self.ratio.high:.3g}] in the first steps of a run"
            if self.ratio
            else ""
        )

    def sentence(self) -> str:
        name = spell(self.choice.name, self.choice.value)
        return f"{name} {'is kept' if self.kept else 'is not used'}: {', '.join(filter(None, (self.evidence, self.reason)))}"


@dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    ``plan`` holds the levers that are kept, ``tried`` all levers, ``steps`` the number of steps used. Each of
    these steps trained.
    """

    plan: Plan
    tried: tuple[Tried, ...]
    steps: int

    def sentence(self) -> str:
        return f"tuned in {self.steps} steps: {self.plan.describe()}"


Search = Generator[tuple[Choice, ...], TuningSample, list[Tried]]
Check = Callable[[Sequence[Choice], Effect], str]


def bound(coming: int | None) -> int:
    """The number of steps to use out of ``coming`` ones; None if their number is unknown."""
    return MOST_STEPS if coming is None else min(MOST_STEPS, int(SHARE * coming))


def search(candidates: Sequence[tuple[Choice, Effect]], steps: int, check: Check) -> Search:
    """Yields the levers for the next step, receives its result, and returns the result of each candidate.

    ``check(choices, effect)`` returns why these levers together must not be used, or "". It runs before a
    step uses them.
    """
    held: list[Choice] = []
    found: list[Tried] = []
    plain = []
    for _ in range(PLAIN_STEPS if steps > PLAIN_STEPS else 0):
        plain.append((yield ()).ms)
    left = steps - len(plain)
    for at, (choice, effect) in enumerate(candidates):
        share = left // (len(candidates) - at)
        block = _block(share, sorted(plain)[len(plain) // 2] if plain else 1.0)
        if block is None:
            found.append(Tried(choice, effect, False, "too few steps remain to measure it"))
            continue
        refused = check([*held, choice], effect)
        if refused:
            found.append(Tried(choice, effect, False, refused))
            continue
        tried, used = yield from _comparison(tuple(held), choice, effect, block, share)
        left -= used
        found.append(tried)
        if tried.kept:
            held.append(choice)
    return found


def _round(block: int) -> int:
    return 4 * block + SWITCHES


def _block(share: int, step_ms: float) -> int | None:
    """Timed steps per block, such that enough rounds fit into the share; None if none fit."""
    most = (share // FEWEST_ROUNDS - SWITCHES) // 4
    if most < FEWEST_OF_A_BLOCK:
        return None
    return max(FEWEST_OF_A_BLOCK, min(most, MOST_OF_A_BLOCK, round(BLOCK_MS / max(step_ms, 1e-3))))


def _comparison(
    held: tuple[Choice, ...], choice: Choice, effect: Effect, block: int, share: int
) -> Generator[tuple[Choice, ...], TuningSample, tuple[Tried, int]]:
    rounds: list[Round] = []
    used, last = 0, "a"
    while used + _round(block) <= share:
        times: dict[str, list[float]] = {"a": [], "b": []}
        for side in "abba":
            holds = held if side == "a" else (*held, choice)
            seen = []
            for step in range(block + (side != last)):
                metadata = yield holds
                used += 1
                if metadata.failed and side == "b":
                    return Tried(choice, effect, False, metadata.failed), used
                if side == last or step:
                    seen.append(metadata.ms)
            last = side
            times[side].append(block_ms(seen))
        rounds += [Round(a, b) for a, b in zip(times["a"], times["b"], strict=True)]
        if decided(compare([rounds]), len(rounds) // 2):
            break
    ratio = compare([rounds])
    kept = ratio.certain and ratio.median >= WORTH_A_LEVER
    return Tried(
        choice,
        effect,
        kept,
        "" if kept else "slower here" if ratio.high < 1.0 else "no speed-up beyond the noise",
        ratio,
    ), used
