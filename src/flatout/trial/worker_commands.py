"""Carries out the parent's commands between two ticks.

A tick is one step, or one backward pass if a step is a closure that lasts seconds.
"""

from __future__ import annotations

import os
from itertools import chain, islice, repeat
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.agent.frames import is_user_file, place_of
from flatout.guard.replica import StepReplica
from flatout.measure.clock import HostClock, seconds
from flatout.measure.cores import move_to
from flatout.measure.line_timer import LineTimer
from flatout.measure.statistics import median
from flatout.schema.lever import Options
from flatout.trial.worker_record import WorkerRecord, choices_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.schema.program import TrainingContext


# Times batches inside the data set and finds the slow line.
#
# Fetches some batches again, in the program's own thread. Runs at the end of a trial, because it advances
# random generators and the data set's own state.

MAX_BATCHES = 6
MAX_S = 2.0
MAX_LOADERS = 4


def time_fetches(torch: ModuleType, context: TrainingContext) -> list[dict[str, Any]]:
    """The place of each live loader, its milliseconds a batch, and its slowest line with its share."""
    timings = []
    context.paused = True
    try:
        for loader in context.live_loaders[:MAX_LOADERS]:
            number = context.number_of_loader(loader)
            made_at = context.loaders[number]["place"] if number is not None else None
            try:
                timings.append({"made_at": made_at, **_fetch(torch, loader)})
            except Exception as error:  # the data set's own error: it may need a worker, for example
                timings.append({"made_at": made_at, "why_not": f"{type(error).__name__}: {error}"})
    finally:
        context.paused = False
    return timings


def _fetch(torch: ModuleType, loader: DataLoader) -> dict[str, Any]:
    kinds = torch.utils.data.dataloader._DatasetKind
    fetcher = kinds.create_fetcher(
        loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    epochs = chain.from_iterable(
        repeat(loader._index_sampler, 2 * MAX_BATCHES)
    )  # an epoch may have one batch
    clock, until_s, times = HostClock(), seconds() + MAX_S / 2, []
    for index in islice(epochs, MAX_BATCHES):
        start = clock.mark()
        fetcher.fetch(index)
        times.append(clock.elapsed_ms(start, clock.mark()))
        if seconds() > until_s:
            break
    until_s = seconds() + MAX_S / 2
    with LineTimer(is_user_file) as timer:
        for index in islice(epochs, MAX_BATCHES):
            if seconds() > until_s:
                break
            fetcher.fetch(index)
    if not times:
        return {}
    slowest = timer.ns.most_common(1)
    place = place_of(slowest[0][0]) if slowest else None
    return {
        "fetch_ms": median(times),
        "slow_place": place.to_json() if place else None,
        "slow_share": slowest[0][1] / max(1, timer.ns.total()) if slowest else None,
    }


def run_commands(worker: WorkerRecord) -> None:
    """Carry out one command after another until the program is to run steps again."""
    while True:
        pending = worker.ranks.take_pending()
        command = pending or worker.next_command()
        name = command["do"]
        if pending is None and worker.ranks.is_for_all(command):
            worker.ranks.announce(command, worker.context.steps + worker.ranks.announce_ahead_steps)
            worker.ticks_left, worker.block_until_s = worker.ranks.announce_ahead_steps, float("inf")
            break
        if name == "run":
            worker.ticks_left = int(command["ticks"])
            worker.block_until_s = seconds() + float(command.get("seconds", "inf"))
            if command.get("core") is not None and not worker.ranks.multi_rank:
                move_to(command["core"])
            break
        if name == "replica":
            # The replica's copies of the model do not belong to the program
            worker.peak_bytes = worker.current_peak()
            worker.replica = StepReplica(
                worker.context,
                worker.applier,
                choices_of(command["choices"]),
                median(worker.ticks_ms),
                bool(command.get("remaining", True)),
                worker.unit,
            )
            worker.ticks_left = 0
            break
        if name == "probe":
            why_not = worker.active_probe.begin(command)
            if worker.active_probe.probe is not None:
                worker.ticks_left = worker.active_probe.probe.ticks
                worker.block_until_s = seconds() + float(command.get("seconds", "inf"))
                break
            worker.send({"why_not": why_not})
            continue
        if name == "finish":
            finish(worker, bool(command.get("fetch_samples")))
        worker.send(_execute(worker, name, command))
    worker.phases._started.clear()
    worker.clock.synchronize()
    worker.start_tick()


def _execute(worker: WorkerRecord, name: str, command: dict[str, Any]) -> dict[str, Any]:
    if name == "switch":
        outcomes = worker.applier.switch(choices_of(command["choices"]))
        # Reports of other levers stay for the record
        switched = {choice["name"] for choice in command["choices"]}
        reports = [report for report in worker.context.reports if report[0] in switched]
        worker.context.reports = [report for report in worker.context.reports if report[0] not in switched]
        return {
            "applied": [o.to_json() for o in outcomes if o.applied],
            "skipped": [o.to_json() for o in outcomes if not o.applied],
            "ticks": worker.ranks.announce_ahead_steps if worker.ranks.multi_rank else 0,
            "reports": [{"name": name, "reason": sentence} for name, sentence in reports],
        }
    if name == "options":
        answers = worker.applier.options()
        return {
            "options": {
                name: {"values": list(options.values), "effect": options.effect}
                if isinstance(options, Options)
                else {"skip": options.reason}
                for name, options in answers.items()
            },
            "context": worker.context.describe(),
        }
    if name == "monitor":
        if worker.monitor is None:
            return {"error": "this trial runs without the monitor"}
        summary = worker.monitor.summary()
        worker.monitor.start_window()
        return summary
    if name == "record":
        return {"record": worker.record("running", "").to_json()}
    if name == "fetch":
        return {"fetches": time_fetches(worker.torch, worker.context)}
    return {"error": f"unknown command {name!r}"}


def finish(worker: WorkerRecord, fetch_samples: bool = False) -> NoReturn:
    if fetch_samples:
        # This loader is not the program's, nor are the reports about it
        worker.context.paused, reports = True, list(worker.context.reports)
        worker.fetched_samples = worker.sample_probe.fetch()
        worker.context.paused, worker.context.reports = False, reports
    worker.write_record("finished", "stopped after the requested steps")
    worker.send({"written": True, "pid": os.getpid()})
    worker.stopping = True
    raise StopTrial


class StopTrial(SystemExit):
    """Ends the program silently with exit code 0; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)
