"""Monitors a whole program during a profile, besides its steps: loaders, garbage collection, call counters.

It makes only a few calls a step, so it does not disturb step times.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.call_counters import CallCounters
from flatout.agent.frames import Line, is_users, place_at, place_of, users_line
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.measure.clock import HostClock
from flatout.measure.load import private_bytes
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import CompileRecord, LoaderRecord

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from flatout.schema.program import TrainingContext

FEW_CALLS = 64  # enough to know where the model is called
# Temporary hooks with which flatout finds root modules; not caused by the program
OF_OURS = "._global_forward_"
IN_A_REASON = re.compile(r'File "([^"]+)", line (\d+)')
OF_AN_OPTIMIZER = (
    "lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "momentum",
    "weight_decay",
)


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

    def _loaders(self, steps: int) -> list[LoaderRecord]:
        """Return one entry for each place in the script that makes loaders, in the order of creation."""
        found: dict[Any, LoaderRecord] = {}
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
                found[key] = LoaderRecord(place, created=0, workers=made["num_workers"], **same)
            seen = found[key]
            seen.created += 1
            starts = self._started_ms.get(number, [])
            seen.start_ms = (seen.start_ms * seen.iterators + sum(starts)) / max(
                1, seen.iterators + len(starts)
            )
            seen.iterators += self._begun[number]
            seen.batches += self._batches[number]
            seen.wait_ms += self._waits_ms.get(number, 0.0) / steps
            sizes = [private_bytes(pid) for pid in self._workers.get(number, ())]
            if any(sizes):
                seen.worker_bytes = sum(size for size in sizes if size)
        return list(found.values())


def compiled() -> CompileRecord | None:
    """Return what torch.compile did, from torch's counters; None if nothing was compiled. Loads nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not dynamo.counters["frames"].get("total"):
        return None
    breaks = dynamo.counters.get("graph_break", {})
    found = CompileRecord(
        graphs=int(dynamo.counters["stats"].get("unique_graphs", 0)), breaks=int(sum(breaks.values()))
    )
    found.reasons = [_sentence(reason) for reason, _ in breaks.most_common(8)] if breaks else []
    lines = []
    for metrics in list(getattr(dynamo, "_compilation_metrics", ())):
        file, line = getattr(metrics, "co_filename", None), getattr(metrics, "co_firstlineno", None)
        found.ms += 1000 * (getattr(metrics, "entire_frame_compile_time_s", None) or 0.0)
        reason = getattr(metrics, "recompile_reason", None)
        if reason and OF_OURS not in reason:
            found.recompiles += 1
            found.reasons.append(f"recompiled: {_sentence(reason)}")
            if file and line and is_users(file):
                lines.append((file, line))
    for reason in breaks:
        lines += [(file, int(line)) for file, line in IN_A_REASON.findall(reason) if is_users(file)]
    found.reasons = list(dict.fromkeys(found.reasons))[:12]
    found.places = [place_at(file, line) for file, line in dict.fromkeys(lines)]
    return found


def _sentence(reason: str) -> str:
    return " ".join(reason.strip().split("\n")[0].split())[:240]


def settings(torch: ModuleType, context: TrainingContext) -> dict[str, Any]:
    """Return the settings as JSON, without those that this version of torch does not report."""
    modules = [module for root in context.roots for module in root.modules()]
    found: dict[str, Any] = {
        "anomaly": bool(torch.is_anomaly_enabled()),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "gc": gc.isenabled(),
        "autocast": bool(context.autocast_seen),
        "scalers": len(context.scalers),
        "compiled": bool(context.compiled_by_script),
        "optimizers": [_optimizer(optimizer) for optimizer in context.optimizers],
        "modules": dict(Counter(type(module).__name__ for module in modules)),
        "training": {
            "train": sum(module.training for module in modules),
            "eval": sum(not module.training for module in modules),
        },
        "dtypes": {},
        "devices": sorted({str(p.device) for p in context.parameters}),
        "gradient_bytes": _gradients(context),
    }
    for parameter in context.parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        found["dtypes"][name] = found["dtypes"].get(name, 0) + parameter.numel() * parameter.element_size()
    with suppress(RuntimeError):  # set in both ways
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return found


def _gradients(context: TrainingContext) -> list[int]:
    """Bytes of each gradient, in the order expected of the backward pass: modules in reverse."""
    known = {id(p): p for root in context.roots for p in root.parameters() if p.requires_grad}
    known.update({id(p): p for p in context.parameters if id(p) not in known})
    return [p.numel() * p.element_size() for p in reversed(known.values())]


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    info = {
        name: group[name]
        for name in OF_AN_OPTIMIZER
        if isinstance(group.get(name), (bool, int, float, type(None))) and name in group
    }
    tensors = [p for each in optimizer.param_groups for p in each["params"]]
    return {
        "kind": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "groups": len(optimizer.param_groups),
        "tensors": len(tensors),
        "parameters": sum(p.numel() for p in tensors),
        **info,
    }
