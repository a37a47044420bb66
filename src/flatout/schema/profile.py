"""Records of `flatout profile`, the input of rules and pages.

Times of parts are means over the measured steps, in milliseconds. Their whole is ``mean_step_ms``, the mean
over the same steps, so shares of it add up to at most 1. ``step_ms`` is the typical step: it leaves out steps
of many times the median, such as the first of an epoch. Sizes are in bytes. A value that is not available on
this machine is None, never 0: a rule must be able to tell "none" from "not checked".
"""

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.records import PhaseTime, ProgramRecord, Ratio, Record
from flatout.schema.run_request import CompileRecord

PROFILE_SCHEMA = 1
MEMORY_KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "inputs",
    "buffers",
    "other",
    "fragmentation",
)


@dataclass
class WhatIf(Record):
    """A measured upper bound: the speed of the step without one component.

    The component is switched on and off alternately in the running program. ``ratio`` is plain over without.
    ``name`` is one of: loader, copies, optimizer, syncs, logging, gc, one thread fewer, one thread more. If
    it was not measured, ``ratio`` is None and ``why_not`` says why."""

    name: str
    ratio: Ratio | None = None
    step_ms: float | None = None
    why_not: str = ""


@dataclass
class Operation(Record):
    """One operator, summed over a step.

    ``roofline`` is the share of what this device can reach at this intensity (FLOPs per byte)."""

    name: str
    calls: float
    host_ms: float  # self time on the host
    device_ms: float | None = None  # self time on the device, None without one
    share: float = 0.0  # of the operators' total self time, on the device where there is one
    flops: float | None = None
    moved_bytes: float | None = None
    dtypes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)  # the most frequent ones
    roofline: float | None = None
    limit: str = ""  # compute | memory | launch | unknown
    tensor_cores: bool | None = None
    place: SourceLocation | None = None

    @property
    def self_ms(self) -> float:
        return self.device_ms if self.device_ms is not None else self.host_ms


@dataclass
class SyncRecord(Record):
    """A place of synchronisation between tensors and Python, or a copy to the device.

    Synchronisations are item, nonzero, copies to the host and printing."""

    kind: str  # item | nonzero | to host | numpy | print | compare | synchronize | to device
    place: SourceLocation | None
    calls: float  # a step
    ms: float  # a step, including the wait
    moved_bytes: float = 0.0  # a step
    pinned: bool | None = None  # of copies to the device
    non_blocking: bool | None = None


@dataclass
class IdleGap(Record):
    """Idle time of the device, and what the host did meanwhile: ``host_activity`` is an operator's name or "python"."""

    host_activity: str
    ms: float  # a step
    calls: float  # a step
    place: SourceLocation | None = None


@dataclass
class LoaderRecord(Record):
    """One place in the script that creates DataLoaders."""

    place: SourceLocation | None
    created: int = 1  # loaders
    iterators: int = 0
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    batch_size: int | None = None
    dataset: str = ""
    wait_ms: float = 0.0  # a step
    start_ms: float = 0.0  # of one iterator, until its first batch
    fetch_ms: float | None = None  # of one batch, in the dataset
    slow_place: SourceLocation | None = None  # the slowest line of the user's dataset
    slow_share: float | None = None  # share of the fetching spent in that line
    batches: int = 0  # returned over the whole run
    worker_bytes: int | None = None  # private memory of its worker processes


@dataclass
class MemorySample(Record):
    """Bytes by kind (of MEMORY_KINDS) at a moment of a step."""

    ms: float
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass
class MemoryProfile(Record):
    """Memory of a step.

    ``where`` is "device" or "host". ``by_module`` are the activations at their maximum, by module name."""

    where: str
    peak_bytes: int
    at_peak: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict)
    peak_place: SourceLocation | None = None
    timeline: list[MemorySample] = field(default_factory=list)
    reserved_bytes: int | None = None
    retries: int | None = None  # of the allocator, over the whole run
    empty_cache_calls: float = 0.0  # a step
    empty_cache_ms: float = 0.0
    empty_cache_place: SourceLocation | None = None


