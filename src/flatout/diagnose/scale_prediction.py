"""Predicts the step of a program on many devices, from its phases on one."""

from flatout.measure.links import Fabric
from flatout.measure.scaling import Workload, equal_tensors, on_faster_device, predict
from flatout.schema.errors import NothingMeasured
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import PHASES
from flatout.schema.scale import ScaleRecord, Timing


def timing_of(profile: ProfileRecord) -> Timing:
    """The phases' times from their shares, so that they add up to the step.

    Raises NothingMeasured if a step does not consist of phases."""
    if profile.unit != "step":
        raise NothingMeasured(
            "a step of this program is a closure that lasts seconds (LBFGS): its backward passes cannot be separated from its steps."
        )
    phases, step_ms, samples = profile.phases, profile.step_ms or 0.0, None
    if profile.samples_per_s:
        samples = round(profile.samples_per_s * step_ms / 1000, 6)
    ms = {name: phases[name].share * step_ms if name in phases else 0.0 for name in PHASES}
    return Timing(
        ms["forward"],
        ms["backward"],
        ms["optimizer"],
        ms["data"] + ms["copy"] + ms["other"],
        samples,
        max(1, int(profile.context.get("backwards_per_step") or 1)),
    )


def add_profile(record: ScaleRecord, profile: ProfileRecord, path: str) -> None:
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
    source = f"from {path}" if path else "measured now"
    record.timing_source = f"{profile.steps} steps on {profile.device}, {source}"
    if record.timing.passes > 1:
        record.notes.append(
            f"a step has {record.timing.passes} backward passes: the model assumes that DDP sends after the last one only (no_sync)"
        )


def predict_points(record: ScaleRecord, strategies: list[str], devices: list[int]) -> None:
    assert record.timing is not None
    assert record.network is not None
    factor = record.compute_scale
    workload = Workload(
        on_faster_device(record.timing, factor),
        tuple(record.tensor_bytes) or equal_tensors(record.parameter_bytes),
        record.parameter_bytes,
        record.fixed_share,
        record.overhead,
        record.local_steps,
    )
    if "hybrid" in strategies and record.intra_node_link is None:
        record.notes.append(
            "hybrid is left out: it shards inside nodes, and without --inside each node has one device"
        )
        strategies = [name for name in strategies if name != "hybrid"]
    record.notes += _assumptions(record, strategies)
    fabric = Fabric(record.network, record.intra_node_link, record.devices_per_node)
    record.points = [
        predict(workload, fabric, name, count, record.scaling) for name in strategies for count in devices
    ]


def _assumptions(record: ScaleRecord, strategies: list[str]) -> list[str]:
    """Notes on the assumptions: values that were given or assumed, not measured."""
    notes = []
    if record.compute_scale != 1.0:
        notes.append(
            f"--compute-scale {record.compute_scale:g}: forward, backward and optimizer are assumed to be {record.compute_scale:g} times faster than "
            f"measured on {record.device}; this is not measured. The host's share keeps its time"
        )
    if record.overhead:
        notes.append(
            f"further devices cost {record.overhead:.1%} of compute beyond transfers: hooks, copies into buckets, the slowest device (ResNet-50 on 2 V100, PyTorch's own benchmark)"
        )
    if record.scaling == "strong":
        notes.append(
            f"{record.fixed_share:.0%} of a step's compute is assumed to be independent of the batch"
        )
    if record.intra_node_link is None and record.network is not None and not record.network.is_intra_node:
        notes.append(
            "each device is assumed to be its own node; --inside nvlink4 --node 8 describes nodes of several devices"
        )
    if "local" in strategies:
        notes.append(
            f"local SGD averages parameters every {record.local_steps} steps: its results differ from those of the other strategies"
        )
    if record.network is None or "=" not in record.network.name:  # not a link given by its figures
        notes.append("link rates are those stated by their vendors and NCCL, without other traffic")
    return notes
