"""Analyse throughput by batch size: the speed of each size relative to the program's own, and the knee.

Times are milliseconds per sample, by size, process and turn. The processes of one *pass* were measured
interleaved.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from flatout.measure.statistics import Round, block_ms, compare, median, quantile
from flatout.schema.batch import BatchPoint, BatchRecord
from flatout.schema.records import CONFIDENCE, Ratio

MAX_SAMPLES = 2**22
RESOLUTION = 64  # the result is exact to one part in RESOLUTION


def largest_that_fits(
    peak_of: Callable[[int], int], limit: int, start: int, max_size: int = MAX_SAMPLES
) -> int:
    """A size whose peak is at most ``limit``, while a size one part in RESOLUTION larger exceeds it.

    The result is 0 if one sample is too large, ``max_size`` if all sizes fit. ``peak_of`` must not decrease. It
    is the maximum of straight lines (each moment of a step takes a constant plus an amount per sample). So
    the search interpolates linearly between two sizes, and bisects if that does not converge.
    """
    low, low_peak, high, high_peak = 0, 0, 0, 0
    size = max(1, min(start, max_size))
    for iteration in range(200):
        peak = peak_of(size)
        if peak <= limit:
            low, low_peak = size, peak
        else:
            high, high_peak = size, peak
        if low == max_size or (high and high - low <= max(1, low // RESOLUTION)):
            break
        if not high:
            size = min(max_size, max(2 * size, size * limit // max(1, peak) if iteration % 2 == 0 else 0))
        elif not low or iteration % 2:
            size = (low + high) // 2
        else:
            interpolated = low + (high - low) * (limit - low_peak) // max(1, high_peak - low_peak)
            size = min(max(interpolated, low + 1), high - 1)
    return low


MIN_THROUGHPUT_GAIN = 0.05  # a larger batch must gain more throughput than this to be worth its memory
BOOTSTRAP_DRAWS = 600

Passes = Sequence[Mapping[int, Sequence[float]]]
"""By pass, by size, one time per turn. A pass omits the sizes that it did not measure."""


def speed(passes: Passes, own_size: int, size: int) -> Ratio | None:
    """The samples/s of this size, relative to the program's own size."""
    pairs = [
        [Round(a, b) for a, b in zip(times[own_size], times[size], strict=False)]
        for times in passes
        if own_size in times and size in times
    ]
    return compare(pairs) if any(pairs) else None


def micro_batched_step_ms(
    step_ms: float, optimizer_ms: float, step_samples: float, target_samples: float
) -> float:
    """The milliseconds of a step of ``target_samples`` samples, made of micro-batches and one update.

    ``step_ms`` is that of a step of ``step_samples`` samples. Everything but the optimizer counts once per
    micro-batch: data, forward, backward and the rest. A smaller last micro-batch costs its share.
    """
    update_ms = min(optimizer_ms, step_ms)
    return (step_ms - update_ms) * target_samples / step_samples + update_ms


def smallest_near_best(
    passes: Passes, sizes: Sequence[int], draws: int = BOOTSTRAP_DRAWS
) -> tuple[int, int, int] | None:
    """The smallest of ``sizes`` with a throughput within MIN_THROUGHPUT_GAIN of the best, and its interval.

    The interval is a bootstrap over passes, and over the turns of each process within them. None without
    measurements.
    """
    sizes = sorted(size for size in sizes if any(one_pass.get(size) for one_pass in passes))
    if not sizes:
        return None
    centre = _smallest_near_best({size: median(_process_ms(passes, size)) for size in sizes})
    rng = random.Random(0)
    indices = []
    for _ in range(draws):
        resampled = [passes[rng.randrange(len(passes))] for _ in passes]
        curve = {}
        for size in sizes:
            times = [
                block_ms([one_pass[size][rng.randrange(len(one_pass[size]))] for _ in one_pass[size]])
                for one_pass in resampled
                if one_pass.get(size)
            ]
            if times:
                curve[size] = median(times)
        indices.append(sizes.index(_smallest_near_best(curve)) if curve else sizes.index(centre))
    tail = (1 - CONFIDENCE) / 2
    low, high = sizes[round(quantile(indices, tail))], sizes[round(quantile(indices, 1 - tail))]
    return centre, min(low, centre), max(high, centre)


def _process_ms(passes: Passes, size: int) -> list[float]:
    return [block_ms(one_pass[size]) for one_pass in passes if one_pass.get(size)]


def _smallest_near_best(ms_per_sample: Mapping[int, float]) -> int:
    best = min(ms_per_sample.values())
    return min(size for size, ms in ms_per_sample.items() if ms <= best * (1 + MIN_THROUGHPUT_GAIN))


def fill_record(record: BatchRecord, passes: Passes, aa_rounds: Sequence[Sequence[Round]]) -> None:
    """Fill the speeds and choices of a record from the times of its passes.

    ``aa_rounds`` are the turns of the own size in two processes of each pass.
    """
    own = record.point(record.own_size)
    if own is None or own.step_ms is None or not own.samples_per_step:
        return
    pairs = [pair for pair in aa_rounds if pair]
    record.repeat_ratio = compare(pairs) if pairs else None
    for point in record.points:
        _fill_point(record, point, own, passes)
    fit = [point for point in record.points if point.fits and point.speed is not None]
    if not fit:
        return
    record.best = max(fit, key=lambda point: point.speed.median if point.speed else 0.0).size
    interval = smallest_near_best(passes, [point.size for point in fit])
    if interval is not None:
        record.near_best, record.near_best_low, record.near_best_high = interval
    with_kept = [point for point in fit if point.accumulated_speed is not None]
    if with_kept:
        record.best_micro_batch = max(
            with_kept, key=lambda point: point.accumulated_speed.median if point.accumulated_speed else 0.0
        ).size


def _fill_point(record: BatchRecord, point: BatchPoint, own: BatchPoint, passes: Passes) -> None:
    times = _process_ms(passes, point.size)
    samples, own_samples = point.samples_per_step, own.samples_per_step
    if not times or not samples or not own_samples:
        return
    ms_per_sample = median(times)
    point.processes = len(times)
    point.step_ms, point.samples_per_s = ms_per_sample * samples, 1000 / ms_per_sample
    unity = Ratio(1.0, 1.0, 1.0, len(times))
    point.speed = unity if point is own else speed(passes, own.size, point.size)
    point.micro_batches = (record.effective or own.size) / point.size
    optimizer_ms = point.optimizer_ms
    if optimizer_ms is None or point.micro_batches < 1:
        point.micro_batches = None
        return

    def kept_batch_ms(ms: float) -> float:
        return micro_batched_step_ms(ms * samples, optimizer_ms, samples, own_samples) / own_samples

    micro_batched = [
        {own.size: one_pass[own.size], point.size: [kept_batch_ms(ms) for ms in one_pass[point.size]]}
        for one_pass in passes
        if own.size in one_pass and point.size in one_pass
    ]
    point.accumulated_speed = unity if point is own else speed(micro_batched, own.size, point.size)
