"""Predict the step time on many devices from the timing of one: DDP, FSDP, hybrid, local SGD.

Pure; standard library only.

    ddp      gradients in buckets (the first of 1 MiB, then of 25), each summed over all devices as soon as
             backward has produced it, overlapped with the rest of backward
    fsdp     parameters gathered block by block before forward and again before backward, one block ahead;
             gradients scattered as they are produced
    hybrid   fsdp inside a node, and the shard's gradients summed across the nodes
    local    every device trains alone, and the parameters are averaged every H steps, without overlap. It
             changes what is learned

Backward is assumed to produce gradients at a constant rate in bytes. With weak scaling each device has the
measured batch. With strong scaling all devices share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flatout.measure.links import CollectiveCost, Fabric, all_gather, all_reduce, reduce_scatter
from flatout.schema.scale import ScalePoint, Timing

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB  # torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes
BUCKET_BYTES = 25 * MIB  # bucket_cap_mb of DistributedDataParallel
FSDP_BLOCKS = (
    32  # gathered by FSDP one after another: as many as in Llama 3 8B, or the number of gradients if lower
)
FIXED_SHARE = 0.1  # default share of a step's computation that does not shrink with the batch
GOOD_EFFICIENCY = 0.95


@dataclass(frozen=True)
class Workload:
    """The workload. ``tensors`` are the bytes of the gradients in the order in which they become ready.

    ``overhead`` is the relative slowdown of computation on more than one device. ``overlap`` is whether
    buckets are sent before backward has ended.
    """

    timing: Timing
    tensors: tuple[float, ...]
    parameter_bytes: float
    fixed_share: float = FIXED_SHARE
    overhead: float = 0.0
    local_steps: int = 1
    overlap: bool = True


def equal_tensors(total_bytes: float) -> tuple[float, ...]:
    """Return gradients in small equal pieces, if only their sum is known."""
    count = max(1, round(4 * total_bytes / BUCKET_BYTES), min(100, int(total_bytes)))
    return (total_bytes / count,) * count if total_bytes > 0 else ()


def buckets(tensors: Iterable[float]) -> list[float]:
    """Fill tensors into buckets like DistributedDataParallel, once it knows their order.

    A bucket is full at its limit.
    """
    full, partial = list[float](), 0.0
    for size in tensors:
        partial += size
        if partial >= (BUCKET_BYTES if full else FIRST_BUCKET_BYTES):
            full, partial = [*full, partial], 0.0
    return [*full, partial] if partial else full


def at_batch(work: Workload, samples_share: float) -> Timing:
    """The timing at this share of the measured batch.

    The time of the optimizer does not depend on it, nor ``fixed_share`` of the other times.
    """
    measured, factor = work.timing, work.fixed_share + (1 - work.fixed_share) * samples_share
    if samples_share == 1.0:
        return measured
    times = {name: getattr(measured, name) * factor for name in ("forward_ms", "backward_ms", "other_ms")}
    samples = measured.samples * samples_share if measured.samples else None
    return replace(measured, samples=samples, **times)


def on_faster_device(timing: Timing, factor: float) -> Timing:
    """The timing on a device that is ``factor`` times as fast. ``other_ms`` does not change."""
    return replace(
        timing,
        forward_ms=timing.forward_ms / factor,
        backward_ms=timing.backward_ms / factor,
        optimizer_ms=timing.optimizer_ms / factor,
    )


@dataclass(frozen=True)
class PredictedStep:
    """Cost of a step. ``total_ms`` excludes the overhead of several devices."""

    compute_ms: float
    total_ms: float
    cost: CollectiveCost


def ddp(work: Workload, timing: Timing, fabric: Fabric, devices: int) -> PredictedStep:
    """Predict a DDP step.

    With several backward passes per step only the last one communicates, as under ``no_sync``.
    """
    bucket_sizes = buckets(work.tensors)
    last_ms = timing.backward_ms / timing.passes
    until_last_backward = Task(timing.other_ms + timing.forward_ms + timing.backward_ms - last_ms)
    total_bytes = sum(bucket_sizes) or 1.0
    compute = [
        until_last_backward,
        *(Task(last_ms * size / total_bytes) for size in bucket_sizes),
        Task(timing.optimizer_ms, after=len(bucket_sizes)),
    ]
    costs = [all_reduce(fabric, devices, size) for size in bucket_sizes]
    first_after = 2 if work.overlap else 1 + len(bucket_sizes)
    wire = [
        _wire_task(cost, after=first_after + i if work.overlap else first_after)
        for i, cost in enumerate(costs)
    ]
    return PredictedStep(timing.step_ms, finish_ms(compute, wire), _sum(costs))


def fsdp(work: Workload, timing: Timing, fabric: Fabric, devices: int) -> PredictedStep:
    return _sharded(work, timing, fabric, devices, lambda part: reduce_scatter(fabric, devices, part))


def hybrid(work: Workload, timing: Timing, fabric: Fabric, devices: int) -> PredictedStep:
    """Predict a hybrid step.

    If all devices are in one node, this is fsdp. If each device is a node, there is no gathering, and
    gradients are sent block by block.
    """
    per_node, nodes = fabric.shape(devices)
    near, far = fabric.in_node(), fabric.across(per_node)

    def reduce_cost(part: float) -> CollectiveCost:
        return reduce_scatter(near, per_node, part).plus(all_reduce(far, nodes, part / per_node))

    return _sharded(work, timing, near, per_node, reduce_cost)


def local(work: Workload, timing: Timing, fabric: Fabric, devices: int) -> PredictedStep:
    """Predict the mean step over H steps: parameters are summed once, after the optimizer."""
    cost = all_reduce(fabric, devices, work.parameter_bytes).times(1 / work.local_steps)
    return PredictedStep(timing.step_ms, timing.step_ms + cost.ms, cost)


def _sharded(
    work: Workload,
    timing: Timing,
    gather: Fabric,
    devices: int,
    reduce_cost: Callable[[float], CollectiveCost],
) -> PredictedStep:
    """Predict a sharded step.

    Every pass gathers and scatters again, and each optimizer has a part of the parameters.
    """
    count = max(1, min(FSDP_BLOCKS, len(work.tensors)))
    gathered = all_gather(gather, devices, work.parameter_bytes / count)
    reduced = reduce_cost(sum(work.tensors) / count)
    forward, backward = timing.forward_ms / timing.passes / count, timing.backward_ms / timing.passes / count
    other = timing.other_ms / timing.passes
    # Compute: other work, forward blocks, backward blocks. Wire: a gather per forward block; then a gather per
    # backward block, each except the first followed by the scatter of the previous block. A block is gathered
    # while the previous one computes, not earlier: two blocks are in memory at once.
    compute = [Task(other), *(Task(forward, after=block + 1) for block in range(count))]
    wire = [_wire_task(gathered, after=max(1, block)) for block in range(count)]
    for block in range(count):
        wire.append(_wire_task(gathered, after=count + block))
        compute.append(Task(backward, after=len(wire)))
        if block:
            wire.append(_wire_task(reduced, after=1 + count + block))
    wire.append(_wire_task(reduced, after=1 + 2 * count))
    total = timing.passes * finish_ms(compute, wire)
    optimizer_ms = timing.optimizer_ms / devices
    cost = _sum([gathered] * 2 * count + [reduced] * count).times(timing.passes)
    return PredictedStep(timing.step_ms - timing.optimizer_ms + optimizer_ms, total + optimizer_ms, cost)


def _wire_task(cost: CollectiveCost, after: int) -> Task:
    return Task(cost.ms, after, cost.contention)


def _sum(costs: Sequence[CollectiveCost]) -> CollectiveCost:
    total = CollectiveCost()
    for cost in costs:
        total = total.plus(cost)
    return replace(total, link=max(costs, key=lambda cost: cost.ms).link) if costs else total


STEPS: dict[str, Callable[[Workload, Timing, Fabric, int], PredictedStep]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "hybrid": hybrid,
    "local": local,
}


def predict(work: Workload, fabric: Fabric, strategy: str, devices: int, scaling: str = "weak") -> ScalePoint:
    """Predict one point. For a single device it is the measured step, with any strategy."""
    single_ms = work.timing.step_ms
    share = 1.0 / devices if scaling == "strong" else 1.0
    timing = at_batch(work, share)
    point = ScalePoint(strategy, devices, timing.samples)
    if timing.samples is not None and timing.samples < 1:
        point.why_not = f"{work.timing.samples:,.0f} samples a step are not enough for {devices:,} devices"
        return point
    per_node, nodes = fabric.shape(devices)
    if strategy == "hybrid" and per_node * nodes != devices:
        point.why_not = f"{devices:,} devices do not fill nodes of {per_node}, so the shards of one node have no counterpart in the others"
        return point
    step = (
        STEPS[strategy](work, timing, fabric, devices)
        if devices > 1
        else PredictedStep(single_ms, single_ms, CollectiveCost())
    )
    overhead_ms = work.overhead * step.compute_ms if devices > 1 else 0.0
    point.step_ms, point.compute_ms, point.overhead_ms = (
        step.total_ms + overhead_ms,
        step.compute_ms,
        overhead_ms,
    )
    point.communication_ms, point.wire_bytes = step.cost.ms, step.cost.wire_bytes
    point.collective = step.cost.algorithm
    point.exposed_ms = max(0.0, step.total_ms - step.compute_ms)
    point.efficiency = single_ms * share / point.step_ms if point.step_ms > 0 else None
    point.bound = _bound(work, point, step, single_ms * share)
    return point


def _bound(work: Workload, point: ScalePoint, step: PredictedStep, ideal_ms: float) -> str:
    if point.devices == 1:
        return "computing: a single device does not communicate"
    exposed, overhead, computing = (
        point.exposed_ms or 0.0,
        point.overhead_ms or 0.0,
        step.compute_ms - ideal_ms,
    )
    hidden = (
        f"{_share(step.cost.ms - exposed, step.cost.ms)} of the communication overlaps with computing"
        if step.cost.ms > 0
        else "nothing is communicated"
    )
    losses = {"exposed": exposed, "overhead": overhead, "batch": computing}
    worst = max(losses, key=lambda name: losses[name])
    if (point.efficiency or 0.0) >= GOOD_EFFICIENCY or losses[worst] <= 0:
        return f"computing: {hidden}"
    if worst == "batch":
        size = (
            f"{point.samples:,.3g} samples"
            if point.samples is not None
            else f"a {point.devices:,}th of the batch"
        )
        return f"a small batch: the fixed cost of a step is {_share(computing, point.step_ms)} of it, at {size} a device"
    if worst == "overhead":
        return f"overhead: other devices slow computing by {work.overhead:.1%}; {hidden}"
    waits = f"{_share(exposed, point.step_ms)} of the step waits for communication"
    if step.cost.latency_ms > step.cost.ms / 2:
        return f"latency: {waits}, mostly for hops rather than bytes ({step.cost.algorithm})"
    sent = (point.wire_bytes or 0.0) / 1e6
    return f"bandwidth of {step.cost.link}: {waits}, {sent:,.{0 if sent >= 10 else 2}f} MB from each device"


def _share(part: float, whole: float | None) -> str:
    return f"{part / whole:.0%}" if whole else "nothing"


# -- overlap of computation and communication
# The computation of a device, and the communication of its links, are two queues that wait for each other.
# Each runs its tasks one after another. A task starts once the given number of tasks of the other queue have
# ended. While the links communicate, computation runs at ``1 - contention`` of its speed. A contention of 1
# means that the device itself moves the bytes, 0 that other hardware does.


@dataclass(frozen=True)
class Task:
    ms: float
    after: int = 0  # number of tasks of the other queue that must have ended
    contention: float = 0.0  # only for tasks of the links


class Queue:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.ended = 0
        self.left_ms = self.tasks[0].ms if self.tasks else 0.0

    @property
    def done(self) -> bool:
        return self.ended == len(self.tasks)

    def ready(self, other: Queue) -> bool:
        return not self.done and other.ended >= self.tasks[self.ended].after

    def advance(self, ms: float) -> None:
        """Advance the current task by ``ms``, at most what is left of it. Then the next task starts."""
        self.left_ms -= ms
        if self.left_ms <= 0:
            self.ended += 1
            self.left_ms = 0.0 if self.done else self.tasks[self.ended].ms


def finish_ms(compute: Sequence[Task], wire: Sequence[Task]) -> float:
    """The time at which both queues have ended. Raises ValueError if they deadlock."""
    device, link = Queue(compute), Queue(wire)
    now_ms = 0.0
    while not (device.done and link.done):
        computing, communicating = device.ready(link), link.ready(device)
        if not computing and not communicating:
            raise ValueError("the two queues wait for each other")
        speed = 1.0 - link.tasks[link.ended].contention if communicating else 1.0
        if not communicating or (computing and device.left_ms <= link.left_ms * speed):
            elapsed_ms = device.left_ms / speed if device.left_ms else 0.0
            if communicating:
                link.left_ms = max(link.left_ms - elapsed_ms, 0.0)
            device.advance(device.left_ms)
        else:
            elapsed_ms = link.left_ms
            if computing:
                device.left_ms -= elapsed_ms * speed
            link.advance(link.left_ms)
        now_ms += elapsed_ms
    return now_ms
