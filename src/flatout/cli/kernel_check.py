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
from flatout.launch.compiler import ChildResult, cpp_compiler, emulate, run_child
from flatout.measure.clock import seconds
from flatout.schema.errors import UsageError
from flatout.schema.outputs import KernelCheck, KernelChecksRecord

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

    def run(self, prefix: Sequence[str] = ()) -> ChildResult:
        """Run a child from the check after the last one that began. Raises UsageError if there is no kernel."""
        module = (sys.executable, "-m", "flatout.kernels", self.subject, str(self.records))
        remaining_s = max(self.deadline_s - seconds(), 1.0)
        ended = run_child([*prefix, *module, str(self.last_begun)], self.environment, remaining_s)
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

    def exit_reason(self, ended: ChildResult) -> str:
        if ended.timed_out:
            exit_reason = f"it did not finish within {self.limit_s:.0f} s and was stopped; increase `--limit`"
        elif ended.signal_name == "SIGSEGV":
            exit_reason = "it accessed invalid memory (SIGSEGV)"
        else:
            exit_reason = f"it killed the process ({ended.signal_name or f'exit code {ended.code}'})"
        return f"{exit_reason}. {_end_of(ended)}"

    def count(self, status: str) -> int:
        return sum(1 for outcome, _ in self.outcomes.values() if outcome == status)


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


def _end_of(ended: ChildResult) -> str:
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