@dataclass
class MemoryGrowth(Record):
    """Memory at the same point of each step. ``p_value``: of such a trend without a leak."""

    bytes_a_step: float
    p_value: float
    leaking: bool
    holder: str = ""  # what holds the tensors: "list `losses`"
    place: SourceLocation | None = None  # the line that added them
    graph: bool = False  # whether they keep an autograd graph alive
    where: str = "host"  # device | host
    steps: int = 0  # between the first and the last of ``series``
    tensors_a_step: float | None = None  # growth of the number of live tensors
    series: list[float] = field(default_factory=list)


@dataclass
class ProfileRecord(ProgramRecord):
    """Result of `flatout profile`.

    ``bound`` names what limits the step: data, python, launch, copy, memory, compute, optimizer."""

    schema: int = PROFILE_SCHEMA
    machine: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    unit: str = "step"
    steps: int = 0
    warmup_steps: int = 0
    warmup_ms: float = 0.0
    first_step_ms: float | None = None
    step_ms: float | None = None
    step_ms_list: list[float] = field(default_factory=list)
    samples_per_s: float | None = None
    phases: dict[str, PhaseTime] = field(default_factory=dict)
    bound: str = ""
    bound_why: str = ""
    overhead: Ratio | None = None  # a profiled step over a normal one
    what_ifs: list[WhatIf] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    operators_a_step: float | None = None
    flops_a_step: float | None = None
    mfu: float | None = None
    synchronisations: list[SyncRecord] = field(default_factory=list)
    loaders: list[LoaderRecord] = field(default_factory=list)
    memory: MemoryProfile | None = None
    tensor_growth: MemoryGrowth | None = None
    host_growth: MemoryGrowth | None = None
    compile_record: CompileRecord | None = None
    idle_ms: float | None = None  # of the device, a step
    # Time a step in which the device works, by kind: computing, copies, communication. Kinds may overlap.
    device_ms: dict[str, float] = field(default_factory=dict)
    gc_ms: float = 0.0
    gc_longest_ms: float = 0.0
    gc_calls: float = 0.0  # a step
    python_ms: float | None = None  # host time of a normal step outside operators and waits for data
    operator_us: float | None = None  # host time of a mean operator call, including nested calls
    idle_gaps: list[IdleGap] = field(default_factory=list)  # the longest ones
    schedule: list[int] = field(default_factory=list)  # steps of wait, warm-up and profiling
    trace: str = ""  # file of the Chrome trace, if kept
    notes: list[str] = field(default_factory=list)  # sentences: what was not checked, and the command for it
    # Keys: anomaly, cudnn_benchmark, matmul_precision, threads, cores, gc, autocast, scalers, optimizers [{kind, groups, tensors, lr, fused, foreach,
    # ...}], modules {class name: count}, training {mode: modules}, dtypes {dtype: bytes}
    settings: dict[str, Any] = field(default_factory=dict)
    # Counted calls: name -> {"calls": a step, "ms": a step, "most": calls of the busiest line over the whole
    # run, "places": [a Place as JSON, most frequent first]}.
    # Names: forward, backward (the lines of training), loss_not_finite, between (the program's own lines
    # between the phases), empty_cache, gc_collect, save, anomaly, set_threads, data_parallel, zero_grad,
    # zero_grad_to_zero, clip, make_optimizer, make_scheduler, eval_with_grad (a forward pass of a model in
    # eval mode with gradients on)
    events: dict[str, Any] = field(default_factory=dict)
    # Measured peaks: matmul_bfloat16_flops (a second), memory_bytes_per_s, ... (schema/machine_snapshot.py)
    ceilings: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def mean_step_ms(self) -> float | None:
        """The whole of which the times of parts are shares. None if no step was measured."""
        times = self.step_ms_list
        return sum(times) / len(times) if times else self.step_ms

    def step_with_ms(self, part_ms: float) -> float | None:
        """The mean step that contains a part of ``part_ms`` milliseconds. None if no step was measured.

        A rare part may lie outside the measured steps: it is then added to the typical step."""
        mean = self.mean_step_ms
        return mean if mean is None or part_ms <= mean else (self.step_ms or mean) + part_ms
