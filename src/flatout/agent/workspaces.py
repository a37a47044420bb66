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

MEASURED_SAMPLES = (2, 4)
RECORD_PREFIX = "flatout: workspace "


class Workspaces:
    """Workspace sizes.

    ``bytes_of`` returns the bytes of a call, if known; ``measure`` runs the calls that were unknown.
    """

    def __init__(self, torch: ModuleType) -> None:
        aten = torch.ops.aten
        self.torch = torch
        # the arguments with one sample per row
        self._batched_args = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
        self._fits: dict[Any, tuple[float, float]] = {}  # call -> constant bytes, bytes per sample
        self._unmeasured: dict[Any, tuple[Any, list[Any]]] = {}

    def bytes_of(self, function: object, args: Sequence[Any]) -> int:
        batched = self._batched_args.get(function)
        if batched is None or args[batched[0]].device.type != "cpu" or not args[batched[0]].shape[0]:
            return 0
        samples = args[batched[0]].shape[0]
        call = (function, *(self._hashable(arg, i in batched) for i, arg in enumerate(args)))
        if call not in self._fits:
            self._unmeasured.setdefault(
                call, (function, [self._spec_of(arg, i in batched) for i, arg in enumerate(args)])
            )
            return 0
        fixed, per_sample = self._fits[call]
        return max(0, round(fixed + per_sample * samples))

    def _hashable(self, arg: object, has_samples: bool) -> Any:
        return (
            self._spec_of(arg, has_samples)
            if isinstance(arg, self.torch.Tensor)
            else tuple(arg)
            if isinstance(arg, list)
            else arg
        )

    def _spec_of(self, arg: object, has_samples: bool) -> Any:
        if not isinstance(arg, self.torch.Tensor):
            return arg
        channels_last = (
            arg.dim() == 4
            and not arg.is_contiguous()
            and arg.is_contiguous(memory_format=self.torch.channels_last)
        )
        return _TensorSpec(
            tuple(arg.shape[1:] if has_samples else arg.shape), has_samples, arg.dtype, channels_last
        )

    def measure(self) -> None:
        """Run the unknown calls; call it with dispatch modes off.

        The random state is unchanged: all inputs are zero.
        """
        if not self._unmeasured:
            return
        torch, unmeasured = self.torch, list(self._unmeasured.items())
        self._unmeasured = {}
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        with torch.no_grad(), profile:
            for i, (_, (function, args)) in enumerate(unmeasured):
                for samples in MEASURED_SAMPLES:
                    inputs = [
                        arg.zeros(torch, samples) if isinstance(arg, _TensorSpec) else arg for arg in args
                    ]
                    with torch.profiler.record_function(f"{RECORD_PREFIX}{i} {samples}"):
                        result = function(*inputs)
                    del result, inputs
        measured = dict(_workspace_bytes(profile.profiler.kineto_results.events()))
        for i, (call, _) in enumerate(unmeasured):
            small, large = (measured.get((i, samples), 0) for samples in MEASURED_SAMPLES)
            per_sample = max(0.0, (large - small) / (MEASURED_SAMPLES[1] - MEASURED_SAMPLES[0]))
            self._fits[call] = (small - per_sample * MEASURED_SAMPLES[0], per_sample)


class _TensorSpec(tuple[Any, ...]):
    """(shape, whether samples come before it, dtype, channels last)"""

    def __new__(cls, *parts: object) -> _TensorSpec:
        return super().__new__(cls, parts)

    def zeros(self, torch: ModuleType, samples: int) -> Any:
        shape, has_samples, dtype, channels_last = self
        tensor = torch.zeros((samples, *shape) if has_samples else shape, dtype=dtype, device="cpu")
        return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def _workspace_bytes(events: Iterable[Any]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (number of the call, samples) and the bytes that it took beyond its results, from a recording."""
    spans, allocations = [], []
    for event in events:
        if event.name() == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(RECORD_PREFIX):
            number, samples = map(int, event.name().removeprefix(RECORD_PREFIX).split())
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), (number, samples)))
    allocations.sort(key=lambda change: change[0])
    for start, end, call in spans:
        running_bytes = list(accumulate((size for ns, size in allocations if start <= ns <= end), initial=0))
        yield call, max(running_bytes) - running_bytes[-1]
