"""Measures the workspaces of convolutions on a CPU.

OneDNN reorders tensors and sums weight gradients per thread. It decides how much memory that takes; no shape
tells it. So each convolution of a step is really run with two and with four samples, all in one allocator
recording. The memory beyond its results is linear in the number of samples (a single sample is handled
differently).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

FEW = (2, 4)
MARK = "flatout: workspace "


class Workspaces:
    """Workspace sizes.

    ``of`` returns the bytes of a call, if known; ``learn`` runs the calls that were unknown.
    """

    def __init__(self, torch: ModuleType) -> None:
        aten = torch.ops.aten
        self.torch = torch
        # the arguments with one sample per row
        self._samples_at = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
        self._lines: dict[Any, tuple[float, float]] = {}  # call -> constant bytes, bytes per sample
        self._asked: dict[Any, tuple[Any, list[Any]]] = {}

    def of(self, function: object, args: Sequence[Any]) -> int:
        where = self._samples_at.get(function)
        if where is None or args[where[0]].device.type != "cpu" or not args[where[0]].shape[0]:
            return 0
        samples = args[where[0]].shape[0]
        call = (function, *(self._spelled(arg, at in where) for at, arg in enumerate(args)))
        if call not in self._lines:
            self._asked.setdefault(
                call, (function, [self._described(arg, at in where) for at, arg in enumerate(args)])
            )
            return 0
        fixed, each = self._lines[call]
        return max(0, round(fixed + each * samples))

    def _spelled(self, arg: object, has_samples: bool) -> Any:
        return (
            self._described(arg, has_samples)
            if isinstance(arg, self.torch.Tensor)
            else tuple(arg)
            if isinstance(arg, list)
            else arg
        )

    def _described(self, arg: object, has_samples: bool) -> Any:
        """Describe a tensor as (shape without samples, has samples, dtype, channels last)."""
        if not isinstance(arg, self.torch.Tensor):
            return arg
        last = (
            arg.dim() == 4
            and not arg.is_contiguous()
            and arg.is_contiguous(memory_format=self.torch.channels_last)
        )
        return _Described(tuple(arg.shape[1:] if has_samples else arg.shape), has_samples, arg.dtype, last)

    def learn(self) -> None:
        """Run the unknown calls; call it with dispatch modes off.

        The random state is unchanged: all inputs are zero.
        """
        if not self._asked:
            return
        torch, asked = self.torch, list(self._asked.items())
        self._asked = {}
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        with torch.no_grad(), profile:
            for at, (_, (function, args)) in enumerate(asked):
                for samples in FEW:
                    ready = [
                        arg.zeros(torch, samples) if isinstance(arg, _Described) else arg for arg in args
                    ]
                    with torch.profiler.record_function(f"{MARK}{at} {samples}"):
                        made = function(*ready)
                    del made, ready
        taken = dict(_taken(profile.profiler.kineto_results.events()))
        for at, (call, _) in enumerate(asked):
            few, more = (taken.get((at, samples), 0) for samples in FEW)
            each = max(0.0, (more - few) / (FEW[1] - FEW[0]))
            self._lines[call] = (few - each * FEW[0], each)


class _Described(tuple[Any, ...]):
    """(shape, whether samples come before it, dtype, channels last)"""

    def __new__(cls, *parts: object) -> _Described:
        return super().__new__(cls, parts)

    def zeros(self, torch: ModuleType, samples: int) -> Any:
        shape, has_samples, dtype, last = self
        made = torch.zeros((samples, *shape) if has_samples else shape, dtype=dtype, device="cpu")
        return made.to(memory_format=torch.channels_last) if last else made


def _taken(events: Iterable[Any]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (number of the call, samples) and the bytes that it took beyond its results, from a recording."""
    spans, changes = [], []
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(MARK):
            number, samples = map(int, event.name().removeprefix(MARK).split())
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), (number, samples)))
    changes.sort(key=lambda change: change[0])
    for start, end, call in spans:
        inside = list(accumulate((size for ns, size in changes if start <= ns <= end), initial=0))
        yield call, max(inside) - inside[-1]
