"""Blocks of ticks in a running program, and contests between two states of it: levers switched in the order A B B A.

Both sides of such a contest share the process, its memory and the neighbours' noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, block_ms, compare
from flatout.plan.plan import Choice
from flatout.plan.records import Ratio
from flatout.trial.parent import Trial

BLOCK_MS = 350.0
MOST_TICKS = 200
FEWEST_ROUNDS = 3
PATIENCE_FACTOR = 30.0  # a block that takes this many times its expected length hangs
PATIENCE_S = 60.0
LONGEST_BLOCK = 4.0  # times its expected length; a busy neighbour must not use up the budget
CATCHING_UP_S = 3.0  # what a program may be run for so that it stands at the same tick as the others
SLOW_TICK_MS = 2000.0  # from here on a round is one block a side
PREFETCHED_BATCHES = 3  # a loader worker has two batches ready and one in hand
CLEAR_LOSS = 0.99
CLEAR_WIN = 1.03


class LeverFailed(Exception):
    """A live lever could not be switched on in the running program."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


class Watcher:
    """What a person in front of a search or a profile sees. Every method does nothing."""

    def stage(self, name: str, detail: str = "") -> None: ...
    def until(self, end_s: float) -> None: ...
    def expect(self, sentence: str) -> None: ...
    def contest(self, plan: str, ratio: Ratio | None, note: str = "") -> None: ...


def decided(ratio: Ratio, rounds: int) -> bool:
    """Whether further rounds could not change who wins."""
    return rounds >= FEWEST_ROUNDS and (ratio.high < CLEAR_LOSS or (ratio.low > CLEAR_WIN and rounds >= 6))


class Blocks:
    """How long a block of this program is, and how blocks are compared."""

    def __init__(self) -> None:
        self.tick_ms = 1.0
        self.unit = "step"
        self.prefetched_ticks = 0
        self.longest_ticks = MOST_TICKS  # of one block: fewer where the program ends soon
        self.settle_ticks = 1  # after a switch, until the program goes as it will

    @property
    def block_ticks(self) -> int:
        """Ticks of one block: about a third of a second, and past what loader workers had ready beforehand."""
        ticks = round(BLOCK_MS / max(self.tick_ms, 1e-3))
        if self.tick_ms < 500:
            ticks = max(ticks, 2 * self.prefetched_ticks)
        return max(1, min(self.longest_ticks, ticks))

    @property
    def window_ticks(self) -> int:
        """A block and what comes before it, so that programs of one seed stay at the same tick: an epoch's end falls into the same window of each."""
        return self.block_ticks + (self.settle_ticks if self.tick_ms < SLOW_TICK_MS else 0)

    @property
    def block_s(self) -> float:
        return self.block_ticks * self.tick_ms / 1000

    def deadline(self, ticks: int) -> float:
        """When so many ticks have hung."""
        return seconds() + PATIENCE_S + PATIENCE_FACTOR * ticks * self.tick_ms / 1000

    def block(self, trial: Trial, from_tick: int = 0) -> float:
        """Milliseconds a tick. The first ticks of a longer block are left out: caches are cold after a pause.

        A program that has not come to ``from_tick`` yet is brought there first. Sentences, episodes and graphs differ in
        length: programs with one seed do the same work at the same tick, and are not equal at different ones.
        """
        self.catch_up(trial, from_tick)
        ticks = self.block_ticks
        times = trial.go(ticks, self.deadline(ticks), LONGEST_BLOCK * max(ticks * self.tick_ms, BLOCK_MS) / 1000)
        skipped = min(max(1 if len(times) >= 4 else 0, self.prefetched_ticks), len(times) // 2)
        return block_ms(times[skipped:])

    def catch_up(self, trial: Trial, to_tick: int) -> None:
        """Run a program to a tick, where that takes no more than a few seconds."""
        behind = to_tick - trial.ticks_done
        if 0 < behind * self.tick_ms / 1000 <= CATCHING_UP_S:
            trial.go(behind, self.deadline(behind))

    def run(self, trial: Trial, ticks: int) -> float:
        """Run some ticks without judging them; the seconds it took."""
        start = seconds()
        trial.go(ticks, self.deadline(ticks) + 240)  # a compiler may be at work
        return seconds() - start

    def switch(self, trial: Trial, choices: Sequence[Choice], patience_s: float = PATIENCE_S) -> None:
        """Make exactly these live levers hold. Raises LeverFailed where one could not be switched on, or has given up since."""
        answer = trial.switch(choices, self.deadline(4) + patience_s)
        for left in (*answer["skipped"], *answer["reports"]):
            raise LeverFailed(left["name"], left["reason"])

    def live(self, trial: Trial, a: Sequence[Choice], b: Sequence[Choice], until_s: float, settle_ticks: int = 1,
             heard: Callable[[Ratio], None] = lambda ratio: None, enough: Callable[[Ratio, int], bool] = decided) -> Ratio:
        """B against A inside one program. Ends at ``until_s``, or early when ``enough(ratio, rounds)``; at least one round."""
        rounds: list[Round] = []
        while True:
            times: dict[str, list[float]] = {"a": [], "b": []}
            order = "abba" if self.tick_ms < SLOW_TICK_MS else ("ab" if len(rounds) % 2 == 0 else "ba")
            held = ""
            for side in order:
                if side != held:
                    self.switch(trial, a if side == "a" else b)
                    self.run(trial, max(settle_ticks, self.settle_ticks))
                    held = side
                times[side].append(self.block(trial))
            rounds += [Round(x, y) for x, y in zip(times["a"], times["b"], strict=True)]
            ratio = compare([rounds])
            heard(ratio)
            if seconds() >= until_s or enough(ratio, len(rounds)):
                return ratio
