"""Where Plans meet: programs that share one baton, so that only one of them runs at any moment.

Two kinds of contest. *Live*: a lever is switched between blocks of ticks inside one running program, in the order
A B B A, so both sides share the process, its memory and the neighbours' noise. *Processes*: fresh programs take turns
block by block, each of them stopped (SIGSTOP, the whole group) while another runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, block_ms, compare
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import Ratio
from flatout.trial.parent import ProgramGone, Trial

BLOCK_MS = 350.0
MOST_TICKS = 200
FEWEST_ROUNDS = 3
PATIENCE_FACTOR = 30.0  # a block that takes this many times its expected length hangs
PATIENCE_S = 60.0
LONGEST_BLOCK = 4.0  # times its expected length; a busy neighbour must not use up the budget
CATCHING_UP_S = 3.0  # what a program may be run for so that it stands at the same tick as the others
PLAIN = -1  # the plain program's place among the entrants of a race
CLEAR_LOSS = 0.99
CLEAR_WIN = 1.03


@dataclass
class Entrant:
    """A running program under a Plan, with the seconds it took to become ready."""

    plan: Plan
    trial: Trial
    start_s: float


class Arena:
    def __init__(self, command: Command, job: JobFolder, facts: Facts) -> None:
        self.command, self.job, self.facts = command, job, facts
        self.tick_ms = 1.0
        self.unit = "step"
        self.prefetched_ticks = 0
        self.running: list[Trial] = []

    # -- programs ---------------------------------------------------------------------------------------------------

    def enter(self, plan: Plan, seed: int, patience_s: float, shake: float = 0.0) -> Entrant:
        """Start a program and bring it to its steady state; it is held when this returns. Raises ProgramGone."""
        trial = Trial(self.command, self.job.new_trial(), plan, self.facts, seed, reseed=True, shake=shake)
        self.running.append(trial)
        start = seconds()
        try:
            trial.start()
            trial.wait_ready(start + patience_s)
        except BaseException:
            self.dismiss(trial)
            raise
        trial.hold()
        return Entrant(plan, trial, seconds() - start)

    def dismiss(self, trial: Trial) -> None:
        trial.close()
        if trial in self.running:
            self.running.remove(trial)

    def close(self) -> None:
        for trial in list(self.running):
            self.dismiss(trial)

    # -- blocks -----------------------------------------------------------------------------------------------------

    @property
    def block_ticks(self) -> int:
        """Ticks of one block: about a third of a second, and past what loader workers had ready beforehand."""
        ticks = round(BLOCK_MS / max(self.tick_ms, 1e-3))
        if self.tick_ms < 500:
            ticks = max(ticks, 2 * self.prefetched_ticks)
        return max(1, min(MOST_TICKS, ticks))

    @property
    def block_s(self) -> float:
        return self.block_ticks * self.tick_ms / 1000

    def _deadline(self, ticks: int) -> float:
        return seconds() + PATIENCE_S + PATIENCE_FACTOR * ticks * self.tick_ms / 1000

    def block(self, trial: Trial, from_tick: int = 0) -> float:
        """Milliseconds a tick. The first ticks of a longer block are left out: caches are cold after a pause.

        A program that has not come to ``from_tick`` yet is brought there first. Sentences, episodes and graphs differ in
        length: programs with one seed do the same work at the same tick, and are not equal at different ones.
        """
        behind = from_tick - trial.ticks_done
        if 0 < behind * self.tick_ms / 1000 <= CATCHING_UP_S:
            trial.go(behind, self._deadline(behind))
        ticks = self.block_ticks
        times = trial.go(ticks, self._deadline(ticks), LONGEST_BLOCK * max(ticks * self.tick_ms, BLOCK_MS) / 1000)
        skipped = min(max(1 if len(times) >= 4 else 0, self.prefetched_ticks), len(times) // 2)
        return block_ms(times[skipped:])

    def run(self, trial: Trial, ticks: int) -> float:
        """Run some ticks without judging them; the seconds it took."""
        start = seconds()
        trial.go(ticks, self._deadline(ticks) + 240)  # a compiler may be at work
        return seconds() - start

    def switch(self, trial: Trial, choices: Sequence[Choice], patience_s: float = PATIENCE_S) -> None:
        """Make exactly these live levers hold. Raises LeverFailed where one could not be switched on, or has given up since."""
        answer = trial.switch(choices, self._deadline(4) + patience_s)
        for left in (*answer["skipped"], *answer["reports"]):
            raise LeverFailed(left["name"], left["reason"])

    # -- contests ---------------------------------------------------------------------------------------------------

    def live(self, trial: Trial, a: Sequence[Choice], b: Sequence[Choice], until_s: float, settle_ticks: int = 1,
             heard: Callable[[Ratio], None] = lambda ratio: None) -> Ratio:
        """B against A inside one program. Ends at ``until_s``, or early when the outcome is clear; at least one round."""
        rounds: list[Round] = []
        while True:
            times: dict[str, list[float]] = {"a": [], "b": []}
            order = "abba" if self.tick_ms < 2000 else ("ab" if len(rounds) % 2 == 0 else "ba")
            held = ""
            for side in order:
                if side != held:
                    self.switch(trial, a if side == "a" else b)
                    self.run(trial, settle_ticks)
                    held = side
                times[side].append(self.block(trial))
            rounds += [Round(x, y) for x, y in zip(times["a"], times["b"], strict=True)]
            ratio = compare([rounds])
            heard(ratio)
            if seconds() >= until_s or _clear(ratio, len(rounds)):
                return ratio

    def processes(self, plain: Trial, others: Sequence[Entrant], until_s: float,
                  heard: Callable[[Entrant, Ratio], None] = lambda entrant, ratio: None) -> dict[int, Ratio | str]:
        """Each of ``others`` against one plain program, in turns. A loser leaves early; a program that dies is a sentence.

        Answers by position in ``others``.
        """
        trials = {PLAIN: plain, **{at: entrant.trial for at, entrant in enumerate(others)}}
        rounds: dict[int, list[Round]] = {at: [] for at in range(len(others))}
        verdicts: dict[int, Ratio | str] = {}
        turn = 0
        while True:
            racing = [PLAIN, *(at for at in rounds if not _lost(verdicts.get(at), len(rounds[at])))]
            if len(racing) == 1:
                return verdicts
            times: dict[int, float] = {}
            furthest = max(trials[at].ticks_done for at in racing)
            for at in racing if turn % 2 == 0 else racing[::-1]:
                try:
                    times[at] = self.block(trials[at], furthest)
                except ProgramGone as gone:
                    if at == PLAIN:  # it has come to its end: what was measured stays
                        return {at: verdicts.get(at, gone.record.reason) for at in range(len(others))}
                    if not (gone.record.status == "ended" and rounds[at]):
                        verdicts[at] = gone.record.reason
                    del rounds[at]
            for at in times.keys() & rounds.keys():
                rounds[at].append(Round(times[PLAIN], times[at]))
                verdicts[at] = ratio = compare([rounds[at]])
                heard(others[at], ratio)
            turn += 1
            if seconds() >= until_s:
                return verdicts

    def pair(self, plain: Trial, tuned: Trial, rounds: int, until_s: float) -> list[Round]:
        """One confirming pair: A B B A A B B A ... for so many rounds, ended early (never before one round) by the clock, or
        by the end of a program."""
        found: list[Round] = []
        for at in range(rounds):
            try:
                furthest = max(plain.ticks_done, tuned.ticks_done)
                if at % 2 == 0:
                    a, b = self.block(plain, furthest), self.block(tuned, furthest)
                else:
                    b, a = self.block(tuned, furthest), self.block(plain, furthest)
            except ProgramGone as gone:
                if gone.record.status == "ended" and found:
                    break
                raise
            found.append(Round(a, b))
            if seconds() >= until_s:
                break
        return found


class LeverFailed(Exception):
    """A live lever could not be switched on in the running program."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


def _clear(ratio: Ratio, rounds: int) -> bool:
    return rounds >= FEWEST_ROUNDS and (ratio.high < CLEAR_LOSS or (ratio.low > CLEAR_WIN and rounds >= 6))


def _lost(verdict: Ratio | str | None, rounds: int) -> bool:
    return isinstance(verdict, Ratio) and rounds >= FEWEST_ROUNDS and verdict.high < CLEAR_LOSS


def ask_options(trial: Trial) -> dict[str, Any]:
    return trial.ask({"do": "options"}, seconds() + 120)


def ask_replica(trial: Trial, choices: Sequence[Choice], patience_s: float) -> dict[str, Any]:
    answer = trial.ask({"do": "replica", "choices": [c.to_json() for c in choices]}, seconds() + patience_s)
    trial.hold()
    replica: dict[str, Any] = answer["replica"]
    return replica
