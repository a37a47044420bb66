"""Counts costly calls with place and time: emptying the cache, saving, collecting garbage."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, place_of, user_line
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class _Counter:
    calls: int = 0
    ns: int = 0
    lines: Counter[Line | None] = field(default_factory=Counter)


class CallCounters:
    def __init__(self, torch: ModuleType, ledger: Ledger, now_ns: Callable[[], int]) -> None:
        self.torch, self.ledger, self.now_ns = torch, ledger, now_ns
        self._counters: dict[str, _Counter] = {}

    def install(self) -> None:
        torch = self.torch
        optimizer = torch.optim.Optimizer
        for name, owner, function in (
            ("empty_cache", torch.cuda, "empty_cache"),
            ("gc_collect", gc, "collect"),
            ("save", torch, "save"),
            ("data_parallel", torch.nn.DataParallel, "forward"),
            ("clip", torch.nn.utils, "clip_grad_norm_"),
            ("make_optimizer", optimizer, "__init__"),
            ("make_scheduler", torch.optim.lr_scheduler.LRScheduler, "__init__"),
            ("set_threads", torch, "set_num_threads"),
        ):
            self.ledger.set(owner, function, self._wrap(name, getattr(owner, function)))
        self.ledger.set(
            torch.autograd.anomaly_mode.detect_anomaly,
            "__enter__",
            self._wrap("anomaly", torch.autograd.anomaly_mode.detect_anomaly.__enter__),
        )
        self.ledger.set(optimizer, "zero_grad", self._wrap_zero_grad(optimizer.zero_grad))

    def per_step(self, steps: int) -> dict[str, Any]:
        return {
            name: {
                "calls": counter.calls / steps,
                "ms": counter.ns / 1e6 / steps,
                "most": max(counter.lines.values()),
                "places": [
                    place.to_json()
                    for line, _ in counter.lines.most_common(5)
                    if (place := place_of(line)) is not None
                ],
            }
            for name, counter in self._counters.items()
        }

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: object, **kwargs: object) -> Any:
            start = self.now_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._note(name, self.now_ns() - start, sys._getframe(1))

        return counted

    def _wrap_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def zeroed(optimizer: Optimizer, set_to_none: bool = True) -> Any:
            start = self.now_ns()
            try:
                return original(optimizer, set_to_none)
            finally:
                self._note(
                    "zero_grad" if set_to_none else "zero_grad_to_zero",
                    self.now_ns() - start,
                    sys._getframe(1),
                )

        return zeroed

    def _note(self, name: str, ns: int, caller: FrameType) -> None:
        counter = self._counters.setdefault(name, _Counter())
        counter.calls += 1
        counter.ns += ns
        counter.lines[user_line(caller)] += 1
