"""Render throughput and memory by batch size, and the gradient noise scale: table, sentences and page."""

from __future__ import annotations

from rich.table import Table

from flatout.render import formatting
from flatout.render.batch_charts import memory_plot, speed_plot
from flatout.render.page import environment
from flatout.schema.batch import BatchPoint, BatchRecord, NoiseSeen
from flatout.schema.records import Ratio

COLUMNS = ("batch size", "a step", "samples/s", "speed", "same effective batch", "peak", "")
LEAST = 0.001  # a noise scale below this share of a batch counts as none
LITTLE = 1.05  # smaller speed-ups are not called faster


def headline(record: BatchRecord) -> str:
    best, own = record.point(record.best), record.own
    if best is None or own is None:
        return "No batch sizes measured"
    if best.size == own or best.speed is None or best.speed.low <= 1.0 or best.speed.median < LITTLE:
        return f"{own} samples a batch, unchanged"
    return f"{best.size} samples a batch: {formatting.times(best.speed.median)[:-1]} times the samples/s of {own}"


def sentences(record: BatchRecord) -> list[str]:
    """Return the results as sentences: speed, knee, same effective batch, memory, noise, notes."""
    found = (
        [f"flatout cannot change the batch size: {record.why_no_curve}"]
        if record.why_no_curve
        else _of_the_curve(record)
    )
    return [
        formatting.sentence(each)
        for each in [
            *found,
            noise_sentence(record.noise, record.own),
            *(f"note: {note}" for note in record.notes[:20]),
        ]
    ]


def _of_the_curve(record: BatchRecord) -> list[str]:
    best, own, kept = record.point(record.best), record.point(record.own), record.point(record.kept_best)
    if best is None or own is None or best.speed is None:
        smallest = min(
            (point for point in record.points if point.peak_bytes), key=lambda point: point.size, default=None
        )
        if smallest is None or smallest.fits or record.limit_bytes is None:
            return ["no batch size was measured completely"]
        return [
            f"no batch size fits into {formatting.size(record.limit_bytes)} ({record.limit}): even {smallest.size} samples a batch take "
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
    found = [f"{best.size} samples a batch are the {fastest}{against}"]
    tried = [point.size for point in record.points if point.speed is not None and point.fits]
    if record.enough is not None and len(tried) > 1:
        low, high = record.enough_low or record.enough, record.enough_high or record.enough
        between = f"95 %: {low} to {high}" if low != high else "in all measurements"
        found.append(
            f"above {record.knee} samples a batch, a larger size gives less than 5 % more samples/s ({between})"
            if record.knee
            else f"{max(tried)} samples a batch, the largest measured size that fits, still give at least 5 % more than the size before ({between})"
        )
    if kept is not None and kept is not own and kept.kept_speed is not None and record.effective:
        parts = f"{formatting.figure(kept.kept_micro_batches)} micro-batches of {kept.size}"
        better = kept.kept_speed.low > 1.0 and kept.kept_speed.median >= LITTLE
        found.append(
            f"at the same effective batch of {record.effective}, {parts} would give {_ratio(kept.kept_speed)} the samples/s: computed from the "
            f"phases of a step at {kept.size}, not measured"
            if better
            else f"at the same effective batch of {record.effective}, no micro-batch is clearly faster than {own.size} (computed from measured phases)"
        )
    elif any(point.kept_speed is not None for point in record.points if point is not own):
        found.append(
            f"at the same effective batch of {record.effective}, {own.size} a batch is still the fastest (smaller sizes computed from measured phases)"
        )
    found += _left_out(record)
    if record.again is not None:
        found.append(
            f"the own size measured again in other processes: {_ratio(record.again)}; differences within that are noise"
        )
    what = (
        "the allocator's maximum"
        if record.device == "cuda"
        else "the size of all tensors of one step, without Python, libraries and loader workers"
    )
    found.append(
        f"peak is {what}; the limit is {formatting.size(record.limit_bytes)} ({record.limit}), of which a tenth is kept free"
    )
    return found


def _left_out(record: BatchRecord) -> list[str]:
    """Return the sizes that were not measured, grouped by reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in record.points:
        if point.why:
            reasons.setdefault((point.status, point.why), []).append(f"{point.size:,}")
    return [f"{', '.join(sizes)}: {status}, {why}" for (status, why), sizes in reasons.items()]


def noise_sentence(noise: NoiseSeen, own: int | None) -> str:
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
    speed, kept = point.speed, point.kept_speed
    marks = [
        word
        for word, size in (("own", record.own), ("fastest", record.best), ("enough", record.knee))
        if size == point.size
    ]
    said = point.status if point.why else ", ".join(marks)
    fast, as_fast = (
        "1" if ratio and point.size == record.own else _ratio(ratio) if ratio else ""
        for ratio in (speed, kept)
    )
    return (
        f"{point.size:,}",
        formatting.milliseconds(point.step_ms),
        formatting.figure(point.samples_per_s),
        fast,
        as_fast,
        formatting.size(point.peak_bytes) if point.peak_bytes else "",
        formatting.one_line(said, 60),
    )


def batch_table(record: BatchRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    for point in record.points:
        table.add_row(*row(record, point))
    return table


def batch_html(record: BatchRecord) -> str:
    return (
        environment("report.css", "profile.css")
        .get_template("batch.html.j2")
        .render(
            headline=headline(record),
            sentences=sentences(record),
            command=formatting.shell(record.command),
            speed=speed_plot(record),
            memory=memory_plot(record),
            noise=record.noise.batch is not None and record.noise.low is not None,
            columns=COLUMNS,
            rows=[row(record, point) for point in record.points],
            computed=any(point.kept_samples_per_s for point in record.points),
            dateline=[part for part in (formatting.day(record.created), record.device) if part],
            version=formatting.one_line(record.flatout, 40),
        )
    )
