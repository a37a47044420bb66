"""The page of throughput and memory by batch size, and of the gradient noise scale."""

from __future__ import annotations

from flatout.render import formatting
from flatout.render.formatting import drawable, figure, milliseconds, size, times
from flatout.render.page import Figure, Items, Page, Section, Table, dateline
from flatout.render.plot import Plot
from flatout.render.svg import Scale, Ticks, byte_ticks, number_ticks
from flatout.schema.batch import BatchPoint, BatchRecord, NoiseScale
from flatout.schema.records import Ratio

COLUMNS = ("batch size", ">a step", ">samples/s", ">speed", ">same effective batch", ">peak", "")
LEAST = 0.001  # a noise scale below this share of a batch counts as none
LITTLE = 1.05  # smaller speed-ups are not called faster
ROOM_ABOVE = 1.18  # leaves space for labels


def headline(record: BatchRecord) -> str:
    best, own = record.point(record.best), record.own_size
    if best is None or own is None:
        return "No batch sizes measured"
    if best.size == own or best.speed is None or best.speed.low <= 1.0 or best.speed.median < LITTLE:
        return f"{own} samples a batch, unchanged"
    return f"{best.size} samples a batch: {formatting.times(best.speed.median)[:-1]} times the samples/s of {own}"


def sentences(record: BatchRecord) -> list[str]:
    """Return the results as sentences: speed, knee, same effective batch, memory, noise, notes."""
    results = (
        [f"flatout cannot change the batch size: {record.why_no_curve}"]
        if record.why_no_curve
        else _of_the_curve(record)
    )
    return [
        formatting.sentence(each)
        for each in [
            *results,
            noise_sentence(record.noise, record.own_size),
            *(f"note: {note}" for note in record.notes[:20]),
        ]
    ]


def _of_the_curve(record: BatchRecord) -> list[str]:
    best, own, kept = (
        record.point(record.best),
        record.point(record.own_size),
        record.point(record.best_micro_batch),
    )
    if best is None or own is None or best.speed is None:
        smallest = min(
            (point for point in record.points if point.peak_bytes), key=lambda point: point.size, default=None
        )
        if smallest is None or smallest.fits or record.limit_bytes is None:
            return ["no batch size was measured completely"]
        return [
            f"no batch size fits into {formatting.size(record.limit_bytes)} ({record.limit_source}): even {smallest.size} samples a batch take "
            f"{formatting.size(smallest.peak_bytes)}. `flatout memory` shows what uses them"
        ]
    fastest = (
        "fastest size that fits"
        if not best.speed.low <= 1.0 <= best.speed.high or best is own
        else "fastest size that fits, by a margin within noise"
    )
    against = (
        f": {_ratio(best.speed)} the samples/s of the program's own {own.size}" if best is not own else ""
    )
    results = [f"{best.size} samples a batch are the {fastest}{against}"]
    tried = [point.size for point in record.points if point.speed is not None and point.fits]
    if record.near_best is not None and len(tried) > 1:
        low, high = record.near_best_low or record.near_best, record.near_best_high or record.near_best
        between = f"95 %: {low} to {high}" if low != high else "in all measurements"
        results.append(
            f"above {record.knee} samples a batch, a larger size gives less than 5 % more samples/s ({between})"
            if record.knee
            else f"{max(tried)} samples a batch, the largest measured size that fits, still give at least 5 % more than the size before ({between})"
        )
    if kept is not None and kept is not own and kept.accumulated_speed is not None and record.effective:
        parts = f"{formatting.figure(kept.micro_batches)} micro-batches of {kept.size}"
        better = kept.accumulated_speed.low > 1.0 and kept.accumulated_speed.median >= LITTLE
        results.append(
            f"at the same effective batch of {record.effective}, {parts} would give {_ratio(kept.accumulated_speed)} the samples/s: computed from the "
            f"phases of a step at {kept.size}, not measured"
            if better
            else f"at the same effective batch of {record.effective}, no micro-batch is clearly faster than {own.size} (computed from measured phases)"
        )
    elif any(point.accumulated_speed is not None for point in record.points if point is not own):
        results.append(
            f"at the same effective batch of {record.effective}, {own.size} a batch is still the fastest (smaller sizes computed from measured phases)"
        )
    results += _left_out(record)
    if record.repeat_ratio is not None:
        results.append(
            f"the own size measured again in other processes: {_ratio(record.repeat_ratio)}; differences within that are noise"
        )
    what = (
        "the allocator's maximum"
        if record.device == "cuda"
        else "the size of all tensors of one step, without Python, libraries and loader workers"
    )
    results.append(
        f"peak is {what}; the limit is {formatting.size(record.limit_bytes)} ({record.limit_source}), of which a tenth is kept free"
    )
    return results


