"""Monitors a whole program during a profile, besides its steps: loaders, garbage collection, call counters.

It makes only a few calls a step, so it does not disturb step times.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.call_counters import CallCounters
from flatout.agent.frames import Line, place_of, users_line
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.measure.clock import HostClock
from flatout.measure.load import private_bytes
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import LoaderSeen
from flatout.trial.compiled import compiled
from flatout.trial.settings import settings

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.data import DataLoader

    from flatout.schema.program import TrainingContext

FEW_CALLS = 64  # enough to know where the model is called


class ProgramMonitor(Listener):
    """Monitors the program; ``summary`` covers the time since ``start_window`` or the whole run."""

    def __init__(self, torch: ModuleType, context: TrainingContext, ledger: Ledger) -> None:
        self.torch, self.context = torch, context
        self.clock = HostClock()
        self.counters = CallCounters(torch, ledger, self.clock.mark)
        self.counters.install()
        gc.callbacks.append(self._collects)
        ledger.call("gc callback", lambda: gc.callbacks.remove(self._collects))
        self._collecting: int | None = None
        self._waiting: int | None = None
        self._beginning: int | None = None
        self._in_evaluation: int | None = None
        self._evaluated: Counter[Line | None] = Counter()
        self._evaluated_ms = 0.0
        self._called: Counter[Line | None] = Counter()  # lines that call the model for training
        self._walked: Counter[Line | None] = Counter()  # lines that begin a backward pass
        self._begun: Counter[int] = Counter()
        self._batches: Counter[int] = Counter()
        # Id of an iterator -> its loader's number, its start, whether its first batch came
        self._of: dict[int, tuple[int, int, bool]] = {}
        self._started_ms: dict[int, list[float]] = {}
        self._workers: dict[int, list[int]] = {}
        self.start_window()

    def start_window(self) -> None:
        self._first_step = self.context.steps
        self._pauses_ms: list[float] = []
        self._waits_ms: dict[int, float] = {}

    # -- events ---------------------------------------------------------------------------------------------------------

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = self.clock.mark()
        elif self._collecting is not None:
            self._pauses_ms.append(self.clock.elapsed_ms(self._collecting, self.clock.mark()))
            self._collecting = None

    def iterator_begin(self, loader: DataLoader) -> None:
        self._beginning = self.clock.mark()

    def iterator_end(self, loader: DataLoader, iterator: object) -> None:
        number = self.context.number_of_loader(loader)
        if number is not None and self._beginning is not None:
            self._begun[number] += 1
            self._of[id(iterator)] = number, self._beginning, False
            self._workers[number] = [worker.pid for worker in getattr(iterator, "_workers", ())]

    def data_begin(self, iterator: object) -> None:
        self._waiting = self.clock.mark()

    def data_end(self, iterator: object, batch: object) -> None:
        known = self._of.get(id(iterator))
        if known is None or self._waiting is None:
            return
        number, began, first_came = known
        now = self.clock.mark()
        self._batches[number] += 1
        self._waits_ms[number] = self._waits_ms.get(number, 0.0) + self.clock.elapsed_ms(self._waiting, now)
        if not first_came:
            self._started_ms.setdefault(number, []).append(self.clock.elapsed_ms(began, now))
            self._of[id(iterator)] = number, began, True

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._in_evaluation = None if root.training else self.clock.mark()
        if self._called.total() < FEW_CALLS:
            self._called[users_line(sys._getframe(1))] += 1

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        if self._walked.total() < FEW_CALLS:
            self._walked[users_line(sys._getframe(1))] += 1

    def forward_end(self, root: Module, output: object) -> None:
        if self._in_evaluation is not None:
            self._evaluated[users_line(sys._getframe(1))] += 1
            self._evaluated_ms += self.clock.elapsed_ms(self._in_evaluation, self.clock.mark())
            self._in_evaluation = None

    # -- summary --------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        steps = max(1, self.context.steps - self._first_step)
        whole = max(1, self.context.steps)
        events = self.counters.seen(whole)
        if self._evaluated:
            places = [
                place.to_json()
                for line, _ in self._evaluated.most_common(5)
                if (place := place_of(line)) is not None
            ]
            events["eval_with_grad"] = {
                "calls": self._evaluated.total() / whole,
                "ms": self._evaluated_ms / whole,
                "places": places,
            }
        for name, lines in (("forward", self._called), ("backward", self._walked)):
            events[name] = {
                "calls": 1.0,
                "ms": 0.0,
                "places": [
                    place.to_json()
                    for line, _ in lines.most_common(3)
                    if (place := place_of(line)) is not None
                ],
            }
        seen = compiled()
        return {
            "settings": settings(self.torch, self.context),
            "compiled": seen.to_json() if seen is not None else None,
            "gc_ms": sum(self._pauses_ms) / steps,
            "gc_longest_ms": max(self._pauses_ms, default=0.0),
            "gc_calls": len(self._pauses_ms) / steps,
            "events": events,
            "loaders": [seen.to_json() for seen in self._loaders(steps)],
        }

    def _loaders(self, steps: int) -> list[LoaderSeen]:
        """Return one entry for each place in the script that makes loaders, in the order of creation."""
        found: dict[Any, LoaderSeen] = {}
        for number, made in enumerate(self.context.loaders):
            place = SourceLocation.from_json(made["place"]) if made.get("place") else None
            key = (place.file, place.line) if place is not None else number
            if key not in found:
                same = {
                    name: made[name]
                    for name in (
                        "pin_memory",
                        "persistent_workers",
                        "prefetch_factor",
                        "batch_size",
                        "dataset",
                    )
                }
                found[key] = LoaderSeen(place, made=0, workers=made["num_workers"], **same)
            seen = found[key]
            seen.made += 1
            starts = self._started_ms.get(number, [])
            seen.start_ms = (seen.start_ms * seen.begun + sum(starts)) / max(1, seen.begun + len(starts))
            seen.begun += self._begun[number]
            seen.batches += self._batches[number]
            seen.wait_ms += self._waits_ms.get(number, 0.0) / steps
            sizes = [private_bytes(pid) for pid in self._workers.get(number, ())]
            if any(sizes):
                seen.worker_bytes = sum(size for size in sizes if size)
        return list(found.values())
