"""The options of `flatout run` for the record at its end and for experiment trackers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from click.core import ParameterSource

from flatout.cli.options.arguments import Duration, add_options, did_you_mean, writable
from flatout.export.trackers import MODULES, wrong_target
from flatout.job.folder import RUNS
from flatout.launch.command import Command
from flatout.measure.clock import utc_now
from flatout.render.formatting import shell
from flatout.schema.errors import UsageError
from flatout.schema.run_request import SummaryRequest
from flatout.tune.plan_files import job_folder

JSONL = "jsonl"
TRACKERS = (JSONL, *MODULES)
MIN_INTERVAL_S = 0.1


add_export_options = add_options(
    click.option(
        "--summary/--no-summary",
        default=True,
        help="At the end, show speed, limit and memory, and write them to .flatout/<job>/runs.",
    ),
    click.option(
        "--export",
        multiple=True,
        metavar="NAME[=TARGET]",
        help="Send live figures to a tracker: jsonl, tensorboard[=DIR], wandb[=PROJECT], mlflow[=URI], prometheus[=PORT]. Repeatable.",
    ),
    click.option(
        "--export-every",
        default="5s",
        show_default=True,
        type=Duration(),
        help="Interval of the live figures for --export.",
    ),
)


def summary_of(
    cmd: Command, machine: str, print_summary: bool, export: Sequence[str], interval_s: float
) -> SummaryRequest | None:
    """Return the request for the record of this run; None without one.

    Raises UsageError for an unknown or missing tracker."""
    if not print_summary and not export:
        return None
    if interval_s < MIN_INTERVAL_S:
        raise UsageError(f"--export-every is at least {MIN_INTERVAL_S:g} s.")
    source = click.get_current_context().get_parameter_source("export_every")
    if source == ParameterSource.COMMANDLINE and not export:
        raise UsageError("--export-every has no effect without --export, such as --export tensorboard.")
    for spec in export:
        name, _, target = spec.partition("=")
        if name not in TRACKERS:
            raise UsageError(
                f"there is no tracker {name!r}{did_you_mean(name, TRACKERS)} Choose from {', '.join(TRACKERS)}."
            )
        if name in MODULES and find_spec(MODULES[name]) is None:
            raise UsageError(
                f"{name} is not installed. Install it: pip install {MODULES[name].replace('_', '-')}."
            )
        if name == JSONL and target:
            raise UsageError(f"jsonl takes no target: the figures are in {RUNS}/<run>/ of the job's folder.")
        if why := wrong_target(name, target):
            raise UsageError(f"{name}: {why}")
    now = utc_now()
    name = f"{''.join(c for c in now[:19] if c.isdigit() or c == 'T')}-{os.getpid()}"
    job = job_folder(cmd)
    folder = (writable(job, explicit=False) if export else job).path.resolve() / RUNS
    live_s = interval_s if export else 0.0
    return SummaryRequest(str(folder), name, cmd.shown, now, print_summary, live_s, machine, cmd.piped)


def start_trackers(request: SummaryRequest, export: Sequence[str]) -> None:
    """Start a process for each tracker. It outlives this one and belongs to no process of the program."""
    folder = Path(request.folder) / request.name
    for spec in export:
        name = spec.partition("=")[0]
        if name == JSONL:
            continue
        command = [sys.executable, "-m", "flatout.export.trackers", spec, str(folder)]
        command += [str(os.getpid()), shell(request.command)]
        folder.mkdir(parents=True, exist_ok=True)
        # The shell ends at once, so the follower is no child of the program, which may wait for its children.
        # Its output goes to a file: whoever reads that of the program must not wait for a tracker.
        with (folder / f"{name}.log").open("wb") as log:
            subprocess.run(
                ["/bin/sh", "-c", '"$@" & ', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
