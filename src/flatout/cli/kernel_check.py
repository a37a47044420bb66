"""`flatout kernel check`: run the checks of a kernel in a child process, restarted after a crash."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from flatout.cli.options.arguments import Duration
from flatout.cli.options.json_output import print_json
from flatout.job.temporary import temporary_folder
from flatout.kernels import NAMES
from flatout.launch.compiler import Ended, cpp_compiler, emulate, nvcc, run_child
from flatout.measure.clock import seconds
from flatout.schema.errors import UsageError
from flatout.schema.outputs import KernelCheck, KernelChecksRecord

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
MARK = {OK: "ok     ", FAILED: "FAILED ", NOT_RUN: "not run"}
COLOUR = {OK: "green", FAILED: "red", NOT_RUN: "yellow"}
TARGETS = ("sm_80", "sm_90a")


@dataclass
class Gate:
    """Results that the child processes have written for one kernel."""

    subject: str
    title: str = ""
    names: list[str] = field(default_factory=list)
    sources: list[tuple[str, list[str], str]] = field(
        default_factory=list
    )  # path, kernels in it, the file name of its emulated library
    gpu: bool = False
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    last_begun: int = -1
    ended: bool = False

    def read(self, records: Path) -> None:
        for line in records.read_text(encoding="utf-8").splitlines() if records.is_file() else ():
            record = json.loads(line)
            if "refused" in record:
                raise UsageError(record["refused"])
            if "kernel" in record:
                self.title, self.names, self.sources, self.gpu = (
                    record["kernel"],
                    record["checks"],
                    record["sources"],
                    record["gpu"],
                )
            elif "begins" in record:
                self.last_begun = record["begins"]
            elif "at" in record:
                self.outcomes[record["name"]] = (record["status"], record["why"])
            else:
                self.ended = True

    @property
    def wants_emulator(self) -> bool:
        return bool(self.sources) and not self.gpu and "FLATOUT_EMULATED" not in os.environ

    def count(self, status: str) -> int:
        return sum(1 for found, _ in self.outcomes.values() if found == status)


def check_all(subjects: Sequence[str], limit: str, quiet: bool, as_json: bool = False) -> int:
    """Check every subject and print the results. Return 1 if a check failed."""
    limit_s = float(Duration().convert(limit, None, None))
    failed, found = 0, []
    for subject in subjects or NAMES:
        gate = check(subject, limit_s)
        found += [KernelCheck(subject, name, *outcome) for name, outcome in gate.outcomes.items()]
        if not as_json:
            show(gate, quiet)
        failed += gate.count(FAILED)
    if as_json:
        print_json(KernelChecksRecord([each for each in found if not quiet or each.status != OK]))
    return 1 if failed else 0


def check(subject: str, limit_s: float) -> Gate:
    """Run the checks of one kernel. Raises UsageError if there is no such kernel."""
    gate, until = Gate(subject), seconds() + limit_s
    with temporary_folder("kernel") as folder:
        records = folder / "records"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        ended = _child(subject, records, -1, environment, until)
        gate.read(records)
        if not gate.names:
            raise UsageError(f"{subject} cannot be checked: {_how(ended, limit_s)}. {_tail(ended)}")
        if gate.wants_emulator:
            environment["FLATOUT_EMULATED"] = str(folder)
            for path, kernels, name in gate.sources:
                if why := emulate(Path(path), folder / name, kernels):
                    gate.outcomes[f"{Path(path).name} emulated"] = (
                        FAILED if cpp_compiler() else NOT_RUN,
                        why,
                    )
            ended = _child(subject, records, -1, environment, until)
            gate.read(records)
        while not gate.ended:
            begun = gate.last_begun
            if begun < 0 or gate.names[begun] in gate.outcomes:  # the child exited between two checks
                begun += 1
            if begun >= len(gate.names):
                break
            gate.last_begun = begun
            gate.outcomes[gate.names[gate.last_begun]] = (FAILED, f"{_how(ended, limit_s)}. {_tail(ended)}")
            if ended.timed_out:
                for name in gate.names[gate.last_begun + 1 :]:
                    gate.outcomes[name] = (NOT_RUN, "the time limit was reached")
                break
            ended = _child(subject, records, gate.last_begun, environment, until)
            gate.read(records)
        _with_nvcc(gate)
        if gate.gpu:
            _sanitized(gate, folder, environment, until)
    return gate


def show(gate: Gate, quiet: bool) -> None:
    click.secho(gate.title, bold=True)
    width = max((len(name) for name in gate.outcomes), default=0)
    for name, (status, why) in gate.outcomes.items():
        if not quiet or status != OK:
            click.echo(f"  {click.style(MARK[status], fg=COLOUR[status])}  {name:{width}}  {why}".rstrip())
    click.echo(f"  {gate.count(OK)} ok, {gate.count(FAILED)} failed, {gate.count(NOT_RUN)} not run\n")


def _child(
    subject: str,
    records: Path,
    after: int,
    environment: dict[str, str],
    until: float,
    prefix: Sequence[str] = (),
) -> Ended:
    return run_child(
        [*prefix, sys.executable, "-m", "flatout.kernels", subject, str(records), str(after)],
        environment,
        max(until - seconds(), 1.0),
    )


def _how(ended: Ended, limit_s: float) -> str:
    if ended.timed_out:
        return f"it did not finish within {limit_s:.0f} s and was stopped; increase `--limit`"
    if ended.signal_name == "SIGSEGV":
        return "it accessed invalid memory (SIGSEGV)"
    return f"it killed the process ({ended.signal_name or f'exit code {ended.code}'})"


def _tail(ended: Ended) -> str:
    return " ".join(ended.output.split())[-300:]


def _with_nvcc(gate: Gate) -> None:
    """Compile with nvcc where NVRTC was unavailable (a CPU build of torch)."""
    for path, *_ in gate.sources:
        for target in TARGETS:
            name = f"{Path(path).name} compiles for {target}"
            if (
                gate.outcomes.get(name, (OK, ""))[0] == NOT_RUN
                and (why := nvcc(Path(path), target)) is not None
            ):
                gate.outcomes[name] = (FAILED, why) if why else (OK, "nvcc")


def _sanitized(gate: Gate, folder: Path, environment: dict[str, str], until: float) -> None:
    """Repeat the memory checks under compute-sanitizer.

    torch's caching allocator is disabled, because it would hide out-of-bounds accesses."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "99", "--target-processes", "all")
    found = Gate(gate.subject)
    ended = _child(
        gate.subject,
        folder / "sanitized",
        -1,
        {**environment, "FLATOUT_SANITIZED": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        until,
        prefix,
    )
    found.read(folder / "sanitized")
    wrong: dict[str, Any] = (
        {} if ended.code == 0 else dict.fromkeys(found.names, (FAILED, f"compute-sanitizer: {_tail(ended)}"))
    )
    gate.outcomes |= {
        **{name: outcome for name, outcome in found.outcomes.items() if name in gate.outcomes},
        **wrong,
    }
