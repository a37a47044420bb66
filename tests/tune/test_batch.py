"""Throughput against batch size: the curve is read correctly, and `flatout batch` measures real programs
without changing them.
"""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.measure.batch_curve import (
    MIN_THROUGHPUT_GAIN,
    fill_record,
    micro_batched_step_ms,
    smallest_near_best,
)
from flatout.measure.statistics import Round
from flatout.render.batch_page import batch_page, noise_sentence, sentences
from flatout.render.page import html
from flatout.schema.batch import BatchPoint, BatchRecord, NoiseScale
from flatout.schema.records import TrialRecord
from flatout.tune.batch_programs import size_error

NOISE = (1.0, 1.02, 0.99, 1.01)


def curve(cost_ms, sizes, own_size=8, effective=None, optimizer_ms=1.0, passes=3):
    """A record of a program whose step takes ``cost_ms(size)``; each pass is a little slower than the one
    before.
    """
    record = BatchRecord(
        ["python", "train.py"],
        "/",
        own_size=own_size,
        effective=effective or own_size,
        limit_bytes=2**30,
        limit_source="given",
    )
    times = [
        {size: [cost_ms(size) * noise * (1 + 0.03 * at) / size for noise in NOISE] for size in sizes}
        for at in range(passes)
    ]
    record.points = [
        BatchPoint(
            size,
            step_ms=cost_ms(size),
            optimizer_ms=optimizer_ms,
            samples_per_step=size * record.effective / own_size,
        )
        for size in sizes
    ]
    fill_record(record, times, [[Round(10.0, 10.1), Round(10.0, 9.9)]] * passes)
    return record


def test_where_a_larger_batch_gains_nothing():
    """A machine that is saturated from 64 on: doubling the batch gains one per cent."""
    record = curve(
        lambda size: max(4.0, size / 16 * (1 - 0.01 * math.log2(size / 64))), (8, 16, 32, 64, 128, 256)
    )
    assert (record.best, record.near_best) == (256, 64)
    assert record.near_best_low <= 64 <= record.near_best_high < 256
    speeds = {point.size: point.speed for point in record.points}
    assert speeds[64].median == pytest.approx(8, rel=0.02)
    assert speeds[64].low <= speeds[64].median <= speeds[64].high
    assert record.repeat_ratio.low <= 1 <= record.repeat_ratio.high
    assert "above 64 samples a batch, a larger size gives less than 5 % more samples/s" in " ".join(
        sentences(record)
    )


def test_where_nothing_fits():
    record = BatchRecord(
        ["python", "train.py"],
        "/",
        own_size=8,
        limit_bytes=2**20,
        limit_source="given",
        points=[BatchPoint(16, "too big"), BatchPoint(8, "too big", peak_bytes=2**21)],
    )
    assert (
        "no batch size fits into 1.00 MiB (given): even 8 samples a batch take 2.00 MiB"
        in sentences(record)[0]
    )


def test_the_effective_batch_is_kept_by_accumulation():
    """A step takes 2 ms for each update and 1 ms a sample, but 3 ms a sample in batches above 8.

    So 8 micro-batches of 8 are the fastest way to 64.
    """
    record = curve(
        lambda size: 2 + size * (3 if size > 8 else 1), (2, 8, 64, 128), own_size=64, optimizer_ms=2.0
    )
    kept = {point.size: point for point in record.points}
    assert kept[8].micro_batches == 8
    assert kept[8].accumulated_speed.median == pytest.approx((2 + 192) / (2 + 64), rel=0.02)
    assert kept[2].accumulated_speed.median == pytest.approx(kept[8].accumulated_speed.median, rel=0.05)
    assert kept[128].accumulated_speed is None  # larger than the program's own effective batch
    assert "computed from the phases of a step" in " ".join(sentences(record))


def test_a_program_that_accumulates_may_accumulate_less():
    """Four micro-batches of 8: one batch of 32 is as large an effective batch."""
    record = curve(lambda size: 1 + 4 * (2 + size), (8, 32, 64), own_size=8, effective=32)
    kept = {point.size: point.micro_batches for point in record.points}
    assert kept == {8: 4, 32: 1, 64: None}


@given(st.floats(0.1, 1e3), st.floats(0, 1e3), st.floats(1, 1e4), st.floats(1, 1e4))
def test_micro_batches_add_up(step_ms, optimizer_ms, samples, wanted):
    whole = micro_batched_step_ms(step_ms, optimizer_ms, samples, wanted)
    assert micro_batched_step_ms(step_ms, optimizer_ms, samples, samples) == pytest.approx(step_ms)
    assert whole >= min(optimizer_ms, step_ms) - 1e-9
    assert (
        micro_batched_step_ms(whole, optimizer_ms, wanted, samples)
        == pytest.approx(step_ms, rel=1e-6, abs=1e-6)
        or optimizer_ms >= whole
    )


@given(
    st.dictionaries(
        st.integers(1, 10**5), st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=4), min_size=1, max_size=6
    )
)
def test_enough_is_never_far_from_the_best(times):
    found, low, high = smallest_near_best([times, times], list(times), draws=30)
    mean = {size: sum(ms) / len(ms) for size, ms in times.items()}
    assert low <= found <= high
    assert {low, found, high} <= set(times)
    assert len(times) > 1 or low == high
    if all(len(ms) == 1 for ms in times.values()):
        assert mean[found] <= (1 + MIN_THROUGHPUT_GAIN) * min(mean.values()) + 1e-6


numbers = st.one_of(st.none(), st.floats(-1e9, 1e12))


