"""Convert a recording of the torch profiler to Operations and idle gaps.

Operations have self time, calls, FLOPs, bytes and the user's line. This module reads the raw events of
kineto, because building torch's own event objects takes longer than the recorded steps.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from flatout.schema.findings import SourceLocation
from flatout.schema.profile import IdleGap, Operation

# FLOPs of single operators, from the shapes that a profiler recorded. A multiply-add counts as two.
#
# The formulas are those of ``torch.utils.flop_counter``. That module requires tensors or the output shape, but
# a recording has only the inputs.

Shape = Sequence[int]

FORWARD_CONVOLUTIONS = re.compile(
    "aten::((mkldnn|cudnn|miopen)_convolution|_slow_conv2d_forward|slow_conv3d_forward|thnn_conv2d|_conv_depthwise2d|conv_depthwise3d)"
)


def flops_of(name: str, shapes: Sequence[Shape], arguments: Sequence[Any] = ()) -> float | None:
    """The FLOPs of one call.

    None for an incomplete recording, and for an operator other than a matrix product, convolution or
    attention. ``arguments`` are the non-tensor arguments at their positions: numbers and lists, or nothing.
    """
    try:
        if name in ("aten::mm", "aten::_scaled_mm", "aten::_int_mm"):
            return _product(shapes[0], shapes[1])
        if name == "aten::addmm":
            return _product(shapes[1], shapes[2])
        if name == "aten::bmm":
            return shapes[0][0] * _product(shapes[0][1:], shapes[1][1:])
        if name == "aten::baddbmm":
            return shapes[1][0] * _product(shapes[1][1:], shapes[2][1:])
        if FORWARD_CONVOLUTIONS.fullmatch(name):
            return _convolution(name, shapes, arguments)
        if name == "aten::convolution_backward":
            # Each gradient costs as much as the forward pass: one product per output value and contributing
            # weight.
            output_mask = _list(arguments[10]) if len(arguments) > 10 else [1, 1, 1]
            per_gradient = 2.0 * prod(shapes[0]) * prod(shapes[2][1:])
            return per_gradient * (int(bool(output_mask[0])) + int(bool(output_mask[1])))
        if "scaled_dot_product" in name and "attention" in name:
            return _attention(name, shapes)
    except (IndexError, ValueError, TypeError):
        return None
    return None


def _product(a: Shape, b: Shape) -> float:
    (rows, inner), (also_inner, columns) = a, b
    if inner != also_inner:
        raise ValueError("no matrix product")
    return 2.0 * rows * inner * columns


def _convolution(name: str, shapes: Sequence[Shape], arguments: Sequence[Any]) -> float:
    x, weight = shapes[0], shapes[1]
    if not x or not weight:
        raise ValueError("not recorded")
    indices = {
        "aten::mkldnn_convolution": (3, 4, 5),
        "aten::cudnn_convolution": (2, 3, 4),
        "aten::miopen_convolution": (3, 4, 5),
    }
    if name not in indices:  # (input, weight, kernel size, bias, stride, padding): never dilated
        stride, padding, dilation = _list(arguments[4]), _list(arguments[5]), [1]
    else:
        padding, stride, dilation = (_list(arguments[index]) for index in indices[name])
    out = 1
    for dimension, (size, kernel) in enumerate(zip(x[2:], weight[2:], strict=True)):
        kernel_extent = _item_or_last(dilation, dimension) * (kernel - 1) + 1
        out *= (size + 2 * _item_or_last(padding, dimension) - kernel_extent) // _item_or_last(
            stride, dimension
        ) + 1
    return 2.0 * x[0] * out * weight[0] * prod(weight[1:])


def _attention(name: str, shapes: Sequence[Shape]) -> float:
    """Shapes are (batch, heads, length, width).

    Backward computes the scores again and four more products, as in flop_counter.
    """
    backward = "backward" in name
    q, k, v = shapes[1:4] if backward else shapes[:3]
    *_, q_length, width = q
    scores = 2.0 * prod(q) * k[-2]
    values = 2.0 * prod(q[:-1]) * v[-2] * v[-1]
    if width <= 0 or q_length <= 0:
        raise ValueError("not recorded")
    return 3 * scores + 2 * values if backward else scores + values


def _list(value: Any) -> list[int]:
    """A list of integers. Recordings hold a list as a list or as text."""
    if isinstance(value, str):
        words = value.strip("[]").replace(",", " ").split()
        return [{"True": 1, "False": 0}[word] if word in ("True", "False") else int(word) for word in words]
    if isinstance(value, (int, float)):
        return [int(value)]
    numbers = [int(item) for item in value]
    if not numbers:
        raise ValueError("not recorded")
    return numbers


def _item_or_last(values: list[int], index: int) -> int:
    return values[index] if index < len(values) else values[-1]


# As the profiler writes them: torch's name, and bytes of an element.
DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Half": ("float16", 2),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "int": ("int32", 4),
    "short int": ("int16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "c10::complex<float>": ("c10::complex<float>", 8),
    "c10::complex<double>": ("c10::complex<double>", 16),
}
FLOATS = ("double", "float", "c10::BFloat16", "c10::Half")
# Operators that view or allocate memory, without moving data.
VIEWS = re.compile(
    "aten::(view|reshape|_reshape_alias|t|transpose|permute|expand|as_strided|unsqueeze|squeeze|slice|select|detach_?|"
    "empty|empty_like|empty_strided|new_empty|new_empty_strided|resize_|alias|chunk|split|split_with_sizes|unbind|"
    "narrow|_unsafe_view|unfold|view_as|expand_as|numpy_T|movedim|flatten|unflatten|result_type|lift_fresh|set_|"
    "broadcast_to)"
)
STACK_LINE = re.compile(r"^(.*)\((\d+)\): (.*)$")
# Kernel names of cuBLAS, cuDNN, CUTLASS, FlashAttention and Triton that run on Tensor Cores.
TENSOR_CORES = re.compile(
    r"tensorop|[hi]mma|[swu]?gmma|s884|s1688|s16816|xmma|nvjet|flash_(fwd|bwd)|fmha|mma_|bf16gemm|h_sz|tf32",
    re.IGNORECASE,
)
MATRIX_PRODUCTS = re.compile(r"mm$|convolution|attention|linear|matmul", re.IGNORECASE)
LOADER_ANNOTATION = "enumerate(DataLoader)"  # annotation of torch's loaders for fetching a batch
STEP_ANNOTATION = "ProfilerStep#"  # of torch's profiler for a step
WORK_KINDS = ("computing", "copies", "communication")  # of a device
MAX_SHAPES, MAX_GAPS = 3, 8  # in the result
MIN_GAP_NS = 5_000

Line = tuple[str, int, str]  # file, line, function
CallLines = Mapping[tuple[str, tuple[tuple[int, ...], ...]], Sequence[Line | None]]


@dataclass
class OperatorEvent:
    name: str
    start: int
    end: int
    thread: int
    raw: Any
    children_ns: int = 0
    is_leaf: bool = True  # whether it does its work itself, without nested operators
    flops: float | None = None  # also None if a nested operator accounts for them
    device_ns: int = 0
    tensor_core_ns: int = 0
    line: Line | None = None


@dataclass
class OperatorTotals:
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    tensor_core_ns: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    shapes: Counter[str] = field(default_factory=Counter)
    lines: Counter[Line | None] = field(default_factory=Counter)


@dataclass
class RecordingResult:
    """Result of a recording.

    ``operators_ns`` is the time of the program's own thread in operators of any kind. ``busy_ns`` is the busy
    time of the device, ``device_ns`` that of each kind of work; kinds may overlap. ``python_share`` is the
    share of time in which that thread was neither in an operator nor waiting for data, ``waiting_share`` that of
    waiting for data.
    """

    operations: list[Operation]
    operators: int = 0
    operators_ns: int = 0
    python_share: float | None = None
    waiting_share: float = 0.0
    busy_ns: int | None = None
    device_ns: dict[str, int] = field(default_factory=dict)
    gaps: list[IdleGap] = field(default_factory=list)


class ProfilerRecording:
    """The events of some whole steps.

    ``lines`` are the user's lines of each kind of call (name and shapes), in the order of the calls of one
    step. ``by_line``: an operator counts apart at each line and for each shape; shares are of whole steps.
    """

    def __init__(
        self,
        events: Sequence[Any],
        steps: int,
        lines: CallLines,
        locate: Callable[[str, int, str], SourceLocation],
        by_line: bool = False,
    ) -> None:
        self.by_line = by_line
        self.steps, self.lines, self.locate = max(1, steps), lines, locate
        self.operators: list[OperatorEvent] = []
        self.kernels: list[Any] = []
        self.device_spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.data_waits: list[tuple[int, int]] = []  # for data
        self.step_spans: list[tuple[int, int]] = []
        for event in events:
            kind = kind_of(event)
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                self.kernels.append(event)
                self.device_spans[_work_kind(kind, event.name())].append((event.start_ns(), event.end_ns()))
            elif kind == "user_annotation" and event.name().startswith(LOADER_ANNOTATION):
                self.data_waits.append((event.start_ns(), event.end_ns()))
            elif by_line and event.name().startswith(STEP_ANNOTATION):
                self.step_spans.append((event.start_ns(), event.end_ns()))
            elif kind == "cpu_op" and not event.name().startswith("["):  # [memory] is an allocation
                self.operators.append(
                    OperatorEvent(
                        event.name(), event.start_ns(), event.end_ns(), event.start_thread_id(), event
                    )
                )
        self.operators.sort(key=lambda e: (e.thread, e.start, -e.end))

    def summarise(self) -> RecordingResult:
        outermost = self._nest()
        self._link_kernels()
        sums: dict[tuple[Any, ...], OperatorTotals] = defaultdict(OperatorTotals)
        for event in self.operators:
            self._add(sums, event)
        result = RecordingResult(self._operations(sums), len([e for e in outermost if "::" in e.name]))
        thread = Counter(e.thread for e in outermost).most_common(1)
        spans = [(e.start, e.end) for e in self.operators if thread and e.thread == thread[0][0]]
        result.operators_ns = union_ns(spans)
        if spans:
            spans += self.data_waits
            first, last = min(start for start, _ in spans), max(end for _, end in spans)
            window_ns = max(1, union_ns(self.step_spans) or last - first)
            result.python_share = 1 - union_ns(spans) / window_ns
            result.waiting_share = (union_ns(spans) - result.operators_ns) / window_ns
        if self.kernels:
            result.busy_ns = union_ns((k.start_ns(), k.end_ns()) for k in self.kernels)
            result.device_ns = {
                work: union_ns(self.device_spans[work]) for work in WORK_KINDS if work in self.device_spans
            }
            result.gaps = self._gaps()
        return result

    # -- nesting of operators, and their lines

    def _nest(self) -> list[OperatorEvent]:
        """Derive child times and lines from the nesting.

        Returns the operators that no other operator called. Autograd nodes do not count as operators.
        """
        call_counts: Counter[Any] = Counter()
        enclosing: list[OperatorEvent] = []
        outermost = []
        for event in self.operators:
            while enclosing and (enclosing[-1].thread != event.thread or enclosing[-1].end <= event.start):
                enclosing.pop()
            key = event.name, tuple(tuple(shape) for shape in event.raw.shapes() if shape)
            known = self.lines.get(key)
            if known:
                event.line = known[call_counts[key] % len(known)]
                call_counts[key] += 1
                for parent in reversed(enclosing):  # a composite operator has the line of its first part
                    parent.line = parent.line or event.line
            event.line = event.line or (enclosing[-1].line if enclosing else None)
            event.flops = flops_of(
                event.name, [list(shape) for shape in event.raw.shapes()], list(event.raw.concrete_inputs())
            )
            if event.flops is not None:
                for parent in enclosing:
                    parent.flops = None
            if enclosing:
                enclosing[-1].children_ns += event.end - event.start
                if not VIEWS.fullmatch(event.name):
                    for parent in enclosing:
                        parent.is_leaf = False
            if not is_autograd_node(event) and all(map(is_autograd_node, enclosing)):
                outermost.append(event)
            enclosing.append(event)
        return outermost

    def _link_kernels(self) -> None:
        by_correlation = {e.raw.correlation_id(): e for e in self.operators}
        for kernel in self.kernels:
            event = by_correlation.get(kernel.linked_correlation_id())
            if event is not None:
                ns = kernel.end_ns() - kernel.start_ns()
                event.device_ns += ns
                event.tensor_core_ns += ns if TENSOR_CORES.search(kernel.name()) else 0

    # -- sums

    def _add(self, sums: dict[tuple[Any, ...], OperatorTotals], event: OperatorEvent) -> None:
        dtypes, shapes = list(event.raw.dtypes()), [list(shape) for shape in event.raw.shapes()]
        main_dtype = next(
            (DTYPES[d][0] for d in FLOATS if d in dtypes),
            next((DTYPES[d][0] for d in dtypes if d in DTYPES), ""),
        )
        shapes_text = " x ".join(str(tuple(shape)) for shape in shapes if shape)[:120]
        key: tuple[Any, ...] = (event.name, main_dtype)
        total = sums[(*key, shapes_text, event.line) if self.by_line else key]
        total.calls += 1
        own_ns = max(0, event.end - event.start - event.children_ns)
        total.host_ns += own_ns
        total.device_ns += event.device_ns
        total.tensor_core_ns += event.tensor_core_ns
        if any(shapes):
            total.shapes[shapes_text] += 1
        total.lines[event.line] += event.device_ns or own_ns
        total.flops += event.flops or 0.0
        if (
            (event.is_leaf or event.flops is not None)
            and not VIEWS.fullmatch(event.name)
            and not is_autograd_node(event)
        ):
            total.moved_bytes += operand_bytes(dtypes, shapes)

    def _operations(self, sums: dict[tuple[Any, ...], OperatorTotals]) -> list[Operation]:
        on_device = bool(self.kernels)
        total_ns = sum(s.device_ns if on_device else s.host_ns for s in sums.values()) or 1
        operations = []
        for (name, dtype, *_), total in sums.items():
            own_ns = total.device_ns if on_device else total.host_ns
            operation = Operation(
                name, total.calls / self.steps, total.host_ns / 1e6 / self.steps, share=own_ns / total_ns
            )
            operation.device_ms = total.device_ns / 1e6 / self.steps if on_device else None
            operation.flops = total.flops / self.steps if total.flops else None
            operation.moved_bytes = total.moved_bytes / self.steps if total.moved_bytes else None
            operation.dtypes = [dtype] if dtype else []
            operation.shapes = [shape for shape, _ in total.shapes.most_common(MAX_SHAPES)]
            if on_device and total.device_ns and MATRIX_PRODUCTS.search(name):
                operation.tensor_cores = 2 * total.tensor_core_ns > total.device_ns
            line = next((line for line, _ in total.lines.most_common() if line is not None), None)
            operation.place = self.locate(*line) if line is not None else None
            operations.append(operation)
        return sorted(operations, key=lambda o: -o.share)

    # -- idle gaps of the device

    def _gaps(self) -> list[IdleGap]:
        busy_spans = merged((k.start_ns(), k.end_ns()) for k in self.kernels)
        by_start = sorted(self.operators, key=lambda e: e.start)
        starts = [e.start for e in by_start]
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        lines: dict[str, Counter[Line | None]] = defaultdict(Counter)
        for (_, before), (after, _) in pairwise(busy_spans):
            if after - before < MIN_GAP_NS:
                continue
            middle = (before + after) // 2
            index = bisect_right(starts, middle) - 1
            running = next(
                (e for e in reversed(by_start[max(0, index - 20) : index + 1]) if e.end >= middle), None
            )
            name = running.name if running is not None else "python"
            sums[name][0] += (after - before) / 1e6
            sums[name][1] += 1
            nearest = running or (by_start[index] if index >= 0 else None)
            lines[name][nearest.line if nearest else None] += after - before
        gaps = []
        for name, (ms, calls) in sums.items():
            line = lines[name].most_common(1)[0][0]
            gaps.append(
                IdleGap(
                    name,
                    ms / self.steps,
                    calls / self.steps,
                    self.locate(*line) if line is not None else None,
                )
            )
        return sorted(gaps, key=lambda gap: -gap.ms)[:MAX_GAPS]


def _work_kind(kind: str, name: str) -> str:
    """The kind of work of an event of the device. Kernels of NCCL and RCCL have names that begin with nccl."""
    if kind != "kernel":
        return "copies"
    return "communication" if name.startswith("nccl") else "computing"


def kind_of(event: Any) -> str:
    """The activity under kineto's name. For an older torch it is derived from other properties."""
    on_device = not str(event.device_type()).endswith(".CPU")
    activity_type = getattr(event, "activity_type", None)
    if activity_type is not None:
        kind = str(activity_type())
        return (
            "kernel"
            if kind == "concurrent_kernel"
            else kind
            if on_device == kind.startswith(("kernel", "gpu_"))
            else ""
        )
    if event.is_user_annotation():
        return "user_annotation"
    if on_device:
        return "kernel"
    python = STACK_LINE.match(event.name()) or event.name().startswith(("nn.Module: ", "<built-in "))
    return "python_function" if python else "cpu_op"


def is_autograd_node(event: OperatorEvent) -> bool:
    """Whether the event is a node of autograd's backward pass, which is no operator itself."""
    return event.name.startswith("autograd::engine") or (event.raw.scope() == 1 and "::" not in event.name)


def operand_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> float:
    """The bytes of all inputs, plus a result as large as the largest input.

    This is an estimate, exact for elementwise operators.
    """
    input_bytes = [
        prod(shape) * DTYPES[dtype][1]
        for dtype, shape in zip(dtypes, shapes, strict=False)
        if dtype in DTYPES and shape
    ]
    return float(sum(input_bytes) + max(input_bytes, default=0))


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    disjoint: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(end, disjoint[-1][1])
        else:
            disjoint.append((start, end))
    return disjoint


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in merged(spans))
