"""`flatout scale`: predict the speed of a program on many devices from a measurement on one."""

from pathlib import Path

import click

from flatout.cli.options.arguments import PROGRAM, budget_option
from flatout.cli.options.measurement import Measurement, header, measurement_options
from flatout.cli.options.output import warn_untested
from flatout.diagnose.profiling import ProfiledProgram, ProfileOptions, run_profile
from flatout.diagnose.scale_prediction import add_profile, predict_points
from flatout.job.folder import JobFolder, read_json
from flatout.measure.scaling import FIXED_SHARE
from flatout.probe.machine import look
from flatout.schema.errors import MALFORMED, UsageError
from flatout.schema.profile import ProfileRecord
from flatout.schema.scale import STRATEGIES, ScaleRecord, read_devices, read_link
from flatout.trial.blocks import Watcher

# Cost of further devices beyond the transfers. ResNet-50 takes 97 ms on one V100 and 103 ms on two, whose
# gradients need 0.9 ms (pytorch, benchmarks/distributed/ddp). bench/scaling.py compares its predictions with
# all other runs.
OVERHEAD = 0.062
STEPS = 40


@click.command(context_settings=PROGRAM)
@click.option(
    "--gpus",
    default="1..64",
    show_default=True,
    help="Numbers of devices: 8, or 1,2,4, or 8..1024 (doubling).",
)
@click.option(
    "--network",
    required=True,
    help="Network: ib-ndr, nvlink4, ... (an unknown name lists all), or bandwidth=100Gb/s,latency=5us.",
)
@click.option(
    "--inside",
    help="Link between the devices of a node, as nvlink4; --network then connects the nodes.",
)
@click.option(
    "--node", default=8, show_default=True, type=click.IntRange(1), help="Devices per node, with --inside."
)
@click.option(
    "--scaling",
    default="weak",
    show_default=True,
    type=click.Choice(["weak", "strong"]),
    help="weak: each device trains on the program's batch. strong: all devices share it.",
)
@click.option(
    "--strategies",
    default="ddp,fsdp,hybrid,local",
    show_default=True,
    help="Training strategies; local changes what the model learns.",
)
@click.option(
    "--local-steps",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Steps between two averages of local SGD.",
)
@click.option(
    "--compute-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Speed of the target devices relative to the measured one.",
)
@click.option(
    "--from",
    "profile_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this profile.json and run nothing.",
)
@budget_option("2m", "Time limit for measuring in steady state.")
@measurement_options
def command(
    gpus: str,
    network: str,
    inside: str | None,
    node: int,
    scaling: str,
    strategies: str,
    local_steps: int,
    compute_scale: float,
    profile_path: Path | None,
    budget: float,
    job: Path | None,
    as_json: bool,
    argv: tuple[str, ...],
) -> int:
    """Predict the time of a step on many devices, and what limits it there.

    flatout measures the unchanged program on one device and stops it, or reads an existing profile. It
    computes the rest: gradient buckets, their overlap with the backward pass, and a model of the links. The
    chart is scale.html in the job's folder."""
    devices, strategy_names = read_devices(gpus), _strategies(strategies)
    network_link = read_link(network)
    inside_link = read_link(inside, "--inside") if inside is not None else None
    if inside_link is not None and network_link.is_intra_node:
        raise UsageError(
            f"--network {network} joins the devices of one machine. With --inside, --network must connect machines, as ib-ndr does."
        )
    given_profile = _read_profile(profile_path) if profile_path is not None else None

    def run(progress: Watcher, save: object) -> None:
        measured = given_profile if given_profile is not None else _measured(measurement, budget, progress)
        add_profile(record, measured, str(profile_path) if profile_path is not None else "")
        record.overhead = OVERHEAD if record.device == "cuda" or compute_scale > 1 else 0.0
        predict_points(record, strategy_names, devices)
        record.status = "done"

    try:
        measurement = (
            Measurement("scale", argv, job)
            if given_profile is None or profile_path is None
            else ProfileMeasurement(given_profile, profile_path, job)
        )
        record = ScaleRecord(
            **measurement.header,
            scaling=scaling,
            network=network_link,
            intra_node_link=inside_link,
            devices_per_node=node if inside_link is not None else 1,
            compute_scale=compute_scale,
            local_steps=local_steps,
            fixed_share=FIXED_SHARE,
        )
        measurement.run(record, budget, run)
        from flatout.render.scale_page import scale_page

        measurement.show(record, scale_page(record), as_json)
    except MALFORMED as error:
        if given_profile is None:
            raise
        raise UsageError(
            f"{profile_path} is not a valid profile ({type(error).__name__}: {str(error)[:200]}). `flatout profile COMMAND...` writes a new "
            "one."
        ) from None
    return 0


def _strategies(text: str) -> list[str]:
    strategy_names = list(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    unknown = [name for name in strategy_names if name not in STRATEGIES]
    if unknown or not strategy_names:
        raise UsageError(f"--strategies {text} is invalid. The strategies are {', '.join(STRATEGIES)}.")
    return strategy_names


def _read_profile(path: Path) -> ProfileRecord:
    """Read a profile. Raises UsageError if the file is not a profile or has no steps."""
    data = read_json(path)
    try:
        record = ProfileRecord.from_json(data) if isinstance(data, dict) else None
    except (TypeError, AttributeError, ValueError):
        record = None
    if record is None or not record.step_ms or not record.phases:
        raise UsageError(
            f"{path} is not a profile with steady steps. `flatout profile COMMAND...` writes one."
        )
    return record


class ProfileMeasurement(Measurement):
    """A prediction from a profile: its program need not be here, and the files are written next to it."""

    def __init__(self, profile: ProfileRecord, path: Path, job: Path | None) -> None:
        self.name, self.facts = "scale", warn_untested(look())
        self.folder = JobFolder(job or path.resolve().parent).make()
        self.header = {**header(profile.command, self.facts), "cwd": profile.cwd}


def _measured(measurement: Measurement, budget: float, progress: Watcher) -> ProfileRecord:
    """Measure unprofiled steps of the program only. Raises ProgramFailed, NothingMeasured."""
    record = ProfileRecord(**measurement.header)
    options = ProfileOptions(STEPS, budget_s=budget, stages=frozenset())
    return run_profile(
        ProfiledProgram(
            measurement.command, measurement.folder, measurement.facts, options, record, {}, progress
        )
    )
