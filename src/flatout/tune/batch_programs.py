"""The programs of `flatout batch`: one per size, as many alive as memory allows, one running at a time."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.schema.batch import BatchRecord
from flatout.schema.enums import Origin
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.batch_visit import TIMEOUT_S, BatchTrial, DidNotRun, did_not_run
from flatout.tune.gone import why_gone

TURNS = 4  # of each program in a pass
MOST_TOGETHER = 8


class Programs:
    """Starts, pauses, interleaves and ends programs.

    ``costs_s`` is the cost of starting a program, by size; errors go to ``record``.
    """

    def __init__(
        self, command: Command, job: JobFolder, facts: Facts, record: BatchRecord, end_s: float
    ) -> None:
        self.command, self.job, self.facts, self.record = command, job, facts, record
        self.end_s = end_s
        self.costs_s: dict[int, float] = {}
        self.alive: list[BatchTrial] = []  # paused and ready to be measured
        self.copies = 1
        self.prefetched = 0

    def own(self) -> Trial:
        """Return the program as it is, not started yet."""
        return Trial(self.command, self.job.new_trial(), Plan(), self.facts)

    def enter(self, size: int) -> BatchTrial:
        """Return a program at this size, steady and paused. Raises DidNotRun."""
        plan = (
            Plan()
            if size == self.record.own
            else Plan(
                (Choice("batch_size", {"size": size, "loader": self.record.loader or 0}, Origin.TUNER),)
            )
        )
        trial = Trial(self.command, self.job.new_trial(), plan, self.facts)
        start_s = seconds()
        try:
            trial.start()
            ready = trial.wait_ready(max(self.end_s, start_s + TIMEOUT_S))
            self.copies = ready["copies"]
            seen = trial.ask({"do": "record"}, seconds() + TIMEOUT_S)["record"]
            got = next(
                (loader["batch_size"] for loader in seen["context"]["loaders"][self.record.loader or 0 :]),
                None,
            )
            if got != size:
                said = [each["reason"] for each in seen["skipped"] if each["name"] == "batch_size"]
                raise DidNotRun(
                    "failed", said[0] if said else f"the training loader still has batches of {got} samples"
                )
            trial.hold()
        except ProgramGone as gone:
            trial.close()
            raise did_not_run(gone.record) from None
        except BaseException:
            trial.close()
            raise
        self.costs_s[size] = seconds() - start_s
        self.alive.append(BatchTrial(size, trial, self.costs_s[size], ready["tick_ms"], self.prefetched))
        return self.alive[-1]

    def keep(self, visit: BatchTrial) -> None:
        """Keep it alive if memory has room for it and one more."""
        if len(self.alive) > self.together or self.copies <= 2:
            self.dismiss([visit])

    def dismiss(self, visits: Sequence[BatchTrial]) -> None:
        for visit in list(visits):
            visit.trial.close()
            if visit in self.alive:
                self.alive.remove(visit)

    @property
    def together(self) -> int:
        return 0 if self.record.device != "cpu" else MOST_TOGETHER

    def entered(self, left: list[int]) -> list[BatchTrial]:
        """Start programs of the first sizes in ``left`` and remove these sizes from it."""
        group: list[BatchTrial] = []
        while left and (not group or (len(group) < self.together and self.copies > 2)):
            try:
                group.append(self.enter(left.pop(0)))
            except DidNotRun as error:
                self.record.notes.append(f"a program with another batch size did not restart: {error.why}")
        return group

    def take_turns(self, group: list[BatchTrial]) -> list[BatchTrial]:
        """Measure the programs forwards and backwards, then end them."""
        try:
            for visit in group:
                visit.turns.clear()
            for turn in range(TURNS):
                for visit in group if turn % 2 == 0 else group[::-1]:
                    visit.turn()
        except ProgramGone as gone:
            self.record.notes.append(f"a program ended while it was being measured: {why_gone(gone)}")
        finally:
            self.dismiss(group)
        return [visit for visit in group if visit.turns]
