"""Convert a recording of the torch profiler to Operations and idle gaps.

Operations have self time, calls, FLOPs, bytes and the user's line. This module reads the raw events of
kineto, because building torch's own event objects takes longer than the recorded steps.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from flatout.measure.flops import flops_of
from flatout.measure.profiler_events import (
    SIZES,
    Event,
    Line,
    Sum,
    is_node,
    kind_of,
    merged,
    moved_bytes,
    union_ns,
)
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import IdleGap, Operation

NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
}
FLOATS = ("double", "float", "c10::BFloat16", "c10::Half")
# Operators that view or allocate memory, without moving data.
VIEWS = frozenset(
    "aten::" + name
    for name in (
        "view",
        "reshape",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "expand",
        "as_strided",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "detach",
        "detach_",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "alias",
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "narrow",
        "_unsafe_view",
        "unfold",
        "view_as",
        "expand_as",
        "numpy_T",
        "movedim",
        "flatten",
        "unflatten",
        "result_type",
        "lift_fresh",
        "set_",
        "broadcast_to",
    )
)
# Kernel names of cuBLAS, cuDNN, CUTLASS, FlashAttention and Triton that run on Tensor Cores.
TENSOR_CORES = re.compile(
    r"tensorop|[hi]mma|[swu]?gmma|s884|s1688|s16816|xmma|nvjet|flash_(fwd|bwd)|fmha|mma_|bf16gemm|h_sz|tf32",
    re.IGNORECASE,
)
MULTIPLIES = re.compile(r"mm$|convolution|attention|linear|matmul", re.IGNORECASE)
OF_A_LOADER = "enumerate(DataLoader)"  # annotation of torch's loaders for fetching a batch
WORK = ("computing", "copies", "communication")  # of a device
SHAPES_KEPT = 3
GAPS_KEPT = 8
SHORTEST_GAP_NS = 5_000


Lines = Mapping[tuple[str, tuple[tuple[int, ...], ...]], Sequence[Line | None]]


@dataclass
class RecordingResult:
    """Result of a recording.

    ``operators_ns`` is the time of the program's own thread in operators of any kind. ``busy_ns`` is the busy
    time of the device, ``device_ns`` that of each kind of work; kinds may overlap. ``python_share`` is the
    share of time in which that thread was neither in an operator nor waiting for data.
    """

    operations: list[Operation]
    operators: int = 0
    operators_ns: int = 0
    python_share: float | None = None
    busy_ns: int | None = None
    device_ns: dict[str, int] = field(default_factory=dict)
    gaps: list[IdleGap] = field(default_factory=list)


class ProfilerRecording:
    """The events of some whole steps.

    ``lines`` are the user's lines of each kind of call (name and shapes), in the order of the calls of one
    step.
    """

    def __init__(
        self,
        events: Sequence[Any],
        steps: int,
        lines: Lines,
        place: Callable[[str, int, str], SourceLocation],
    ) -> None:
        self.steps, self.lines, self.place = max(1, steps), lines, place
        self.operators: list[Event] = []
        self.kernels: list[Any] = []
        self.device: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.waits: list[tuple[int, int]] = []  # for data
        for event in events:
            kind = kind_of(event)
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                self.kernels.append(event)
                self.device[_work_of(kind, event.name())].append((event.start_ns(), event.end_ns()))
            elif kind == "user_annotation" and event.name().startswith(OF_A_LOADER):
                self.waits.append((event.start_ns(), event.end_ns()))
            elif kind == "cpu_op" and not event.name().startswith("["):  # [memory] is an allocation
                self.operators.append(
                    Event(event.name(), event.start_ns(), event.end_ns(), event.start_thread_id(), event)
                )
        self.operators.sort(key=lambda e: (e.thread, e.start, -e.end))

    def observed(self) -> RecordingResult:
        outermost = self._nest()
        self._link_kernels()
        sums: dict[tuple[str, str], Sum] = defaultdict(Sum)
        for event in self.operators:
            self._add(sums, event)
        found = RecordingResult(self._operations(sums), len([e for e in outermost if "::" in e.name]))
        thread = Counter(e.thread for e in outermost).most_common(1)
        spans = [(e.start, e.end) for e in self.operators if thread and e.thread == thread[0][0]]
        found.operators_ns = union_ns(spans)
        if spans:
            spans += self.waits
            found.python_share = 1 - union_ns(spans) / max(
                1, max(end for _, end in spans) - min(start for start, _ in spans)
            )
        if self.kernels:
            found.busy_ns = union_ns((k.start_ns(), k.end_ns()) for k in self.kernels)
            found.device_ns = {work: union_ns(self.device[work]) for work in WORK if work in self.device}
            found.gaps = self._gaps()
        return found

    # -- nesting of operators, and their lines ---------------------------------------------------------------

    def _nest(self) -> list[Event]:
        """Derive child times and lines from the nesting.

        Returns the operators that no other operator called. Autograd nodes do not count as operators.
        """
        turns: Counter[Any] = Counter()
        open_: list[Event] = []
        outermost = []
        for event in self.operators:
            while open_ and (open_[-1].thread != event.thread or open_[-1].end <= event.start):
                open_.pop()
            key = event.name, tuple(tuple(shape) for shape in event.raw.shapes() if shape)
            known = self.lines.get(key)
            if known:
                event.line = known[turns[key] % len(known)]
                turns[key] += 1
                for each in reversed(open_):  # a composite operator has the line of its first part
                    each.line = each.line or event.line
            event.line = event.line or (open_[-1].line if open_ else None)
            event.flops = flops_of(
                event.name, [list(shape) for shape in event.raw.shapes()], list(event.raw.concrete_inputs())
            )
            if event.flops is not None:
                for each in open_:
                    each.flops = None
            if open_:
                open_[-1].children_ns += event.end - event.start
                if event.name not in VIEWS:
                    for each in open_:
                        each.works = False
            if not is_node(event) and all(map(is_node, open_)):
                outermost.append(event)
            open_.append(event)
        return outermost

    def _link_kernels(self) -> None:
        by_number = {e.raw.correlation_id(): e for e in self.operators}
        for kernel in self.kernels:
            event = by_number.get(kernel.linked_correlation_id())
            if event is not None:
                ns = kernel.end_ns() - kernel.start_ns()
                event.device_ns += ns
                event.core_ns += ns if TENSOR_CORES.search(kernel.name()) else 0

    # -- sums ------------------------------------------------------------------------------------------------

    def _add(self, sums: dict[tuple[str, str], Sum], event: Event) -> None:
        dtypes, shapes = list(event.raw.dtypes()), [list(shape) for shape in event.raw.shapes()]
        main = next(
            (NAMES[d] for d in FLOATS if d in dtypes),
            next((NAMES.get(d, d) for d in dtypes if d in SIZES), ""),
        )
        total = sums[event.name, main]
        total.calls += 1
        own_ns = max(0, event.end - event.start - event.children_ns)
        total.host_ns += own_ns
        total.device_ns += event.device_ns
        total.core_ns += event.core_ns
        if any(shapes):
            total.shapes[" x ".join(str(tuple(shape)) for shape in shapes if shape)[:120]] += 1
        total.lines[event.line] += event.device_ns or own_ns
        total.flops += event.flops or 0.0
        if (event.works or event.flops is not None) and event.name not in VIEWS and not is_node(event):
            total.moved += moved_bytes(dtypes, shapes)

    def _operations(self, sums: dict[tuple[str, str], Sum]) -> list[Operation]:
        device = bool(self.kernels)
        whole = sum(s.device_ns if device else s.host_ns for s in sums.values()) or 1
        found = []
        for (name, dtype), total in sums.items():
            own = total.device_ns if device else total.host_ns
            operation = Operation(
                name, total.calls / self.steps, total.host_ns / 1e6 / self.steps, share=own / whole
            )
            operation.device_ms = total.device_ns / 1e6 / self.steps if device else None
            operation.flops = total.flops / self.steps if total.flops else None
            operation.moved_bytes = total.moved / self.steps if total.moved else None
            operation.dtypes = [dtype] if dtype else []
            operation.shapes = [shape for shape, _ in total.shapes.most_common(SHAPES_KEPT)]
            if device and total.device_ns and MULTIPLIES.search(name):
                operation.tensor_cores = 2 * total.core_ns > total.device_ns
            line = next((line for line, _ in total.lines.most_common() if line is not None), None)
            operation.place = self.place(*line) if line is not None else None
            found.append(operation)
        return sorted(found, key=lambda o: -o.share)

    # -- idle gaps of the device -----------------------------------------------------------------------------

    def _gaps(self) -> list[IdleGap]:
        busy = merged((k.start_ns(), k.end_ns()) for k in self.kernels)
        starts = [e.start for e in sorted(self.operators, key=lambda e: e.start)]
        ordered = sorted(self.operators, key=lambda e: e.start)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        lines: dict[str, Counter[Line | None]] = defaultdict(Counter)
        for (_, before), (after, _) in pairwise(busy):
            if after - before < SHORTEST_GAP_NS:
                continue
            middle = (before + after) // 2
            at = bisect_right(starts, middle) - 1
            under = next((e for e in reversed(ordered[max(0, at - 20) : at + 1]) if e.end >= middle), None)
            name = under.name if under is not None else "python"
            sums[name][0] += (after - before) / 1e6
            sums[name][1] += 1
            nearest = under or (ordered[at] if at >= 0 else None)
            lines[name][nearest.line if nearest else None] += after - before
        found = []
        for name, (ms, calls) in sums.items():
            line = lines[name].most_common(1)[0][0]
            found.append(
                IdleGap(
                    name, ms / self.steps, calls / self.steps, self.place(*line) if line is not None else None
                )
            )
        return sorted(found, key=lambda gap: -gap.ms)[:GAPS_KEPT]


def _work_of(kind: str, name: str) -> str:
    """The kind of WORK of an event of the device. Kernels of NCCL and RCCL have names that begin with nccl."""
    if kind != "kernel":
        return "copies"
    return "communication" if name.startswith("nccl") else "computing"
