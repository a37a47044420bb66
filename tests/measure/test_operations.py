"""From recorded events to operators, lines, kernels and gaps: events are stand-ins with the methods of
torch's.
"""

from types import SimpleNamespace

import pytest

from flatout.measure.memory import MemoryMoment, allocations, running_totals, step_memory, with_other
from flatout.measure.operations import ProfilerRecording
from flatout.measure.roofline import fill_roofline, flops_a_step, utilisation
from flatout.schema.findings import SourceLocation


def event(name, start, end, **more):
    """One raw event of kineto, with its methods; times in microseconds."""
    values = {
        **dict.fromkeys(("shapes", "dtypes", "concrete_inputs"), ()),
        **dict.fromkeys(("scope", "correlation_id", "linked_correlation_id", "nbytes", "device_index"), 0),
        "sequence_nr": -1,
        "start_thread_id": 1,
        "activity_type": "cpu_op",
        "device_type": "DeviceType.CPU",
        "name": name,
        "start_ns": start * 1000,
        "end_ns": end * 1000,
        **more,
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def op(name, start, end, *shapes, dtype="float", **more):
    """An operator of tensors of these shapes."""
    return event(
        f"aten::{name}", start, end, shapes=list(map(list, shapes)), dtypes=[dtype] * len(shapes), **more
    )


def recording(*events, steps=1, lines=None, by_line=False):
    def locate(file, line, function):
        return SourceLocation(file, line, function=function)

    return ProfilerRecording(events, steps, lines or {}, locate, by_line)


FORWARD = ("/home/me/model.py", 12, "forward")
LOOP = ("/home/me/train.py", 33, "")


def test_self_time_calls_and_the_users_line():
    observed = recording(
        op("linear", 0, 100, [8, 16], [4, 16]),
        op("t", 5, 10),
        op("addmm", 20, 90, [4], [8, 16], [16, 4], sequence_nr=7),
        event("autograd::engine::evaluate_function: AddmmBackward0", 200, 300, sequence_nr=7, scope=1),
        event("AddmmBackward0", 205, 290, sequence_nr=7, scope=1),
        op("mm", 210, 280, [16, 8], [8, 4]),
        lines={
            ("aten::addmm", ((4,), (8, 16), (16, 4))): [FORWARD],
            ("aten::mm", ((16, 8), (8, 4))): [FORWARD],
        },
    ).summarise()
    found = {o.name: o for o in observed.operations}
    assert found["aten::linear"].host_ms == pytest.approx(0.025)  # 100 less 5 less 70
    assert found["aten::addmm"].host_ms == pytest.approx(0.07)
    assert found["aten::addmm"].flops == 2 * 8 * 16 * 4
    assert found["aten::linear"].flops is None
    assert found["aten::linear"].moved_bytes is None  # the operator below it does the work
    assert found["aten::addmm"].place == SourceLocation("/home/me/model.py", 12, function="forward")
    assert found["aten::linear"].place == found["aten::addmm"].place  # it consists of it
    assert found["aten::mm"].place == SourceLocation("/home/me/model.py", 12, function="forward")
    assert observed.operators == 2  # linear, and mm below a node
    assert observed.operators_ns == 200_000
    assert observed.python_share == pytest.approx(1 / 3)  # from 100 to 200
    assert sum(o.share for o in observed.operations) == pytest.approx(1.0)


def test_dtypes_are_kept_apart_and_steps_divide():
    observed = recording(
        op("mul", 0, 10, [4], [4]),
        op("mul", 20, 60, [4], [4], dtype="double"),
        steps=2,
    ).summarise()
    assert [(o.dtypes, o.calls, o.moved_bytes) for o in observed.operations] == [
        (["float64"], 0.5, 48.0),
        (["float32"], 0.5, 24.0),
    ]


def test_by_line_an_operator_counts_apart_at_each_line_and_shape_and_waiting_is_known():
    wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = [
        op("mm", 10, 20, [8, 8], [8, 8]),
        op("mm", 20, 50, [8, 8], [8, 8]),
        op("mm", 60, 70, [4, 8], [8, 8]),
        event(wait, 65, 90, activity_type="user_annotation"),
        event("ProfilerStep#1", 0, 100, activity_type="user_annotation"),
    ]
    lines = {("aten::mm", ((8, 8), (8, 8))): [FORWARD, LOOP], ("aten::mm", ((4, 8), (8, 8))): [FORWARD]}
    observed = recording(*events, lines=lines, by_line=True).summarise()
    assert [(o.shapes, o.place.line, o.host_ms, o.share) for o in observed.operations] == [
        (["(8, 8) x (8, 8)"], 33, 0.03, 0.6),
        (["(8, 8) x (8, 8)"], 12, 0.01, 0.2),
        (["(4, 8) x (8, 8)"], 12, 0.01, 0.2),
    ]
    assert observed.waiting_share == pytest.approx(0.2)  # from 70 to 90 of 100
    assert observed.python_share == pytest.approx(0.3)
    assert len(recording(*events, lines=lines).summarise().operations) == 1


def test_kernels_gaps_and_tensor_cores():
    kernel = {"activity_type": "kernel", "device_type": "DeviceType.CUDA"}
    observed = recording(
        op("mm", 0, 10, [8, 8], [8, 8], dtype="c10::Half", correlation_id=1),
        op("mm", 10, 20, [8, 8], [8, 8], correlation_id=2),
        op("_local_scalar_dense", 60, 90),
        event(
            "sm80_xmma_gemm_f16f16_f16f32_tn_n_tensorop",
            5,
            50,
            linked_correlation_id=1,
            **kernel,
        ),
        event("void gemmSN_NN_kernel<float>", 100, 120, linked_correlation_id=2, **kernel),
        event("void other()", 300, 310, **kernel),
        lines={("aten::_local_scalar_dense", ()): [LOOP]},
    ).summarise()
    half, single = (o for o in observed.operations if o.name == "aten::mm")
    assert (half.dtypes, half.tensor_cores, half.device_ms) == (["float16"], True, 0.045)
    assert (single.dtypes, single.tensor_cores, single.device_ms) == (["float32"], False, 0.02)
    assert observed.busy_ns == 75_000
    gaps = {gap.host_activity: gap for gap in observed.gaps}
    assert gaps["aten::_local_scalar_dense"].ms == pytest.approx(0.05)
    assert gaps["aten::_local_scalar_dense"].place == SourceLocation("/home/me/train.py", 33)
    assert gaps["python"].ms == pytest.approx(0.18)


def test_kinds_of_work_on_the_device_may_overlap():
    device = {"device_type": "DeviceType.CUDA"}
    observed = recording(
        event("void gemm()", 0, 100, activity_type="kernel", **device),
        event("void gemm()", 50, 120, activity_type="kernel", **device),  # on another stream
        event("Memcpy HtoD (Pinned -> Device)", 90, 150, activity_type="gpu_memcpy", **device),
        event("Memset (Device)", 200, 210, activity_type="gpu_memset", **device),
        event(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)",
            110,
            190,
            activity_type="kernel",
            **device,
        ),
    ).summarise()
    assert observed.device_ns == {"computing": 120_000, "copies": 70_000, "communication": 80_000}
    assert observed.busy_ns == 200_000  # 70 of 270 us overlap


