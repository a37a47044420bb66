"""Monitors a whole program during a profile: loaders, garbage collection, call counters. It does not disturb steps."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.call_counters import CallCounters
from flatout.agent.compilers import compile_record
from flatout.agent.frames import Line, place_of, user_line
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.measure.clock import HostClock
from flatout.measure.load import private_bytes
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import LoaderRecord

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from flatout.schema.program import TrainingContext

MAX_CALLS = 64  # enough to know where the model is called
LOADER_SETTINGS = ("pin_memory", "persistent_workers", "prefetch_factor", "batch_size", "dataset")
OPTIMIZER_SETTINGS = ("lr", "foreach", "fused", "capturable", "differentiable", "momentum", "weight_decay")


class ProgramMonitor(Listener):
    """Monitors the program; ``summary`` covers the time since ``start_window`` or the whole run."""

    def __init__(self, torch: ModuleType, context: TrainingContext, ledger: Ledger) -> None:
        self.torch, self.context = torch, context
        self.clock = HostClock()
        self.counters = CallCounters(torch, ledger, self.clock.mark)
        self.counters.install()
        gc.callbacks.append(self._on_gc)
        ledger.on_restore("gc callback", lambda: gc.callbacks.remove(self._on_gc))
        self._gc_start: int | None = None
        self._wait_start: int | None = None
        self._iter_start: int | None = None
        self._eval_start: int | None = None
        self._eval_lines: Counter[Line | None] = Counter()
        self._eval_ms = 0.0
        self._forward_lines: Counter[Line | None] = Counter()  # lines that call the model for training
        self._backward_lines: Counter[Line | None] = Counter()  # lines that begin a backward pass
        self._epochs: Counter[int] = Counter()
        self._batches: Counter[int] = Counter()
        # Id of an iterator -> its loader's number, its start, whether its first batch came
        self._iterators: dict[int, tuple[int, int, bool]] = {}
        self._start_ms: dict[int, list[float]] = {}
        self._workers: dict[int, list[int]] = {}
        self.start_window()

    def start_window(self) -> None:
        self._first_step = self.context.steps
        self._pauses_ms: list[float] = []
        self._waits_ms: dict[int, float] = {}

    # -- events

    def _on_gc(self, phase: str, values: dict[str, int]) -> None:
        if phase == "start":
            self._gc_start = self.clock.mark()
        elif self._gc_start is not None:
            self._pauses_ms.append(self.clock.elapsed_ms(self._gc_start, self.clock.mark()))
            self._gc_start = None

    def iterator_begin(self, loader: DataLoader) -> None:
        self._iter_start = self.clock.mark()

    def iterator_end(self, loader: DataLoader, iterator: object) -> None:
        number = self.context.number_of_loader(loader)
        if number is not None and self._iter_start is not None:
            self._epochs[number] += 1
            self._iterators[id(iterator)] = number, self._iter_start, False
            self._workers[number] = [worker.pid for worker in getattr(iterator, "_workers", ())]

    def data_begin(self, iterator: object) -> None:
        self._wait_start = self.clock.mark()

    def data_end(self, iterator: object, batch: object) -> None:
        entry = self._iterators.get(id(iterator))
        if entry is None or self._wait_start is None:
            return
        number, start, has_batch = entry
        now = self.clock.mark()
        self._batches[number] += 1
        self._waits_ms[number] = self._waits_ms.get(number, 0.0) + self.clock.elapsed_ms(
            self._wait_start, now
        )
        if not has_batch:
            self._start_ms.setdefault(number, []).append(self.clock.elapsed_ms(start, now))
            self._iterators[id(iterator)] = number, start, True

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._eval_start = None if root.training else self.clock.mark()
        if self._forward_lines.total() < MAX_CALLS:
            self._forward_lines[user_line(sys._getframe(1))] += 1

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        if self._backward_lines.total() < MAX_CALLS:
            self._backward_lines[user_line(sys._getframe(1))] += 1

    def forward_end(self, root: Module, output: object) -> None:
        if self._eval_start is not None:
            self._eval_lines[user_line(sys._getframe(1))] += 1
            self._eval_ms += self.clock.elapsed_ms(self._eval_start, self.clock.mark())
            self._eval_start = None

    # -- summary

    def summary(self) -> dict[str, Any]:
        steps = max(1, self.context.steps - self._first_step)
        all_steps = max(1, self.context.steps)
        events = self.counters.per_step(all_steps)
        if self._eval_lines:
            events["eval_with_grad"] = {
                "calls": self._eval_lines.total() / all_steps,
                "ms": self._eval_ms / all_steps,
                "places": _places(self._eval_lines, 5),
            }
        for name, lines in (("forward", self._forward_lines), ("backward", self._backward_lines)):
            events[name] = {"calls": 1.0, "ms": 0.0, "places": _places(lines, 3)}
        compiled = compile_record()
        return {
            "settings": {
                **settings(self.torch, self.context),
                "attention": self.counters.attention_kernels,
            },
            "compiled": compiled and compiled.to_json(),
            "gc_ms": sum(self._pauses_ms) / steps,
            "gc_longest_ms": max(self._pauses_ms, default=0.0),
            "gc_calls": len(self._pauses_ms) / steps,
            "events": events,
            "loaders": [loader.to_json() for loader in self._loaders(steps)],
        }

    def _loaders(self, steps: int) -> list[LoaderRecord]:
        """Return one entry for each place in the script that makes loaders, in the order of creation."""
        merged: dict[Any, LoaderRecord] = {}
        for number, loader in enumerate(self.context.loaders):
            place = SourceLocation.from_json(loader["place"]) if loader.get("place") else None
            key = (place.file, place.line) if place is not None else number
            if key not in merged:
                copied = {name: loader[name] for name in LOADER_SETTINGS}
                merged[key] = LoaderRecord(place, created=0, workers=loader["num_workers"], **copied)
            entry = merged[key]
            entry.created += 1
            starts = self._start_ms.get(number, [])
            entry.start_ms = (entry.start_ms * entry.iterators + sum(starts)) / max(
                1, entry.iterators + len(starts)
            )
            entry.iterators += self._epochs[number]
            entry.batches += self._batches[number]
            entry.wait_ms += self._waits_ms.get(number, 0.0) / steps
            sizes = [private_bytes(pid) for pid in self._workers.get(number, ())]
            if any(sizes):
                entry.worker_bytes = sum(size for size in sizes if size)
        return list(merged.values())


def _places(lines: Counter[Line | None], n: int) -> list[dict[str, Any]]:
    places = (place_of(line) for line, _ in lines.most_common(n))
    return [place.to_json() for place in places if place is not None]


def settings(torch: ModuleType, context: TrainingContext) -> dict[str, Any]:
    """The settings as JSON, without those that this version of torch does not report."""
    modules = [module for root in context.roots for module in root.modules()]
    values: dict[str, Any] = {
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
        "gradient_bytes": _gradient_bytes(context),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        "flush_denormal": not torch.full((8,), 1e-39, dtype=torch.float32, device="cpu").add(0).any(),
    }
    for parameter in context.parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        values["dtypes"][name] = values["dtypes"].get(name, 0) + parameter.numel() * parameter.element_size()
    with suppress(RuntimeError):  # set in both ways
        values["matmul_precision"] = torch.get_float32_matmul_precision()
    return values


def _gradient_bytes(context: TrainingContext) -> list[int]:
    """Bytes of each gradient, in the order expected of the backward pass: modules in reverse."""
    entry = {id(p): p for root in context.roots for p in root.parameters() if p.requires_grad}
    entry.update({id(p): p for p in context.parameters if id(p) not in entry})
    return [p.numel() * p.element_size() for p in reversed(entry.values())]


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    values = {
        name: group[name]
        for name in OPTIMIZER_SETTINGS
        if isinstance(group.get(name), (bool, int, float, type(None))) and name in group
    }
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "kind": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "groups": len(optimizer.param_groups),
        "tensors": len(tensors),
        "parameters": sum(p.numel() for p in tensors),
        **values,
    }
