"""`flatout trial`: measure one run of a program."""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, Duration, program_argument, read_plan, require_program
from flatout.cli.options.device import apply_device, device_option
from flatout.cli.options.output import json_option, print_json, warn_untested
from flatout.diagnose.explain import explain_signal
from flatout.job.folder import TrialFolder, write_atomically
from flatout.job.temporary import remove, temporary
from flatout.launch.command import check_measurable, parse_command
from flatout.launch.restart_policy import oom_kills
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.errors import NothingMeasured
from flatout.trial.parent import Trial, measure
from flatout.trial.spec import TrialOptions


@click.command(context_settings=PROGRAM)
@click.option(
    "--steps", default=30, show_default=True, type=click.IntRange(1), help="Steps to measure in steady state."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=int,
    help="Seed for torch, numpy and random, set when they are imported.",
)
@click.option("--plan", "plan_path", default="none", show_default=True, help="Plan file, or `none`.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the JSON record to this file; the default is a temporary folder, until the next command.",
)
@click.option(
    "--timeout", default="1h", type=Duration(), show_default=True, help="End the program after this time."
)
@json_option
@device_option
@program_argument
def command(
    steps: int,
    seed: int,
    plan_path: str,
    out: Path | None,
    timeout: float,
    as_json: bool,
    device: str | None,
    argv: tuple[str, ...],
) -> int:
    """Run a program for some steps in steady state, stop it, and write a JSON record.

    The program's output and exit code are passed through; with --json, its output goes to standard error. The
    exit code is 3 if the program ended without an error before a step could be measured."""
    plan = read_plan(plan_path)
    cmd = check_measurable(parse_command(require_program(argv, "trial")))
    apply_device(device, cmd, "trial")
    folder = TrialFolder(temporary("trial"))
    kills_before = oom_kills()
    with (
        redirect_stdout(sys.stderr) if as_json else nullcontext(),
        Trial(cmd, folder, plan, warn_untested(look(cmd.argv)), TrialOptions(seed, show=True)) as trial,
    ):
        record = measure(trial, steps, seconds() + timeout)
    if as_json:
        print_json(record)
    if out is not None:
        write_atomically(out, json.dumps(record.to_json(), indent=1) + "\n")
        remove(folder.path)
    record_path = out or folder.result
    if record.status == "unattached":
        sys.stderr.write(f"flatout: nothing was measured: {record.reason}\n")
        return record.exit_code or 3
    if record.status == "broken":
        sys.stderr.write(
            f"flatout: internal error while measuring this program; please report it:\n{record.reason.rstrip()}\nrecord in {record_path}\n"
        )
        return 4
    if record.status == "hung":
        sys.stderr.write(f"flatout: the program hung: {record.reason}; record in {record_path}\n")
        return 3
    if record.status == "finished" and record.steps < steps:
        sys.stderr.write(f"flatout: measured only {record.steps} of {steps} steps within --timeout\n")
    rate = f", {record.step_ms:.2f} ms per {record.unit}" if record.step_ms else ""
    sys.stderr.write(
        f"flatout: {record.steps} steps measured after {record.warmup_steps} warm-up steps{rate} ({record.status}); record in {record_path}\n"
    )
    if record.status == "failed":
        for line in explain_signal(
            record.exit_code, record.log_tail, (oom_kills() or 0) - (kills_before or 0)
        ):
            sys.stderr.write(f"flatout: {line}\n")
    code = record.exit_code or (0 if record.steps else NothingMeasured.exit_code)
    return code if code >= 0 else 128 - code