def _left_out(record: BatchRecord) -> list[str]:
    """Return the sizes that were not measured, grouped by reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in record.points:
        if point.why:
            reasons.setdefault((point.status, point.why), []).append(f"{point.size:,}")
    return [f"{', '.join(sizes)}: {status}, {why}" for (status, why), sizes in reasons.items()]


def noise_sentence(noise: NoiseScale, own: int | None) -> str:
    """Return a sentence on how large a batch still helps learning."""
    if noise.why_not:
        return f"the gradient noise scale was not measured: {noise.why_not}"
    if noise.low is None:
        return "the gradient noise scale was not measured"
    unit = "samples" if noise.batch else "of the program's own batches"
    at = f"at step {noise.step:,}"
    if noise.high is not None and noise.high < (1 if noise.batch else LEAST):
        return f"{at} the gradient has almost no noise: other batch sizes would learn the same per step"
    low, high = _samples(noise.low), _samples(noise.high)
    if noise.value is None or noise.high is None:
        return (
            f"{at} noise dominates the gradient: the noise scale is above {low} {unit}, and {noise.gradients} batches give no upper bound. "
            "Larger batches still help learning there. The noise scale varies from step to step and mostly grows during training (--at-step)"
        )
    scale = f"{at} the gradient noise scale is about {_samples(noise.value)} {unit} (95 %: {low} to {high}, {noise.gradients} batches)"
    size = own if noise.batch else 1
    if size is None:
        return scale
    where = (
        "far below it, where doubling the batch nearly halves the steps"
        if size < 0.25 * noise.low
        else "above it, where doubling the batch saves few steps"
        if size > noise.high
        else "near it, where doubling the batch saves some steps, but not half"
    )
    return f"{scale}: the program's own batch is {where}. The noise scale varies from step to step and mostly grows during training (--at-step)"


def _samples(value: float | None) -> str:
    return (
        formatting.figure(value, 2)
        if value is None or value < 100
        else formatting.count(float(f"{value:.2g}"))
    )


def _ratio(ratio: Ratio) -> str:
    return f"{formatting.times(ratio.median)} ({formatting.interval(ratio.low, ratio.high)})"


def row(record: BatchRecord, point: BatchPoint) -> tuple[str, ...]:
    speed, kept = point.speed, point.accumulated_speed
    marks = [
        word
        for word, size in (("own", record.own_size), ("fastest", record.best), ("enough", record.knee))
        if size == point.size
    ]
    remark = point.status if point.why else ", ".join(marks)
    fast, as_fast = (
        "1" if ratio and point.size == record.own_size else _ratio(ratio) if ratio else ""
        for ratio in (speed, kept)
    )
    return (
        f"{point.size:,}",
        formatting.milliseconds(point.step_ms),
        formatting.figure(point.samples_per_s),
        fast,
        as_fast,
        formatting.size(point.peak_bytes) if point.peak_bytes else "",
        remark,
    )


def batch_page(record: BatchRecord) -> Page:
    caption = "With 95 % intervals."
    if record.noise.batch is not None and record.noise.low is not None:
        caption += " The band is the gradient noise scale with its interval."
    return Page(
        "batch size",
        headline(record),
        "batch.json",
        [
            Section("Samples per second", [Figure(speed_plot(record), caption)]),
            Section("Peak memory", [Figure(memory_plot(record), "Peak of one step.")]),
            Section("Figures", [Table(COLUMNS, [row(record, point) for point in record.points])]),
            Section("Results", [Items(sentences(record))]),
        ],
        command=record.command,
        dateline=dateline(record.created, record.device),
        version=record.flatout,
    )


def speed_plot(record: BatchRecord) -> Plot | None:
    """Return samples per second by batch size. None with fewer than two measured sizes."""
    drawn = [
        (point, value)
        for point in record.points
        if (value := drawable(point.samples_per_s)) and drawable(point.step_ms)
    ]
    if len(drawn) < 2:
        return None
    tops = [value * (point.speed.high / point.speed.median if point.speed else 1.0) for point, value in drawn]
    y = Scale(0.0, ROOM_ABOVE * max(tops))
    label = "Samples per second by batch size: " + ", ".join(
        f"{point.size} {figure(value)}" for point, value in drawn
    )
    plot = _by_size(label, record, y, number_ticks(y), 300)
    _noise(plot, record.noise)
    plot.line([(float(point.size), value) for point, value in drawn], "plain")
    for point, value in drawn:
        speed = point.speed
        low, high = (
            (value * end / speed.median for end in (speed.low, speed.high))
            if speed and speed.median > 0
            else (None, None)
        )
        against = f", {times(speed.median)} the own size" if speed else ""
        tip = (
            f"{point.size} a batch: {figure(value)} samples/s, {milliseconds(point.step_ms)} a step{against}"
        )
        plot.dot(point.size, value, "c0" if point.fits else "c6", tip, low=low, high=high)
    names: dict[int, list[str]] = {}
    for at, name in ((record.own_size, "own"), (record.knee, "enough"), (record.best, "fastest")):
        if at:
            names.setdefault(at, []).append(name)
    for at, words in sorted(names.items()):
        plot.rule(x=at, kind="grid", text=", ".join(words))
    return plot


def memory_plot(record: BatchRecord) -> Plot | None:
    drawn = [
        (point, value)
        for point in record.points
        if (value := drawable(point.peak_bytes)) is not None and value > 0
    ]
    if len(drawn) < 2:
        return None
    most, limit = max(value for _, value in drawn), drawable(record.limit_bytes)
    shown = limit if limit is not None and limit < 4 * most else None
    y = Scale(0.0, 1.12 * max(most, shown or 0.0))
    label = "Peak memory by batch size: " + ", ".join(f"{point.size} {size(value)}" for point, value in drawn)
    plot = _by_size(label, record, y, byte_ticks(y), 180)
    plot.line([(float(point.size), value) for point, value in drawn], "plain")
    for point, value in drawn:
        plot.dot(point.size, value, "c0", f"{point.size} a batch: {size(value)}")
    if shown is not None:
        plot.rule(y=shown, kind="limit", text=f"limit {size(shown)}")
    return plot


def _by_size(label: str, record: BatchRecord, y: Scale, y_ticks: Ticks, height: int) -> Plot:
    """Return a plot over all sizes, including those that did not fit."""
    sizes = [float(point.size) for point in record.points]
    x = Scale(min(sizes) / 1.25, max(sizes) * 1.25, logarithmic=True)
    ticks = [(float(point.size), f"{point.size:,}") for point in record.points]
    plot = Plot(label, x, y, ticks, y_ticks, height, "samples a batch")
    for point in record.points:
        if not point.fits:
            plot.text(point.size, 0.03 * y.high, point.status, anchor="middle")
    return plot


def _noise(plot: Plot, noise: NoiseScale) -> None:
    """Draw the band of the noise scale, as far as it lies in the plot."""
    low, high = drawable(noise.low), drawable(noise.high) or plot.x.high
    if noise.batch is not None and low is not None and low < plot.x.high and high > plot.x.low:
        tip = f"gradient noise scale at step {noise.step}: {figure(low)} to {figure(noise.high)} samples"
        plot.band(low, high, "c3", tip)
        plot.rule(x=max(low, plot.x.low), kind="grid", text=f"noise scale, step {noise.step}")