points = st.builds(
    BatchPoint,
    st.integers(1, 2**40),
    st.sampled_from(["measured", "failed", "no time"]),
    st.text(max_size=9),
    numbers,
    numbers,
    numbers,
    numbers,
    peak_bytes=st.one_of(st.none(), st.integers(0, 2**50)),
)
noises = st.builds(
    NoiseScale,
    st.integers(0, 10**6),
    st.one_of(st.none(), st.integers(1, 512)),
    st.integers(0, 300),
    numbers,
    numbers,
    numbers,
)


@settings(max_examples=25)
@given(st.lists(points, max_size=6, unique_by=lambda p: p.size), noises, st.text(max_size=30))
def test_any_measurements_can_be_plotted(points, noise, word):
    record = BatchRecord(
        ["python", word],
        "/",
        own_size=points[0].size if points else None,
        points=points,
        noise=noise,
        best=points[-1].size if points else None,
        near_best=points[0].size if points else None,
        limit_source=word,
    )
    assert BatchRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert "</html>" in html(batch_page(record))


@pytest.mark.parametrize(
    ("noise", "own", "words"),
    [
        (NoiseScale(5, 8, 60, 400.0, 300.0, 600.0), 8, "far below it"),
        (NoiseScale(5, 8, 60, 40.0, 30.0, 60.0), 512, "above it"),
        (NoiseScale(5, 8, 60, 40.0, 30.0, 60.0), 32, "near it"),
        (NoiseScale(5, 8, 60, None, 900.0, None), 8, "above 900 samples"),
        (NoiseScale(5, 8, 60, 0.0, 0.0, 0.1), 8, "almost no noise"),
        (NoiseScale(5, None, 60, 4.0, 3.0, 6.0), None, "of the program's own batches"),
        (NoiseScale(5, None, 60, 0.3, 0.2, 0.5), None, "about 0.30 of the program's own batches"),
        (NoiseScale(5, None, 60, 0.0, 0.0, 0.0), None, "no noise"),
        (NoiseScale(why_not="it has two optimizers"), 8, "two optimizers"),
    ],
)
def test_how_large_a_batch_still_helps_is_one_sentence(noise, own, words):
    assert words in noise_sentence(noise, own)
    assert noise.why_not or "step 5" in noise_sentence(noise, own)


@pytest.mark.parametrize(
    ("record", "status", "words"),
    [
        (
            TrialRecord(
                "failed", log_tail="x\nRuntimeError: DefaultCPUAllocator: can't allocate memory", exit_code=1
            ),
            "out of memory",
            "allocate",
        ),
        (TrialRecord("failed", reason="killed", exit_code=-9), "out of memory", "kernel"),
        (TrialRecord("hung", reason="it did not answer"), "no time", "answer"),
        (TrialRecord("ended"), "failed", "the program finished"),
        (
            TrialRecord("failed", log_tail="ValueError: shape '[8, 4]'", exit_code=1),
            "failed",
            "shape '[8, 4]'",
        ),
    ],
)
def test_why_a_size_did_not_run(record, status, words):
    error = size_error(record)
    assert error.status == status
    assert words in error.why


QUADRATIC = """
import torch
torch.manual_seed(0)
data = torch.randn(4000, 24)
test = torch.utils.data.DataLoader(data, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 8, shuffle=True)
weight = torch.nn.Parameter(data.mean(0) + 0.5 * torch.ones(24))
optimizer = torch.optim.SGD([weight], lr=1e-9)
while True:
    for x, in loader:
        optimizer.zero_grad()
        (0.5 * (weight - x).square().sum(1)).sum().backward()  # the gradient of a sample is weight - x; the loss a sum
        optimizer.step()
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(150)
def test_a_real_program(flatout, script):
    """A quadratic:

    B = tr(Sigma) / |G|^2 = 24 / 6 = 4. Twice its batch runs; a million samples do not exist.
    """
    script(QUADRATIC)
    done = flatout(
        "batch", "--job", "job", "--budget", "12s", "--sizes", "16,1000000", "python", "train.py", timeout=140
    )
    assert done.code == 0, done.err
    record = BatchRecord.from_json(json.loads((flatout.folder / "job" / "batch.json").read_text()))
    assert (record.status, record.own_size, record.effective, record.dataset_samples, record.loader) == (
        "done",
        8,
        8,
        4000,
        1,
    )
    assert [point.status for point in record.points] == ["measured", "measured", "no such batch"]
    own_size, twice = record.points[:2]
    assert (own_size.samples_per_step, twice.samples_per_step) == (8, 16)
    assert twice.speed.low < twice.speed.median < twice.speed.high
    assert twice.samples_per_s == pytest.approx(1000 * 16 / twice.step_ms)
    assert own_size.micro_batches == 1
    assert twice.accumulated_speed is None
    assert 8 * 24 * 4 <= own_size.peak_bytes < twice.peak_bytes < 2**20
    assert record.noise.batch == 8
    assert abs(record.noise.value - 4.0) < 0.2 * 4.0
    assert record.noise.low <= record.noise.value <= record.noise.high
    page = (flatout.folder / "job" / "batch.html").read_text()
    assert "<script" not in page
    assert "no such batch" in page
    assert "gradient noise scale is about" in done.out
    assert done.left == []
    assert sorted(path.name for path in flatout.folder.iterdir()) == ["job", "train.py"]


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_program_without_a_loader(flatout, tiny, script):
    """There is nothing to change; its noise is reported in its own batches."""
    script(tiny)
    done = flatout("batch", "--job", "job", "--budget", "5s", "--json", "python", "train.py", timeout=100)
    assert done.code == 0, done.err
    record = BatchRecord.from_json(json.loads(done.out))
    assert "no torch DataLoader" in record.why_no_curve
    assert record.points == []
    assert record.noise.batch is None
    assert record.noise.value > 0
