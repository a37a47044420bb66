"""`flatout kernel bench`: time implementations in turn on one device, beside a copy measured there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from flatout.cli.options.arguments import Duration
from flatout.cli.options.output import print_json
from flatout.job.temporary import temporary_folder
from flatout.kernels import NAMES
from flatout.launch.compiler import cpp_compiler, emulate
from flatout.launch.failure import signal_name
from flatout.launch.process import TimedCommand
from flatout.measure.clock import Clock, clock_for, seconds
from flatout.measure.statistics import Round, compare, median
from flatout.schema.errors import UsageError
from flatout.schema.machine_snapshot import CommandResult
from flatout.schema.outputs import KernelCheck, KernelChecksRecord

if TYPE_CHECKING:
    from flatout.kernels.kernel import Case, Kernel


OK, FAILED, NOT_RUN = "ok", "failed", "not run"
MARKS = {OK: ("ok     ", "green"), FAILED: ("FAILED ", "red"), NOT_RUN: ("not run", "yellow")}
SANITIZER = ("--tool", "memcheck", "--error-exitcode", "99", "--target-processes", "all")


@dataclass
class Gate:
    """Results that the child processes have written for one kernel."""

    subject: str
    limit_s: float
    records: Path
    deadline_s: float
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTHONUNBUFFERED": "1"})
    header: dict[str, Any] = field(default_factory=dict)  # what the child says first: names, CUDA sources
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    last_begun: int = -1
    complete: bool = False

    def run(self, prefix: Sequence[str] = ()) -> CommandResult:
        """Run a child from the check after the last one that began. Raises UsageError if there is no kernel."""
        module = (sys.executable, "-m", "flatout.kernels", self.subject, str(self.records))
        remaining_s = max(self.deadline_s - seconds(), 1.0)
        command = [*prefix, *module, str(self.last_begun)]
        ended = TimedCommand(command, self.environment).result(remaining_s)
        lines = self.records.read_text(encoding="utf-8").splitlines() if self.records.is_file() else ()
        for record in map(json.loads, lines):
            if "refused" in record:
                raise UsageError(record["refused"])
            if "checks" in record:
                self.header = record
            elif "begins" in record:
                self.last_begun = max(self.last_begun, record["begins"])
            elif "status" in record:
                self.outcomes[record["name"]] = (record["status"], record["why"])
            else:
                self.complete = True
        if not self.header:
            raise UsageError(f"{self.subject} cannot be checked: {self.exit_reason(ended)}")
        return ended

    def exit_reason(self, ended: CommandResult) -> str:
        name = signal_name(-ended.code) if ended.code is not None and ended.code < 0 else ""
        if ended.timed_out:
            exit_reason = f"it did not finish within {self.limit_s:.0f} s and was stopped; increase `--limit`"
        elif name == "SIGSEGV":
            exit_reason = "it accessed invalid memory (SIGSEGV)"
        else:
            exit_reason = f"it killed the process ({name or f'exit code {ended.code}'})"
        return f"{exit_reason}. {_end_of(ended)}"

    def count(self, status: str) -> int:
        return sum(outcome == status for outcome, _ in self.outcomes.values())


def check_all(subjects: Sequence[str], limit: str, as_json: bool = False) -> int:
    """Check every subject and print the results. Return 1 if a check failed."""
    limit_s = float(Duration().convert(limit, None, None))
    failed, checks = 0, []
    for subject in subjects or NAMES:
        gate = check(subject, limit_s)
        checks += [KernelCheck(subject, name, *outcome) for name, outcome in gate.outcomes.items()]
        failed += gate.count(FAILED)
        if as_json:
            continue
        click.secho(gate.header["kernel"], bold=True)
        width = max(map(len, gate.outcomes), default=0)
        for name, (status, why) in gate.outcomes.items():
            mark, colour = MARKS[status]
            click.echo(f"  {click.style(mark, fg=colour)}  {name:{width}}  {why}".rstrip())
        click.echo(f"  {gate.count(OK)} ok, {gate.count(FAILED)} failed, {gate.count(NOT_RUN)} not run\n")
    if as_json:
        print_json(KernelChecksRecord(checks))
    return 1 if failed else 0


def check(subject: str, limit_s: float) -> Gate:
    """Run the checks of one kernel. Raises UsageError if there is no such kernel."""
    with temporary_folder("kernel") as folder:
        gate = Gate(subject, limit_s, folder / "records", seconds() + limit_s)
        ended = gate.run()
        if gate.header["emulate"]:
            gate.environment["FLATOUT_EMULATED"] = str(folder)
            for path, kernels, name in gate.header["sources"]:
                if why := emulate(Path(path), folder / name, kernels):
                    status = FAILED if cpp_compiler() else NOT_RUN
                    gate.outcomes[f"{Path(path).name} emulated"] = (status, why)
            ended = gate.run()
        names = gate.header["checks"]
        while not gate.complete:
            index = gate.last_begun
            if index < 0 or names[index] in gate.outcomes:  # the child exited between two checks
                index += 1
            if index >= len(names):
                break
            gate.last_begun = index
            gate.outcomes[names[index]] = (FAILED, gate.exit_reason(ended))
            if ended.timed_out:
                not_run = dict.fromkeys(names[index + 1 :], (NOT_RUN, "the time limit was reached"))
                gate.outcomes |= not_run
                break
            ended = gate.run()
        if gate.header["gpu"]:
            _sanitize(gate, folder)
    return gate


def _end_of(ended: CommandResult) -> str:
    return " ".join(ended.output.split())[-300:]


def _sanitize(gate: Gate, folder: Path) -> None:
    """Repeat the memory checks under compute-sanitizer.

    torch's caching allocator is disabled, because it would hide out-of-bounds accesses."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return
    sanitized = Gate(gate.subject, gate.limit_s, folder / "sanitized", gate.deadline_s)
    sanitized.environment |= {"FLATOUT_SANITIZED": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = sanitized.run((tool, *SANITIZER))
    if ended.code != 0:
        why = f"compute-sanitizer: {_end_of(ended)}"
        sanitized.outcomes = dict.fromkeys(sanitized.header["checks"], (FAILED, why))
    gate.outcomes |= sanitized.outcomes


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
