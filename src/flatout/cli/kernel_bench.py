"""`flatout kernel bench`: time implementations in turn on one device, beside a copy measured there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from flatout.measure.clock import Clock, clock_for
from flatout.measure.statistics import Round, compare, median
from flatout.schema.errors import UsageError

if TYPE_CHECKING:
    from flatout.kernels.kernel import Case, Kernel

WARM_UPS = 3
BLOCK_MS = 20.0  # approximate duration of a block of calls
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # many times the last-level cache

ExtraImplementations = Callable[[Any, Any], dict[str, Callable[..., Any]]]


@dataclass(frozen=True)
class KernelTiming:
    """The timing of one implementation in one case.

    ``ms`` is the median call. ``ratio`` is the speed-up over the reference with its 95 % interval.
    ``gb_per_s`` is a lower bound of the memory traffic, ``share`` its share of a copy's."""

    kernel: str
    case: str
    implementation: str
    passes: str
    ms: float | None = None
    ratio: tuple[float, float, float] | None = None
    gb_per_s: float | None = None
    share: float | None = None
    why_not: str = ""


def device_of_kernels() -> tuple[str, str]:
    """Type and name of the device that kernels run on."""
    import torch

    return ("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else ("cpu", "CPU")


def copy_gb_per_s() -> float:
    """The best of ten copies on the device that kernels run on: bytes read and written."""
    import torch

    device, _ = device_of_kernels()
    clock = clock_for(torch, device)
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_ms = min(_elapsed_ms(clock, lambda: target.copy_(source), 1) for _ in range(10))
    return 2 * COPY_BYTES[device] / best_ms / 1e6


def kernel_of(subject: str) -> Kernel:
    """Find the kernel. Raises UsageError if there is none."""
    from flatout.kernels.subject import SubjectError, find

    try:
        return find(subject)
    except SubjectError as error:
        raise UsageError(str(error)) from None


def time_cases(
    kernel: Kernel,
    rounds: int,
    title_part: str,
    copy_rate: float,
    extra_implementations: ExtraImplementations | None = None,
) -> Iterator[KernelTiming]:
    """Measure every bench case. ``others(kernel, case)`` adds implementations by name.

    Raises UsageError if there is no case."""
    import torch
    from torch.utils._pytree import tree_map_only

    gpu = torch.cuda.is_available()
    cases = [
        case
        for case in kernel.cases()
        if case.bench and (gpu or case.bench == "any") and title_part in case.title
    ]
    if not cases:
        raise UsageError(
            f'{kernel.name} has no case to measure here{f" with {title_part!r} in its title" if title_part else ""}. Mark one with bench="any".'
        )
    for case in cases:
        inputs = case.make(torch.Generator().manual_seed(0))
        inputs = tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs) if gpu else inputs
        for passes in ("forward", "forward and backward") if case.differentiate else ("forward",):
            functions = {
                "reference": kernel.reference,
                "torch.compile": torch.compile(kernel.reference),
                **(extra_implementations(kernel, case) if extra_implementations else {}),
                **{impl.name: impl.call for impl in kernel.implementations if gpu or not impl.needs},
            }
            yield from _time_implementations(kernel, case, passes, functions, inputs, rounds, copy_rate)
            for implementation in kernel.implementations:
                if implementation.name not in functions:
                    yield KernelTiming(
                        kernel.name,
                        case.title,
                        implementation.name,
                        passes,
                        why_not="torch sees no CUDA device here",
                    )


def _time_implementations(
    kernel: Kernel,
    case: Case,
    passes: str,
    functions: dict[str, Callable[..., Any]],
    inputs: dict[str, Any],
    rounds: int,
    copy_rate: float,
) -> Iterator[KernelTiming]:
    import torch

    clock = clock_for(torch, device_of_kernels()[0])
    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, function in functions.items():
        call = _call(function, inputs, case.differentiate if passes != "forward" else ())
        try:
            _elapsed_ms(clock, call, WARM_UPS)
            calls[name] = call, max(int(BLOCK_MS / max(_elapsed_ms(clock, call, 1), 1e-3)), 1)
        except Exception as error:  # a compiler failure or out of memory is a result
            why_not = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield KernelTiming(kernel.name, case.title, name, passes, why_not=why_not)
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds):  # the order changes from round to round
        for name in list(calls) if round_number % 2 == 0 else reversed(list(calls)):
            blocks[name].append(_elapsed_ms(clock, *calls[name]))
    moved_bytes = kernel.moved_bytes(inputs) if kernel.moved_bytes and passes == "forward" else None
    for name, times in blocks.items():
        ms, ratio = median(times), None
        if "reference" in blocks:
            pairs = [Round(a, b) for a, b in zip(blocks["reference"], times, strict=True)]
            speed_up = compare([pairs])
            ratio = speed_up.median, speed_up.low, speed_up.high
        rate = moved_bytes / ms / 1e6 if moved_bytes else None
        share = rate / copy_rate if rate else None
        yield KernelTiming(kernel.name, case.title, name, passes, ms, ratio, rate, share)


def _elapsed_ms(clock: Clock, call: Callable[[], Any], count: int) -> float:
    """Milliseconds per call."""
    clock.synchronize()
    start = clock.mark()
    for _ in range(count):
        call()
    return clock.elapsed_ms(start, clock.mark()) / count


def _call(
    function: Callable[..., Any], inputs: dict[str, Any], differentiate: tuple[str, ...]
) -> Callable[[], Any]:
    import torch

    from flatout.kernels.kernel import tensors_of

    leaves = [inputs[name].detach().requires_grad_() for name in differentiate]
    arguments = {**inputs, **dict(zip(differentiate, leaves, strict=True))}

    def call() -> Any:
        with torch.set_grad_enabled(bool(leaves)):
            outputs = [output for output in tensors_of(function(**arguments)) if output.requires_grad]
        grad_outputs = [torch.ones_like(output) for output in outputs]
        return leaves and torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True)

    return call


COLUMNS = ("implementation", "ms", "speed-up [95 %]", "of a copy's bandwidth")


def cells(row: KernelTiming) -> tuple[str, ...]:
    """Return the text of one table row."""
    if row.ms is None:
        return (row.implementation, "not run", row.why_not, "")
    ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*row.ratio) if row.ratio else ""
    share = f"{100 * row.share:.0f} % ({row.gb_per_s:,.0f} GB/s)" if row.share else ""
    return (row.implementation, f"{row.ms:.4g}", ratio, share)


def show(subject: str, rounds: int, title_part: str) -> None:
    """Measure each case and kind of work, and print its table at once."""
    kernel, (_, device) = kernel_of(subject), device_of_kernels()
    copy_rate = copy_gb_per_s()
    click.echo(f"{device}: measured {copy_rate:,.0f} GB/s copied")
    rows = time_cases(kernel, rounds, title_part, copy_rate)
    for title, rows_of_case in groupby(rows, key=lambda row: f"{row.kernel}, {row.case}, {row.passes}"):
        table = Table(*COLUMNS, box=None, padding=(0, 2), title=title, title_justify="left")
        for row in rows_of_case:
            table.add_row(*cells(row))
        Console().print(table)
