"""Measures the ceilings of this machine in a child process."""

import os
import sys
from collections.abc import Callable
from typing import Any

from flatout import __version__
from flatout.job.folder import json_lines
from flatout.job.temporary import temporary_folder
from flatout.launch.process import TimedCommand
from flatout.measure.ceilings import machine_key
from flatout.measure.clock import utc_now
from flatout.schema.errors import NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.machine_snapshot import Ceiling, CeilingsRecord, CommandResult

BENCH_LIMIT_S = 240.0
PYTHON = (sys.executable, "-P", "-m")


def measure(facts: Facts, progress: Callable[[str], None]) -> CeilingsRecord:
    """Measures all ceilings; ``progress`` receives messages. Raises NothingMeasured if torch does not start."""
    record = CeilingsRecord(
        key=machine_key(facts), created=utc_now(), flatout=__version__, machine=_machine(facts)
    )
    # Uses one thread per available core, whatever the shell sets: torch does not see a quota.
    environment = {**os.environ, "OMP_NUM_THREADS": str(facts.cores), "MKL_NUM_THREADS": str(facts.cores)}
    with temporary_folder("bench") as folder:
        figures = folder / "figures.jsonl"
        progress("matrix products and memory")
        run = TimedCommand([*PYTHON, "flatout.measure.bench", str(figures)], environment).result(
            BENCH_LIMIT_S
        )
        for line in json_lines(figures):
            if isinstance(line.get("ceiling"), dict):
                record.ceilings.append(Ceiling.from_json(line["ceiling"]))
            else:
                record.threads, record.busy_cores = int(line.get("threads") or 0), line.get("busy_cores")
        if not record.ceilings:
            raise NothingMeasured(
                f"the ceilings could not be measured: {_failure(run)}. Run `flatout doctor` to see what is wrong with torch."
            )
        if run.timed_out or run.code:
            progress(f"some ceilings were not measured: {_failure(run)}")
    return record


def _machine(facts: Facts) -> dict[str, Any]:
    return {
        "cpu": facts.cpu,
        "cores": facts.cores,
        "memory_bytes": facts.memory_bytes,
        "gpus": [gpu.name for gpu in facts.gpus],
        "torch": facts.versions.get("torch", ""),
    }


def _failure(run: CommandResult) -> str:
    if run.timed_out:
        return "it exceeded its time limit and was stopped"
    last = [line for line in run.output.splitlines() if line.strip()]
    return f"exit code {run.code}" + (f", {last[-1].strip()}" if last else "")
