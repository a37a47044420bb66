"""The model behind `flatout scale`: rules that hold for every program and link, closed forms, and published
runs.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.measure.links import Fabric, all_gather, all_reduce, hierarchical, reduce_scatter
from flatout.measure.scaling import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Task,
    Workload,
    buckets,
    equal_tensors,
    finish_ms,
    predict,
)
from flatout.render.page import html
from flatout.render.scale_page import headline, plot, rows, scale_page
from flatout.schema.errors import UsageError
from flatout.schema.scale import NETWORKS, STRATEGIES, Link, ScaleRecord, Timing, read_devices, read_link

MIB = 1 << 20
MS = st.floats(0.01, 1e4)
TIMINGS = st.builds(Timing, MS, MS, MS, st.floats(0, 1e3), st.floats(1, 1e4), st.integers(1, 4))
TENSORS = st.lists(st.floats(1, 3e8), min_size=1, max_size=40).map(tuple)
WORKS = st.builds(
    lambda timing, tensors, steps, overlap: Workload(
        timing, tensors, sum(tensors), local_steps=steps, overlap=overlap
    ),
    TIMINGS,
    TENSORS,
    st.integers(1, 64),
    st.booleans(),
)
LINKS = st.builds(
    Link,
    st.just("a link"),
    st.floats(1e7, 1e12),
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(0, 8),
    st.floats(0, 1),
)
FABRICS = st.one_of(
    st.builds(Fabric, LINKS),
    st.builds(Fabric, LINKS, LINKS, st.sampled_from([1, 2, 3, 4, 8])),
    st.builds(lambda link: Fabric(replace(link, is_intra_node=True)), LINKS),
)
DEVICES = st.one_of(st.integers(2, 600), st.sampled_from([2, 6, 8, 24, 48, 512]))
ALL = st.sampled_from(STRATEGIES)


def near(a, b):
    return a == pytest.approx(b, rel=1e-9, abs=1e-9)


@given(WORKS, FABRICS, ALL, DEVICES, st.floats(1, 1000))
def test_more_bandwidth_is_never_slower(work, fabric, way, devices, factor):
    def wider(link):
        return (
            replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
            if link is not None
            else None
        )

    wide = replace(fabric, inter_node=wider(fabric.inter_node), intra_node=wider(fabric.intra_node))
    before, after = predict(work, fabric, way, devices), predict(work, wide, way, devices)
    assume(not before.why_not)
    assert after.step_ms <= before.step_ms * (1 + 1e-9)


@given(WORKS, FABRICS, ALL, st.sampled_from(["weak", "strong"]), st.floats(0, 1))
def test_one_device_makes_the_measured_step(work, fabric, way, scaling, overhead):
    point = predict(replace(work, overhead=overhead), fabric, way, 1, scaling)
    assert (point.step_ms, point.efficiency, point.wire_bytes) == (work.timing.step_ms, 1.0, 0.0)


@given(FABRICS, DEVICES, st.floats(1, 1e10))
def test_bytes_on_the_wire_are_the_closed_form(fabric, devices, size):
    assert near(all_reduce(fabric, devices, size).wire_bytes, 2 * (devices - 1) / devices * size)
    for half in (reduce_scatter, all_gather):
        assert near(half(fabric, devices, size).wire_bytes, (devices - 1) / devices * size)
    per_node, nodes = fabric.shape(devices)
    if per_node * nodes == devices:
        assert near(hierarchical(fabric, devices, size).wire_bytes, 2 * (devices - 1) / devices * size)


@given(WORKS, FABRICS, DEVICES)
def test_bytes_of_each_strategy(work, fabric, devices):
    share, whole = (devices - 1) / devices, sum(work.tensors)
    assert near(predict(work, fabric, "ddp", devices).wire_bytes, 2 * share * whole)
    assert near(
        predict(work, fabric, "fsdp", devices).wire_bytes,
        share * (2 * work.parameter_bytes + whole) * work.timing.passes,
    )
    assert near(
        predict(work, fabric, "local", devices).wire_bytes,
        2 * share * work.parameter_bytes / work.local_steps,
    )


def test_an_all_reduce_by_hand():
    # 8 devices in one machine, 120 GB/s, 3.4 us a hop and 8.4 before the first: 14 hops, 7/4 of 96 MB.
    cost = all_reduce(Fabric(NETWORKS["nvlink2"]), 8, 96e6)
    assert cost.ms == pytest.approx((8.4 + 14 * 3.4) / 1e3 + 1e3 * 1.75 * 96e6 / 120e9)
    # Two nodes of 8: the network cards of a node together are faster than NVLink. One card is the bottleneck,
    # and data summed inside the node first need not pass it.
    assert all_reduce(Fabric(NETWORKS["ib-hdr"], NETWORKS["nvlink2"], 8), 16, 1e9).link == "nvlink2"
    one_card = all_reduce(Fabric(read_link("ib-hdr,cards=1"), NETWORKS["nvlink2"], 8), 16, 1e9)
    assert one_card.link == "ib-hdr,cards=1"
    assert one_card.ms == pytest.approx(1e3 * (2 * 7 / 8 * 1e9 / 120e9 + 1e9 / 24e9), rel=0.01)
    # However slow the link between the nodes, a byte keeps a device busy for as long as NVLink needs for it.
    far = all_reduce(Fabric(NETWORKS["ib-hdr"], NETWORKS["nvlink4"], 8), 16, 1e9)
    assert (far.algorithm, far.link, far.busy_ms) == (
        "ring",
        "ib-hdr",
        pytest.approx(1e3 * 1.875e9 / NETWORKS["nvlink4"].bandwidth_bytes_per_s),
    )
    # For a small message on many distant devices the hops dominate, and a tree has fewer of them.
    assert all_reduce(Fabric(NETWORKS["ethernet-10g"]), 512, 1e3).algorithm == "tree"
    assert all_reduce(Fabric(NETWORKS["ethernet-10g"]), 512, 1e9).algorithm == "ring"


def test_queues_that_wait_for_each_other_are_rejected():
    with pytest.raises(ValueError, match="wait for each other"):
        finish_ms([Task(1.0, after=1)], [Task(1.0, after=1)])


@given(TENSORS)
def test_buckets_are_those_of_ddp(tensors):
    found = buckets(tensors)
    assert near(sum(found), sum(tensors))
    assert all(
        size >= limit
        for size, limit in zip(found[:-1], [FIRST_BUCKET_BYTES] + [BUCKET_BYTES] * len(found), strict=False)
    )
    assert near(sum(equal_tensors(sum(tensors))), sum(tensors))


def test_the_last_bucket_waits():
    # Of 36 MiB, 1 leaves early; 25 are ready at 26/36 of backward, and the last 10 must wait for them.
    work = Workload(Timing(10, 20, 5), (float(MIB), 25.0 * MIB, 10.0 * MIB), 36.0 * MIB)
    fabric = Fabric(Link("slow", 1e9, 0.0))
    middle_ms, last_ms = (all_reduce(fabric, 4, size * MIB).ms for size in (25, 10))
    assert predict(work, fabric, "ddp", 4).exposed_ms == pytest.approx(
        20 * 26 / 36 + middle_ms + last_ms - 20
    )
    assert predict(replace(work, overlap=False), fabric, "ddp", 4).exposed_ms == pytest.approx(
        all_reduce(fabric, 4, 36 * MIB).ms
    )


@given(WORKS, DEVICES)
def test_strong_scaling_splits_the_batch(work, devices):
    point = predict(
        replace(work, fixed_share=0.0), Fabric(Link("ideal", float("inf"), 0.0)), "ddp", devices, "strong"
    )
    if work.timing.samples < devices:
        assert "not enough" in point.why_not
        return
    assert point.efficiency <= 1 + 1e-9  # the optimizer's work stays
    assert near(
        point.step_ms, (work.timing.step_ms - work.timing.optimizer_ms) / devices + work.timing.optimizer_ms
    )


@given(st.floats(0.001, 9999).map(lambda value: f"{value:.3f}"), st.sampled_from("KMGT"))
def test_bits_and_bytes_are_distinguished(number, power):
    assume(float(number) > 0)
    bits, whole = (read_link(f"bandwidth={number}{power}{unit}/s,latency=5us") for unit in "bB")
    assert near(8 * bits.bandwidth_bytes_per_s, whole.bandwidth_bytes_per_s)
    assert whole.latency_us == 5.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ib",
        "latency=5us",
        "bandwidth=100",
        "bandwidth=-1GB/s",
        "bandwidth=1GB/s,latency=5",
        "ib-ndr,cards=-1",
        "ib-ndr,what=1",
        "bandwidth=1GB/s,contention=2",
        "bandwidth=1.2.3GB/s",
    ],
)
def test_an_invalid_network_is_rejected(text):
    with pytest.raises(UsageError, match="--network"):
        read_link(text)


def test_networks_and_devices_by_name():
    assert read_link("ib-ndr,cards=4").nics_per_node == 4
    assert (
        read_link("bandwidth=100Gb/s,latency=5us").bandwidth_bytes_per_s
        == read_link("bandwidth=12.5GB/s,latency=0.005ms").bandwidth_bytes_per_s
        == 12.5e9
    )
    assert read_devices("8..1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert read_devices("3,1,2,2") == [1, 2, 3]
    for text in ("", "0", "8..4", "x", "1..", "99999999"):
        with pytest.raises(UsageError, match="--gpus"):
            read_devices(text)


@given(
    WORKS,
    FABRICS,
    st.lists(st.integers(1, 2000), min_size=1, max_size=6, unique=True).map(sorted),
    st.sampled_from(["weak", "strong"]),
)
def test_a_record_is_written_read_and_plotted(work, fabric, counts, scaling):
    record = ScaleRecord(
        ["python", "<b>.py"],
        "/",
        scaling=scaling,
        network=replace(fabric.inter_node, name="<i>"),
        intra_node_link=fabric.intra_node,
        devices_per_node=fabric.devices_per_node,
        timing=work.timing,
        notes=["<script>"],
        status="done",
    )
    record.points = [predict(work, fabric, way, count, scaling) for way in STRATEGIES for count in counts]
    assert ScaleRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    page = html(scale_page(record))
    assert "</html>" in page
    assert not any(tag in page for tag in ("<b>", "<i>", "<script>"))
    assert len(rows(record)) == 4 * len(counts)
    assert (plot(record) is None) == all(point.efficiency is None for point in record.points)
    assert all((point.efficiency is None) == bool(point.why_not) for point in record.points)
    assert headline(record)


def test_published_runs_are_predicted(monkeypatch):
    """bench/scaling.py shows them one by one, and the shortfalls."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent.parent.parent / "bench"), *sys.path])
    from published_runs import RUNS, SETS_CONTENTION, SETS_OVERHEAD

    from flatout.cli.scale import OVERHEAD

    errors = {run: run.predicted(OVERHEAD) - run.efficiency for run in RUNS}
    assert all(abs(errors[run]) < 0.015 for run in (SETS_OVERHEAD, SETS_CONTENTION))
    counted = [error for run, error in errors.items() if run.counted]
    assert len(counted) == 28
    assert max(map(abs, counted)) < 0.12
    assert sum(abs(error) > 0.10 for error in counted) <= 3
