"""Predicts the step of a program on many devices, from its phases on one."""

from __future__ import annotations

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.links import Fabric
from flatout.measure.scaling import FIXED_SHARE, Workload, evenly, predict, scaled
from flatout.schema.errors import NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import PHASES, PhaseTime
from flatout.schema.scale import Link, ScaleRecord, Timing
from flatout.trial.blocks import Watcher
from flatout.trial.parent import Trial, measure

STEPS = 40


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


def take_profile(record: ScaleRecord, profile: ProfileRecord, path: str) -> None:
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


def half_the_batch(
    command: Command,
    folder: JobFolder,
    facts: Facts,
    profile: ProfileRecord,
    record: ScaleRecord,
    budget_s: float,
    watcher: Watcher,
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
    watcher.stage("measuring", f"half the batch, {size // 2}")
    choice = Choice("batch_size", {"size": size // 2, "loader": loader})
    with Trial(command, folder.new_trial(), Plan((choice,)), facts) as trial:
        half = measure(trial, STEPS, seconds() + 600 + budget_s)
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


def predict_points(record: ScaleRecord, ways: list[str], devices: list[int], overhead: float | None) -> None:
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
