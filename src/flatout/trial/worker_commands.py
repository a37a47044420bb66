"""Carries out the parent's commands between two ticks."""

from __future__ import annotations

import os
from typing import Any

from flatout.guard.replica import StepReplica
from flatout.measure.clock import seconds
from flatout.measure.statistics import median
from flatout.schema.lever import Options
from flatout.trial.fetching import fetches
from flatout.trial.rank_sync import choices_of
from flatout.trial.worker_record import WorkerRecord


class WorkerCommands(WorkerRecord):
    """Carries out one command after another until the program is to run steps again."""

    def _obey(self) -> None:
        while True:
            due = self.ranks.take_due()
            command = due or self._next_command()
            do = command["do"]
            if due is None and self.ranks.concerns_all(command):
                self.ranks.tell(command, self.context.steps + self.ranks.lead_steps)
                self.block_left, self.block_until_s = self.ranks.lead_steps, float("inf")
                break
            if do == "go":
                self.block_left = int(command["ticks"])
                self.block_until_s = seconds() + float(command.get("seconds", "inf"))
                break
            if do == "replica":
                # The replica's copies of the model do not belong to the program
                self.peak_bytes = self._peak_bytes()
                self.replica = StepReplica(
                    self.context,
                    self.applier,
                    choices_of(command["choices"]),
                    median(self.ticks_ms),
                    bool(command.get("rest", True)),
                )
                self.block_left = 0
                break
            if do == "listen":
                failed = self.listening.begin(command)
                if self.listening.probe is not None:
                    self.block_left = self.listening.probe.ticks
                    self.block_until_s = seconds() + (
                        float("inf") if command.get("everywhere") else float(command.get("seconds", "inf"))
                    )
                    break
                self._answer({"why_not": failed})
                continue
            if do == "finish":
                self._finish(bool(command.get("draws")))
            self._answer(self._do(do, command))
        self.phases._open.clear()
        self.clock.settle()
        self.tick_start = self.clock.mark()

    def _do(self, do: str, command: dict[str, Any]) -> dict[str, Any]:
        if do == "switch":
            outcomes = self.applier.switch(choices_of(command["choices"]))
            # Reports of other levers stay for the record
            switched = {choice["name"] for choice in command["choices"]}
            reports = [report for report in self.context.reports if report[0] in switched]
            self.context.reports = [report for report in self.context.reports if report[0] not in switched]
            return {
                "applied": [o.to_json() for o in outcomes if o.applied],
                "skipped": [o.to_json() for o in outcomes if not o.applied],
                "ticks": self.ranks.lead_steps if self.ranks.several else 0,
                "reports": [{"name": name, "reason": sentence} for name, sentence in reports],
            }
        if do == "options":
            answers = self.applier.options()
            return {
                "options": {
                    name: {"values": list(a.values), "effect": a.effect}
                    if isinstance(a, Options)
                    else {"skip": a.reason}
                    for name, a in answers.items()
                },
                "context": self.context.describe(),
            }
        if do == "watch":
            if self.watch is None:
                return {"error": "this trial runs without the monitor"}
            info = self.watch.summary()
            self.watch.start_window()
            return info
        if do == "record":
            return {"record": self.record("running", "").to_json()}
        if do == "fetch":
            return {"fetches": fetches(self.torch, self.context)}
        return {"error": f"unknown command {do!r}"}

    def _observed(self) -> dict[str, Any]:
        """Return the results of the probe, of all ranks if they ran it together."""
        everywhere = self.listening.probe is not None and self.listening.probe.requested.get("everywhere")
        recorded = self.listening.end()
        return self.ranks.reached_by_all(recorded) if everywhere else recorded

    def _finish(self, draws: bool) -> None:
        if draws:
            self.context.asleep = True  # this loader is not the program's
            self.drawn = self.draws.take()
            self.context.asleep = False
        self.write_record("finished", "stopped after the requested steps")
        self._answer({"written": True, "pid": os.getpid()})
        self.stopping = True
        raise StopTrial


class StopTrial(SystemExit):
    """Ends the program silently with exit code 0; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)
