"""`flatout scale`: predict the speed of a program on many devices from a measurement on one."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.arguments import PROGRAM, Duration, writable
from flatout.cli.measurement import Measurement, header, measurement_options
from flatout.diagnose.profiling import ProfileOptions, Profiling
from flatout.measure.clock import seconds
from flatout.measure.links import Fabric
from flatout.measure.scaling import FIXED_SHARE, Workload, evenly, predict, scaled
from flatout.plan.errors import NothingMeasured, UsageError
from flatout.plan.folder import JobFolder, read_json
from flatout.plan.plan import Choice, Plan
from flatout.plan.profile import ProfileRecord
from flatout.plan.records import PHASES, PhaseTime
from flatout.plan.scale import STRATEGIES, Link, ScaleRecord, Timing, read_devices, read_link
from flatout.probe.machine import look
from flatout.trial.blocks import Watcher
from flatout.trial.parent import Trial, measure

STEPS = 40
# Cost of further devices beyond the transfers. ResNet-50 takes 97 ms on one V100 and 103 ms on two, whose
# gradients need 0.9 ms (pytorch, benchmarks/distributed/ddp). bench/scaling.py compares its predictions with
# all other runs.
OVERHEAD = 0.062


NOT_OF_ITS_FORM = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
)  # raised by an invalid profile


class ShareParam(click.ParamType):
    """A share from 0 to 1: ``6%`` or ``0.06``."""

    name = "share"

    def convert(self, value: object, param: object, ctx: object) -> float:
        text = str(value).strip()
        try:
            number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            self.fail(f"{value!r} is not a share; write 6% or 0.06")
        return number


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
    default=None,
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
    "--fixed",
    default=None,
    type=ShareParam(),
    help="Share of a step independent of the batch size; by default measured at half the batch (strong).",
)
@click.option(
    "--overhead",
    default=None,
    type=ShareParam(),
    help="Cost of further devices beyond transfers, as a share of compute.  [default: 6.2%; on a CPU 0]",
)
@click.option(
    "--from",
    "profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this profile.json and run nothing.",
)
@click.option(
    "--second",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this profile.json at another batch size, for strong scaling.",
)
@click.option(
    "--budget",
    default="2m",
    show_default=True,
    type=Duration(),
    help="Time limit for measuring in steady state.",
)
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
    fixed: float | None,
    overhead: float | None,
    profile: Path | None,
    second: Path | None,
    budget: float,
    job: Path | None,
    as_json: bool,
    words: tuple[str, ...],
) -> int:
    """Predict the time of a step on many devices, and what limits it there.

    flatout measures the unchanged program on one device and stops it, or reads an existing profile. It
    computes the rest: gradient buckets, their overlap with the backward pass, and a model of the links. The
    chart is scale.html in the job's folder.
    """
    devices, ways = read_devices(gpus), _strategies(strategies)
    between = read_link(network)
    near = read_link(inside, "--inside") if inside is not None else None
    if near is not None and between.inside:
        raise UsageError(
            f"--network {network} joins the devices of one machine. With --inside, --network must connect machines, as ib-ndr does."
        )
    seen = _read_profile(profile) if profile is not None else None

    def run(stage: object, save: object) -> None:
        found = seen if seen is not None else _measured(asked, budget, stage)
        _take(record, found, str(profile) if profile is not None else "")
        if second is not None:
            record.second = timing_of(_read_profile(second))
            if not record.second.samples or record.second.samples == timing_of(found).samples:
                raise UsageError(
                    f"--second {second} is not a profile at another batch size. Run `flatout profile` with another one."
                )
        elif scaling == "strong" and fixed is None and profile is None:
            record.second = _half(asked, found, record, budget, stage)
        record.overhead = (
            overhead
            if overhead is not None
            else OVERHEAD
            if record.device == "cuda" or compute_scale > 1
            else 0.0
        )
        _predict(record, ways, devices, overhead)
        record.status = "done"

    try:
        asked = (
            Measurement("scale", words, job)
            if seen is None or profile is None
            else OfProfile(seen, profile, job)
        )
        record = ScaleRecord(
            **asked.header,
            scaling=scaling,
            network=between,
            inside=near,
            node=node if near is not None else 1,
            compute_scale=compute_scale,
            local_steps=local_steps,
            fixed_share=fixed,
        )
        asked.answer(record, budget, run)
        _show(asked, record, as_json)
    except NOT_OF_ITS_FORM as error:
        if seen is None:
            raise
        raise UsageError(
            f"{profile} is not a valid profile ({type(error).__name__}: {str(error)[:200]}). `flatout profile COMMAND...` writes a new "
            "one."
        ) from None
    return 0


def _show(asked: Measurement, record: ScaleRecord, as_json: bool) -> None:
    from flatout.render.scale_page import because, headline, scale_html, scale_table, sentences

    parts = [
        f"{headline(record)}\n{because(record)}\n",
        scale_table(record),
        *sentences(record),
        *(f"note: {note}" for note in record.notes),
    ]
    asked.show(record, scale_html(record), parts, as_json)


def _strategies(text: str) -> list[str]:
    ways = list(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    wrong = [way for way in ways if way not in STRATEGIES]
    if wrong or not ways:
        raise UsageError(f"--strategies {text} is invalid. The strategies are {', '.join(STRATEGIES)}.")
    return ways


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


class OfProfile(Measurement):
    """A prediction from a profile: its program need not be here, and the files are written next to it."""

    def __init__(self, seen: ProfileRecord, profile: Path, job: Path | None) -> None:
        self.name, self.facts = "scale", look()
        self.folder = writable(JobFolder(job or profile.resolve().parent), job is not None)
        self.header = {**header(seen.command, self.facts), "cwd": seen.cwd}


class Telling(Watcher):
    def __init__(self, stage: object) -> None:
        self.tell = stage

    def stage(self, name: str, detail: str = "") -> None:
        self.tell(name, detail)  # type: ignore[operator]


def _measured(asked: Measurement, budget: float, stage: object) -> ProfileRecord:
    """Measure unprofiled steps of the program only. Raises ProgramFailed, NothingMeasured."""
    record = ProfileRecord(**asked.header)
    requested = ProfileOptions(STEPS, budget_s=budget, stages=frozenset())
    return Profiling(asked.command, asked.folder, asked.facts, requested, record, {}, Telling(stage)).run()


def timing_of(profile: ProfileRecord) -> Timing:
    """Return the phases' times from their shares, so that they add up to the step.

    Raises NothingMeasured if a step does not consist of phases."""
    if profile.unit != "step":
        raise NothingMeasured(
            "a step of this program is a closure that lasts seconds (LBFGS): its backward passes cannot be separated from its steps."
        )
    samples = (
        round(profile.samples_per_s * (profile.step_ms or 0.0) / 1000, 6) if profile.samples_per_s else None
    )
    return _timing(
        profile.phases, profile.step_ms or 0.0, samples, int(profile.context.get("backwards_per_step") or 1)
    )


def _timing(phases: dict[str, PhaseTime], step_ms: float, samples: float | None, passes: int) -> Timing:
    ms = {name: phases[name].share * step_ms if name in phases else 0.0 for name in PHASES}
    return Timing(
        ms["forward"],
        ms["backward"],
        ms["optimizer"],
        ms["data"] + ms["copy"] + ms["other"],
        samples,
        max(1, passes),
    )


def _take(record: ScaleRecord, profile: ProfileRecord, path: str) -> None:
    """Copy the times and bytes of one device into the record, and add notes about them."""
    record.timing, record.device, record.versions = timing_of(profile), profile.device, profile.versions
    record.tensor_bytes = [int(size) for size in profile.settings.get("gradient_bytes", ())]
    record.parameter_bytes = float(
        sum(record.tensor_bytes) or sum(profile.settings.get("dtypes", {}).values())
    )
    if not record.parameter_bytes:
        raise NothingMeasured(
            "this profile lacks the size of the parameters, so the communication is unknown. Run `flatout profile` again."
        )
    if not record.tensor_bytes:
        record.notes.append(
            "the size of each gradient is unknown, only their sum: the model assumes that they become ready at an even rate"
        )
    record.measured = (
        f"{profile.steps} steps on {profile.device}, {'from ' + path if path else 'measured now'}"
    )
    if record.timing.passes > 1:
        record.notes.append(
            f"a step has {record.timing.passes} backward passes: the model assumes that DDP sends after the last one only (no_sync)"
        )


def _half(
    asked: Measurement, profile: ProfileRecord, record: ScaleRecord, budget: float, stage: object
) -> Timing | None:
    """Measure the program with half its batch, to learn how its time depends on the batch size.

    Returns None and adds a note if that is impossible."""
    loader = profile.context.get("training_loader")
    loaders = profile.context.get("loaders") or []
    size = loaders[loader].get("batch_size") if isinstance(loader, int) and loader < len(loaders) else None
    if not size or size < 2:
        record.notes.append(
            "half the batch could not be measured: the program builds its batches itself, or each has a single sample"
        )
        return None
    Telling(stage).stage("measuring", f"half the batch, {size // 2}")
    choice = Choice("batch_size", {"size": size // 2, "loader": loader})
    with Trial(asked.command, asked.folder.new_trial(), Plan((choice,)), asked.facts) as trial:
        half = measure(trial, STEPS, seconds() + 600 + budget)
    if not half.step_ms or not half.phases or not half.samples_per_step or half.skipped:
        record.notes.append(
            f"half the batch could not be measured: {half.reason or 'the program did not train with it'}"
        )
        return None
    phases = {
        name: phase if isinstance(phase, PhaseTime) else PhaseTime.from_json(phase)
        for name, phase in half.phases.items()
    }
    return _timing(
        phases, half.step_ms, half.samples_per_step, profile.context.get("backwards_per_step") or 1
    )


def _predict(record: ScaleRecord, ways: list[str], devices: list[int], overhead: float | None) -> None:
    assert record.timing is not None
    assert record.network is not None
    factor = record.compute_scale
    second = scaled(record.second, factor) if record.second is not None else None
    work = Workload(
        scaled(record.timing, factor),
        tuple(record.tensor_bytes) or evenly(record.parameter_bytes),
        record.parameter_bytes,
        second,
        record.fixed_share if record.fixed_share is not None else FIXED_SHARE,
        record.overhead,
        record.local_steps,
    )
    if "hybrid" in ways and record.inside is None:
        record.notes.append(
            "hybrid is left out: it shards inside nodes, and without --inside each node has one device"
        )
        ways = [way for way in ways if way != "hybrid"]
    record.notes += _assumptions(record, ways, overhead)
    fabric = Fabric(record.network, record.inside, record.node)
    record.points = [predict(work, fabric, way, count, record.scaling) for way in ways for count in devices]


def _assumptions(record: ScaleRecord, ways: list[str], overhead: float | None) -> list[str]:
    """Return notes on the assumptions: values that were given or assumed, not measured."""
    notes = []
    if record.compute_scale != 1.0:
        notes.append(
            f"--compute-scale {record.compute_scale:g}: forward, backward and optimizer are assumed to be {record.compute_scale:g} times faster than "
            f"measured on {record.device}; this is not measured. The host's share keeps its time"
        )
    if record.overhead:
        whence = (
            "from --overhead"
            if overhead is not None
            else "ResNet-50 on 2 V100, PyTorch's own benchmark; --overhead overrides it"
        )
        notes.append(
            f"further devices cost {record.overhead:.1%} of compute beyond transfers: hooks, copies into buckets, the slowest device ({whence})"
        )
    if record.scaling == "strong" and record.second is None:
        share = record.fixed_share if record.fixed_share is not None else FIXED_SHARE
        notes.append(
            f"{share:.0%} of a step's compute is assumed to be independent of the batch; --second measures it with another batch size"
        )
    elif record.scaling == "strong" and record.second is not None and record.second.samples:
        notes.append(
            f"the dependence on the batch comes from a second one of {record.second.samples:,.0f} samples; other sizes are on the line through both"
        )
    if record.inside is None and record.network is not None and not record.network.inside:
        notes.append(
            "each device is assumed to be its own node; --inside nvlink4 --node 8 describes nodes of several devices"
        )
    if "local" in ways:
        notes.append(
            f"local SGD averages parameters every {record.local_steps} steps: its results differ from those of the other strategies"
        )
    return (
        [*notes, "link rates are those stated by their vendors and NCCL, without other traffic"]
        if not _by_hand(record.network)
        else notes
    )


def _by_hand(link: Link | None) -> bool:
    return link is not None and "=" in link.name
