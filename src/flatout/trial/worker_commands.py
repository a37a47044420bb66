"""Carries out the parent's commands between two ticks."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from flatout.guard.replica import StepReplica
from flatout.measure.clock import seconds
from flatout.measure.cores import move_to
from flatout.measure.statistics import median
from flatout.schema.lever import Options
from flatout.trial.fetching import fetches
from flatout.trial.rank_sync import choices_of
from flatout.trial.worker_record import WorkerRecord


def obey(worker: WorkerRecord) -> None:
    """Carry out one command after another until the program is to run steps again."""
    while True:
        due = worker.ranks.take_due()
        command = due or worker.next_command()
        do = command["do"]
        if due is None and worker.ranks.concerns_all(command):
            worker.ranks.tell(command, worker.context.steps + worker.ranks.lead_steps)
            worker.block_left, worker.block_until_s = worker.ranks.lead_steps, float("inf")
            break
        if do == "go":
            worker.block_left = int(command["ticks"])
            worker.block_until_s = seconds() + float(command.get("seconds", "inf"))
            if command.get("core") is not None and not worker.ranks.several:
                move_to(command["core"])
            break
        if do == "replica":
            # The replica's copies of the model do not belong to the program
            worker.peak_bytes = worker.peak_now()
            worker.replica = StepReplica(
                worker.context,
                worker.applier,
                choices_of(command["choices"]),
                median(worker.ticks_ms),
                bool(command.get("rest", True)),
            )
            worker.block_left = 0
            break
        if do == "listen":
            failed = worker.listening.begin(command)
            if worker.listening.probe is not None:
                worker.block_left = worker.listening.probe.ticks
                worker.block_until_s = seconds() + float(command.get("seconds", "inf"))
                break
            worker.answer({"why_not": failed})
            continue
        if do == "finish":
            finish(worker, bool(command.get("draws")))
        worker.answer(_do(worker, do, command))
    worker.phases._started.clear()
    worker.clock.synchronize()
    worker.tick_start = worker.clock.mark()


def _do(worker: WorkerRecord, do: str, command: dict[str, Any]) -> dict[str, Any]:
    if do == "switch":
        outcomes = worker.applier.switch(choices_of(command["choices"]))
        # Reports of other levers stay for the record
        switched = {choice["name"] for choice in command["choices"]}
        reports = [report for report in worker.context.reports if report[0] in switched]
        worker.context.reports = [report for report in worker.context.reports if report[0] not in switched]
        return {
            "applied": [o.to_json() for o in outcomes if o.applied],
            "skipped": [o.to_json() for o in outcomes if not o.applied],
            "ticks": worker.ranks.lead_steps if worker.ranks.several else 0,
            "reports": [{"name": name, "reason": sentence} for name, sentence in reports],
        }
    if do == "options":
        answers = worker.applier.options()
        return {
            "options": {
                name: {"values": list(a.values), "effect": a.effect}
                if isinstance(a, Options)
                else {"skip": a.reason}
                for name, a in answers.items()
            },
            "context": worker.context.describe(),
        }
    if do == "watch":
        if worker.watch is None:
            return {"error": "this trial runs without the monitor"}
        info = worker.watch.summary()
        worker.watch.start_window()
        return info
    if do == "record":
        return {"record": worker.record("running", "").to_json()}
    if do == "fetch":
        return {"fetches": fetches(worker.torch, worker.context)}
    return {"error": f"unknown command {do!r}"}


def finish(worker: WorkerRecord, draws: bool = False) -> NoReturn:
    if draws:
        worker.context.asleep = True  # this loader is not the program's
        worker.drawn = worker.draws.take()
        worker.context.asleep = False
    worker.write_record("finished", "stopped after the requested steps")
    worker.answer({"written": True, "pid": os.getpid()})
    worker.stopping = True
    raise StopTrial


class StopTrial(SystemExit):
    """Ends the program silently with exit code 0; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)
