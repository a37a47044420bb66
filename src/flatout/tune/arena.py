"""Where Plans meet: programs that share one baton, so that only one of them runs at any moment.

Two kinds of contest. *Live*: a lever is switched between blocks of ticks inside one running program (``trial.blocks``).
*Processes*: fresh programs take turns block by block, each of them stopped (SIGSTOP, the whole group) while another runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, compare
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import Ratio
from flatout.trial.blocks import CLEAR_LOSS, FEWEST_ROUNDS, Blocks
from flatout.trial.parent import ProgramGone, Trial

SETTLE_TICKS = 3  # of ranks: they agree on what travels between them, and learn how large it is
PLAIN = -1  # the plain program's place among the entrants of a race


@dataclass
class Entrant:
    """A running program under a Plan, with the seconds it took to become ready."""

    plan: Plan
    trial: Trial
    start_s: float


class Arena(Blocks):
    """Where ``command`` starts several ranks, ``base`` is how they are divided, and ``alone`` the command of one process."""

    def __init__(self, command: Command, job: JobFolder, facts: Facts, base: Plan | None = None, alone: Command | None = None) -> None:
        super().__init__()
        self.command, self.job, self.facts, self.base, self.alone = command, job, facts, base or Plan(), alone
        self.running: list[Trial] = []
        if alone is not None:
            self.settle_ticks = SETTLE_TICKS

    # -- programs ---------------------------------------------------------------------------------------------------

    def enter(self, plan: Plan, seed: int, patience_s: float, shake: float = 0.0, alone: bool = False) -> Entrant:
        """Start a program and bring it to its steady state; it is held when this returns. Raises ProgramGone."""
        command, under = (self.alone, plan) if alone and self.alone is not None else (self.command, plan.on_top_of(self.base))
        trial = Trial(command, self.job.new_trial(), under, self.facts, seed, reseed=True, shake=shake)
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

    # -- contests ---------------------------------------------------------------------------------------------------

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


def _lost(verdict: Ratio | str | None, rounds: int) -> bool:
    return isinstance(verdict, Ratio) and rounds >= FEWEST_ROUNDS and verdict.high < CLEAR_LOSS


def ask_options(trial: Trial) -> dict[str, Any]:
    return trial.ask({"do": "options"}, seconds() + 120)


def ask_replica(trial: Trial, choices: Sequence[Choice], patience_s: float) -> dict[str, Any]:
    answer = trial.ask({"do": "replica", "choices": [c.to_json() for c in choices]}, seconds() + patience_s)
    trial.hold()
    replica: dict[str, Any] = answer["replica"]
    return replica
