"""`flatout kernel bench`: time implementations in turn on one device, with its measured roofline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from flatout.cli.options.json_output import print_json
from flatout.measure.clock import Clock, clock_for
from flatout.measure.statistics import Round, compare, median
from flatout.schema.errors import UsageError
from flatout.schema.outputs import KernelBenchRecord
from flatout.schema.sizes import size

if TYPE_CHECKING:
    from flatout.kernels.kernel import Case, Kernel

WARM_UPS = 3
BLOCK_MS = 20.0  # approximate duration of a block of calls
COPY_BYTES = 1 << 30  # of the copy measured on a GPU, many times the last-level cache; 1/16 of it on a CPU
SIDE = {"cuda": 8192, "cpu": 1024}  # of the measured matrix product
QUICK = 64  # divides the copy, and 8 the side, when the figures do not matter


@dataclass(frozen=True)
class KernelTiming:
    """The timing of one implementation in one case.

    ``ms`` is the median call. ``ratio`` is the speed-up over the reference with its 95 % interval.
    ``gb_per_s`` and ``tflop_per_s`` are lower bounds of the rates; ``share`` is their share of the roofline.
    ``peak_bytes`` is measured on CUDA only."""

    kernel: str
    case: str
    contestant: str
    work: str
    ms: float | None = None
    ratio: tuple[float, float, float] | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    share: float | None = None
    peak_bytes: int | None = None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Roofline:
    """Measured rates of this device: bytes of a copy (read and written), operations of a matrix product."""

    device: str
    gb_per_s: float
    tflop_per_s: dict[str, float]


def roofline(quick: bool = False) -> Roofline:
    """Measure the device that kernels run on.

    Takes the best of ten copies, and of ten matrix products for each dtype. ``quick`` measures small ones, to
    test that it works."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = clock_for(torch, device)

    def best_ms(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            clock.settle()
            start = clock.mark()
            call()
            times.append(clock.elapsed_ms(start, clock.mark()))
        return min(times)

    source = torch.ones(
        (COPY_BYTES if device == "cuda" else COPY_BYTES // 16) // (4 * QUICK if quick else 4), device=device
    )
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4
    gb_per_s = moved / best_ms(lambda: target.copy_(source)) / 1e6
    side, rates = SIDE[device] // (8 if quick else 1), {}
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / best_ms(partial(torch.mm, a, b)) / 1e9
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return Roofline(name, gb_per_s, rates)


def kernel_of(subject: str) -> Any:
    """Find the kernel. Raises UsageError if there is none."""
    from flatout.kernels.subject import SubjectError, find

    try:
        return find(subject)
    except SubjectError as error:
        raise UsageError(str(error)) from None


def rows_of(
    kernel: Kernel,
    rounds: int,
    only: str = "",
    others: Callable[[Any, Any], dict[str, Callable[..., Any]]] | None = None,
    roof: Roofline | None = None,
) -> Iterator[KernelTiming]:
    """Measure every bench case. ``others(kernel, case)`` adds implementations by name.

    Raises UsageError if there is no case."""
    import torch

    gpu = torch.cuda.is_available()
    found = [
        case for case in kernel.cases() if case.bench and (gpu or case.bench == "any") and only in case.title
    ]
    if not found:
        raise UsageError(
            f'{kernel.name} has no case to measure here{f" with {only!r} in its title" if only else ""}. Mark one with bench="any".'
        )
    roof = roof or roofline()
    for case in found:
        drawn = case.make(torch.Generator().manual_seed(0))
        inputs = {name: _placed(value, gpu) for name, value in drawn.items()}
        for work in ("forward", "forward and backward") if case.differentiate else ("forward",):
            contestants = {
                "reference": kernel.reference,
                "torch.compile": torch.compile(kernel.reference),
                **(others(kernel, case) if others else {}),
            }
            for implementation in kernel.implementations:
                if not implementation.needs or gpu:
                    contestants[implementation.name] = implementation.call
                else:
                    yield KernelTiming(
                        kernel.name,
                        case.title,
                        implementation.name,
                        work,
                        why_not="torch sees no CUDA device here",
                    )
            yield from _comparison(kernel, case, work, contestants, inputs, rounds, roof)


def _interleaved(
    calls: dict[str, tuple[Callable[[], Any], int]], clock: Clock, rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each call, for each round; the order changes from round to round."""
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            call, count = calls[name]
            clock.settle()
            start = clock.mark()
            for _ in range(count):
                call()
            blocks[name].append(clock.elapsed_ms(start, clock.mark()) / count)
    return blocks


def _comparison(
    kernel: Kernel,
    case: Case,
    work: str,
    contestants: dict[str, Callable[..., Any]],
    inputs: dict[str, Any],
    rounds: int,
    roof: Roofline,
) -> Iterator[KernelTiming]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = clock_for(torch, device)
    calls: dict[str, tuple[Callable[[], Any], int, int | None]] = {}
    for name, function in contestants.items():
        call = _call(function, inputs, case.differentiate if work != "forward" else ())
        try:
            for _ in range(WARM_UPS):
                call()
            clock.settle()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = clock.mark()
            call()
            once_ms = clock.elapsed_ms(start, clock.mark())
            calls[name] = (
                call,
                max(int(BLOCK_MS / max(once_ms, 1e-3)), 1),
                torch.cuda.max_memory_allocated() - before if device == "cuda" else None,
            )
        except Exception as error:  # a compiler failure or out of memory is a result
            yield KernelTiming(
                kernel.name,
                case.title,
                name,
                work,
                why_not=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}",
            )
    blocks = _interleaved({name: (call, count) for name, (call, count, _) in calls.items()}, clock, rounds)
    for name, times in blocks.items():
        ms = median(times)
        ratio = (
            compare([[Round(a, b) for a, b in zip(blocks["reference"], times, strict=True)]])
            if "reference" in blocks
            else None
        )
        moved, flops = (each(inputs) if each else None for each in (kernel.moved_bytes, kernel.flops))
        gb = moved / ms / 1e6 if moved and work == "forward" else None
        tflop = flops / ms / 1e9 if flops and work != "forward" else None
        peak = roof.tflop_per_s.get(str(case.dtype).removeprefix("torch."))
        yield KernelTiming(
            kernel.name,
            case.title,
            name,
            work,
            ms,
            (ratio.median, ratio.low, ratio.high) if ratio else None,
            gb,
            tflop,
            gb / roof.gb_per_s if gb else tflop / peak if tflop and peak else None,
            calls[name][2],
        )


def _call(
    function: Callable[..., Any], inputs: dict[str, Any], differentiate: tuple[str, ...]
) -> Callable[[], Any]:
    import torch

    from flatout.kernels.kernel import tensors_of

    if not differentiate:

        def forward() -> Any:
            with torch.no_grad():
                return function(**inputs)

        return forward
    leaves = [inputs[name].detach().requires_grad_() for name in differentiate]
    held = {**inputs, **dict(zip(differentiate, leaves, strict=True))}

    def both() -> Any:
        outputs = [output for output in tensors_of(function(**held)) if output.requires_grad]
        return torch.autograd.grad(
            outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True
        )

    return both


def _placed(value: object, gpu: bool) -> Any:
    import torch

    if isinstance(value, list):
        return [_placed(each, gpu) for each in value]
    return value.cuda() if gpu and isinstance(value, torch.Tensor) else value


COLUMNS = ("implementation", "ms", "speed-up [95 %]", "of the roofline", "peak memory")


def cells(row: KernelTiming) -> tuple[str, ...]:
    """Return the text of one table row."""
    if row.ms is None:
        return (row.contestant, "not run", row.why_not, "", "")
    ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*row.ratio) if row.ratio else ""
    roof = (
        f"{100 * row.share:.0f} % ({f'{row.gb_per_s:,.0f} GB/s' if row.gb_per_s else f'{row.tflop_per_s:,.2f} TFLOP/s'})"
        if row.share
        else ""
    )
    return (
        row.contestant,
        f"{row.ms:.4g}",
        ratio,
        roof,
        "" if row.peak_bytes is None else size(row.peak_bytes),
    )


def show(subject: str, rounds: int, only: str) -> None:
    """Measure each case and kind of work, and print its table at once."""
    kernel = kernel_of(subject)
    roof = roofline()
    rates = ", ".join(f"{rate:,.2f} TFLOP/s {dtype}" for dtype, rate in roof.tflop_per_s.items())
    click.echo(f"{roof.device}: measured {roof.gb_per_s:,.0f} GB/s copied, {rates}")
    for title, rows in groupby(
        rows_of(kernel, rounds, only, roof=roof), key=lambda row: f"{row.kernel}, {row.case}, {row.work}"
    ):
        table = Table(box=None, padding=(0, 2), title=title, title_justify="left")
        for column in COLUMNS:
            table.add_column(column)
        for row in rows:
            table.add_row(*cells(row))
        Console().print(table)


def print_timings(subject: str, rounds: int, only: str) -> None:
    """Measure all, and print one record. What the kernels print goes to standard error."""
    kernel = kernel_of(subject)
    with redirect_stdout(sys.stderr):
        roof = roofline()
        rows = [row.to_json() for row in rows_of(kernel, rounds, only, roof=roof)]
    print_json(KernelBenchRecord(roof.device, roof.gb_per_s, roof.tflop_per_s, rows))