def test_the_roofline():
    ceilings = {"matmul_float32_flops": 1e12, "memory_bytes_per_s": 1e11}
    observed = recording(
        op("mm", 0, 4000, [1000, 1000], [1000, 1000]),
        op("add", 5000, 5240, [1000, 1000], [1000, 1000]),
        op("neg", 6000, 6008, [4]),
    ).summarise()
    fill_roofline(observed.operations, ceilings)
    found = {o.name: o for o in observed.operations}
    assert (found["aten::mm"].limit, found["aten::mm"].roofline) == ("compute", 0.5)
    assert (found["aten::add"].limit, found["aten::add"].roofline) == ("memory", pytest.approx(0.5))
    assert found["aten::neg"].limit == "launch"
    assert flops_a_step(observed.operations) == 2e9
    assert utilisation(observed.operations, 8.0, ceilings) == 0.25
    fill_roofline(observed.operations, {})
    assert {(o.limit, o.roofline) for o in observed.operations} == {("unknown", None)}


def test_memory_of_one_step():
    events = [
        event("[memory]", at, at, nbytes=size)
        for at, size in ((10, 100), (20, 400), (30, -400), (40, 50), (60, 1000))
    ]
    of_devices = [
        event("[memory]", 15, 15, nbytes=9999 + at, device_type="DeviceType.CUDA", device_index=at)
        for at in range(2)
    ]
    changes = allocations([*events, *of_devices, op("mm", 0, 1)], None)
    assert allocations([*events, *of_devices], 1) == [(15_000, 10_000)]
    totals = running_totals(changes, 1000)
    assert [total for _, total in totals] == [1100, 1500, 1100, 1150, 2150]
    moments = [
        MemoryMoment(5_000, {"parameters": 600}),
        MemoryMoment(18_000, {"parameters": 600, "activations": 300}, {"0.conv": 300}),
        MemoryMoment(45_000, {"parameters": 600}),
    ]
    found = step_memory("host", totals, 1000, moments, 5_000, 50_000)
    assert found.peak_bytes == 1500
    assert found.at_peak == {"parameters": 600, "activations": 300, "other": 600}
    assert found.by_module == {"0.conv": 300}
    assert [(point.ms, sum(point.kinds.values())) for point in found.timeline] == [
        (0.0, 1000),
        (0.013, 1100),
        (0.015, 1500),
        (0.04, 1150),
    ]
    assert with_other({"parameters": 10, "fragmentation": 99}, 8)["other"] == 0


def test_calls_of_one_kind_have_the_lines_of_their_position():
    first, second = ("/home/me/model.py", 3, "f"), ("/home/me/model.py", 4, "f")
    calls = [op("add", 10 * at, 10 * at + (2 if at % 2 else 6), [4], [4]) for at in range(6)]
    observed = recording(*calls, steps=3, lines={("aten::add", ((4,), (4,))): [first, second]}).summarise()
    assert observed.operations[0].place.line == 3  # the more expensive one


def test_flops_are_counted_once():
    """A convolution computed by a matrix product."""
    observed = recording(
        op(
            "_slow_conv2d_forward",
            0,
            50,
            [1, 2, 4, 4],
            [3, 2, 1, 1],
            concrete_inputs=["", "", "", "", [1, 1], [0, 0]],
        ),
        op("mm", 10, 40, [3, 2], [2, 16]),
    ).summarise()
    assert {o.name: o.flops for o in observed.operations} == {
        "aten::_slow_conv2d_forward": None,
        "aten::mm": 2.0 * 3 * 2 * 16,
    }


def test_waiting_for_data_is_not_python():
    wait = event(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 50, activity_type="user_annotation"
    )
    observed = recording(
        wait,
        op("stack", 20, 40),
        op("mm", 60, 100),
        event("ProfilerStep#3", 0, 110, activity_type="user_annotation"),
    ).summarise()
    assert observed.python_share == pytest.approx(10 / 90)
