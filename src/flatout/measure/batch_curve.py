"""Analyse throughput by batch size: the speed of each size relative to the program's own, and the knee.

Times are milliseconds per sample, by size, process and turn. The processes of one *pass* were measured
interleaved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from flatout.measure.statistics import Round, block_ms, compare, median, quantile
from flatout.schema.batch import BatchPoint, BatchRecord
from flatout.schema.records import CONFIDENCE, Ratio

WORTH = 0.05  # a larger batch must gain more throughput than this to be worth its memory
DRAWS = 600

Passes = Sequence[Mapping[int, Sequence[float]]]
"""By pass, by size, one time per turn. A pass omits the sizes that it did not measure."""


def speed(passes: Passes, own: int, size: int) -> Ratio | None:
    """Return the samples/s of this size, relative to the program's own size."""
    pairs = [
        [Round(a, b) for a, b in zip(each[own], each[size], strict=False)]
        for each in passes
        if own in each and size in each
    ]
    return compare(pairs) if any(pairs) else None


def in_micro_batches(step_ms: float, optimizer_ms: float, samples: float, wanted: float) -> float:
    """Return the milliseconds of a step of ``wanted`` samples, made of micro-batches and one update.

    The micro-batches of a step of ``samples`` samples take ``step_ms``. Everything but the optimizer counts
    once per micro-batch: data, forward, backward and the rest. A smaller last micro-batch costs its share.
    """
    update_ms = min(optimizer_ms, step_ms)
    return (step_ms - update_ms) * wanted / samples + update_ms


def enough(
    passes: Passes, sizes: Sequence[int], seed: int = 0, draws: int = DRAWS
) -> tuple[int, int, int] | None:
    """Return the smallest of ``sizes`` with a throughput within WORTH of the best, and its interval.

    The interval is a bootstrap over passes, and over the turns of each process within them. None without
    measurements.
    """
    sizes = sorted(size for size in sizes if any(each.get(size) for each in passes))
    if not sizes:
        return None
    centre = _smallest(
        {size: median([block_ms(each[size]) for each in passes if each.get(size)]) for size in sizes}
    )
    rng = random.Random(seed)
    found = []
    for _ in range(draws):
        drawn = [passes[rng.randrange(len(passes))] for _ in passes]
        curve = {}
        for size in sizes:
            times = [
                block_ms([each[size][rng.randrange(len(each[size]))] for _ in each[size]])
                for each in drawn
                if each.get(size)
            ]
            if times:
                curve[size] = median(times)
        found.append(sizes.index(_smallest(curve)) if curve else sizes.index(centre))
    tail = (1 - CONFIDENCE) / 2
    low, high = sizes[round(quantile(found, tail))], sizes[round(quantile(found, 1 - tail))]
    return centre, min(low, centre), max(high, centre)


def _smallest(ms_a_sample: Mapping[int, float]) -> int:
    best = min(ms_a_sample.values())
    return min(size for size, ms in ms_a_sample.items() if ms <= best * (1 + WORTH))


def read(record: BatchRecord, passes: Passes, again: Sequence[Sequence[Round]]) -> None:
    """Fill the speeds and choices of a record from the times of its passes.

    ``again`` are the turns of the own size in two processes of each pass.
    """
    own = record.point(record.own_size)
    if own is None or own.step_ms is None or not own.samples_per_step:
        return
    pairs = [pair for pair in again if pair]
    record.repeat_ratio = compare(pairs) if pairs else None
    for point in record.points:
        _read(record, point, own, passes)
    fit = [point for point in record.points if point.fits and point.speed is not None]
    if not fit:
        return
    record.best = max(fit, key=lambda point: point.speed.median if point.speed else 0.0).size
    found = enough(passes, [point.size for point in fit])
    if found is not None:
        record.near_best, record.near_best_low, record.near_best_high = found
    kept = [point for point in fit if point.accumulated_speed is not None]
    if kept:
        record.best_micro_batch = max(
            kept, key=lambda point: point.accumulated_speed.median if point.accumulated_speed else 0.0
        ).size


def _read(record: BatchRecord, point: BatchPoint, own: BatchPoint, passes: Passes) -> None:
    times = [block_ms(each[point.size]) for each in passes if each.get(point.size)]
    samples, whole = point.samples_per_step, own.samples_per_step
    if not times or not samples or not whole:
        return
    ms_a_sample = median(times)
    point.processes = len(times)
    point.step_ms, point.samples_per_s = ms_a_sample * samples, 1000 / ms_a_sample
    alike = Ratio(1.0, 1.0, 1.0, len(times))
    point.speed = alike if point is own else speed(passes, own.size, point.size)
    point.micro_batches = (record.effective or own.size) / point.size
    optimizer_ms = point.optimizer_ms
    if optimizer_ms is None or point.micro_batches < 1:
        point.micro_batches = None
        return

    def kept(ms: float) -> float:
        return in_micro_batches(ms * samples, optimizer_ms, samples, whole) / whole

    in_parts = [
        {own.size: each[own.size], point.size: [kept(ms) for ms in each[point.size]]}
        for each in passes
        if own.size in each and point.size in each
    ]
    point.accumulated_speed = alike if point is own else speed(in_parts, own.size, point.size)
