"""Which levers make the steps of this very training faster: blocks of real steps with a lever and without it, in the order A B B A.

Pure: who searches is told how long each step took, and says which levers are to hold for the next one. Levers are tried one after another on top of
those that have won. One wins where the whole interval of its ratio is a gain, so a tie goes to the plain program. The number of steps is bounded by
what is asked for, whatever the times are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from flatout.measure.statistics import Round, block_ms, compare
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.records import Ratio
from flatout.plan.words import Effect
from flatout.trial.blocks import BLOCK_MS, FEWEST_ROUNDS, decided

SHARE = 0.2  # of the steps that are to come
MOST_STEPS = 600
FEWEST_OF_A_BLOCK, MOST_OF_A_BLOCK = 2, 50
SWITCHES = 2  # in A B B A; the step after each is not timed
WORTH_A_LEVER = 1.01  # a smaller gain is not worth one
PLAIN_STEPS = 3  # that tell how long a step is
NEEDS_MEMORY = "a step ran out of memory with it"


@dataclass(frozen=True)
class StepSeen:
    """``failed`` says why the levers that were to hold for this step did not, or why it had to be done again."""

    ms: float
    failed: str = ""


@dataclass(frozen=True)
class Tried:
    """How one lever ended. ``ratio`` is how many times as fast a step is with it; None where it was not measured."""

    choice: Choice
    effect: Effect
    kept: bool
    reason: str
    ratio: Ratio | None = None

    @property
    def evidence(self) -> str:
        return f"{self.ratio.median:.3g} times as fast [{self.ratio.low:.3g}, {self.ratio.high:.3g}] in the first steps of a run" if self.ratio else ""

    def sentence(self) -> str:
        name = spell(self.choice.name, self.choice.value)
        return f"{name} {'stays' if self.kept else 'is left out'}: {', '.join(filter(None, (self.evidence, self.reason)))}"


@dataclass(frozen=True)
class Tuned:
    """``plan`` holds what stays, ``tried`` every lever there is, ``steps`` those that were used; each of them trained."""

    plan: Plan
    tried: tuple[Tried, ...]
    steps: int

    def sentence(self) -> str:
        return f"tuned in {self.steps} steps: {self.plan.describe()}"


Search = Generator[tuple[Choice, ...], StepSeen, list[Tried]]
Check = Callable[[Sequence[Choice], Effect], str]


def bound(coming: int | None) -> int:
    """Steps that may be used, of ``coming`` ones; None where nobody knows how many there will be."""
    return MOST_STEPS if coming is None else min(MOST_STEPS, int(SHARE * coming))


def search(candidates: Sequence[tuple[Choice, Effect]], steps: int, check: Check) -> Search:
    """Yields what is to hold for the next step, is sent how it went, and returns how each candidate ended.

    ``check(choices, effect)`` says in a sentence why these levers together may not be used, or nothing. It is asked before a step is made with them.
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
            found.append(Tried(choice, effect, False, "too few steps are to come to measure it in"))
            continue
        refused = check([*held, choice], effect)
        if refused:
            found.append(Tried(choice, effect, False, refused))
            continue
        tried, used = yield from _contest(tuple(held), choice, effect, block, share)
        left -= used
        found.append(tried)
        if tried.kept:
            held.append(choice)
    return found


def _round(block: int) -> int:
    return 4 * block + SWITCHES


def _block(share: int, step_ms: float) -> int | None:
    """Timed steps of a block, such that enough rounds fit into the share; None where not even the shortest do."""
    most = (share // FEWEST_ROUNDS - SWITCHES) // 4
    if most < FEWEST_OF_A_BLOCK:
        return None
    return max(FEWEST_OF_A_BLOCK, min(most, MOST_OF_A_BLOCK, round(BLOCK_MS / max(step_ms, 1e-3))))


def _contest(held: tuple[Choice, ...], choice: Choice, effect: Effect, block: int, share: int) -> Generator[tuple[Choice, ...], StepSeen, tuple[Tried, int]]:
    rounds: list[Round] = []
    used, last = 0, "a"
    while used + _round(block) <= share:
        times: dict[str, list[float]] = {"a": [], "b": []}
        for side in "abba":
            holds = held if side == "a" else (*held, choice)
            seen = []
            for step in range(block + (side != last)):
                told = yield holds
                used += 1
                if told.failed and side == "b":
                    return Tried(choice, effect, False, told.failed), used
                if side == last or step:
                    seen.append(told.ms)
            last = side
            times[side].append(block_ms(seen))
        rounds += [Round(a, b) for a, b in zip(times["a"], times["b"], strict=True)]
        if decided(compare([rounds]), len(rounds) // 2):
            break
    ratio = compare([rounds])
    kept = ratio.certain and ratio.median >= WORTH_A_LEVER
    return Tried(choice, effect, kept, "" if kept else "slower here" if ratio.high < 1.0 else "no gain that stands out from the noise", ratio), used
