"""The page of throughput and memory by batch size, and of the gradient noise scale."""

from flatout.render.formatting import count, factor, finite, interval, milliseconds, rounded, sentence, size
from flatout.render.page import Figure, Items, Page, Section, Table, dateline
from flatout.render.plot import Plot, Scale, Ticks, byte_ticks, number_ticks
from flatout.schema.batch import BatchPoint, BatchRecord, NoiseScale
from flatout.schema.records import Ratio

COLUMNS = ("batch size", ">a step", ">samples/s", ">speed", ">same effective batch", ">peak", "")
NEGLIGIBLE_NOISE = 0.001  # a noise scale below this share of a batch counts as none
MIN_SPEEDUP = 1.05  # smaller speed-ups are not called faster
LABEL_HEADROOM = 1.18  # leaves space for labels


def headline(record: BatchRecord) -> str:
    best, own = record.point(record.best), record.own_size
    if best is None or own is None:
        return "No batch sizes measured"
    if best.size == own or best.speed is None or best.speed.low <= 1.0 or best.speed.median < MIN_SPEEDUP:
        return f"{own} samples a batch, unchanged"
    if record.disturbance:
        return f"{best.size} samples a batch give more samples/s beside other programs, cannot tell how much: {record.disturbance}"
    return f"{best.size} samples a batch: {factor(best.speed.median)[:-1]} times the samples/s of {own}"


def sentences(record: BatchRecord) -> list[str]:
    """Return the results as sentences: speed, knee, same effective batch, memory, noise, notes."""
    results = [f"flatout cannot change the batch size: {record.why_no_curve}"]
    results = results if record.why_no_curve else _curve_sentences(record)
    notes = [f"note: {note}" for note in record.notes[:20]]
    return [sentence(text) for text in [*results, noise_sentence(record.noise, record.own_size), *notes]]


def _curve_sentences(record: BatchRecord) -> list[str]:
    best, own, micro = map(record.point, (record.best, record.own_size, record.best_micro_batch))
    if best is None or own is None or best.speed is None:
        smallest = min(
            (point for point in record.points if point.peak_bytes), key=lambda point: point.size, default=None
        )
        if smallest is None or smallest.fits or record.limit_bytes is None:
            return ["no batch size was measured completely"]
        return [
            f"no batch size fits into {size(record.limit_bytes)} ({record.limit_source}): even {smallest.size} samples a batch take "
            f"{size(smallest.peak_bytes)}. `flatout memory` shows what uses them"
        ]
    fastest = f"{best.size} samples a batch are the fastest size that fits"
    if best is not own:
        margin = ", by a margin within noise" if best.speed.low <= 1.0 <= best.speed.high else ""
        fastest += f"{margin}: {_ratio(best.speed)} the samples/s of the program's own {own.size}"
    results = [fastest]
    sizes = [point.size for point in record.points if point.speed is not None and point.fits]
    if record.near_best is not None and len(sizes) > 1:
        low, high = record.near_best_low or record.near_best, record.near_best_high or record.near_best
        bounds = f"95 %: {low} to {high}" if low != high else "in all measurements"
        results.append(
            f"above {record.knee} samples a batch, a larger size gives less than 5 % more samples/s ({bounds})"
            if record.knee
            else f"{max(sizes)} samples a batch, the largest measured size that fits, still give at least 5 % more than the size before ({bounds})"
        )
    if micro is not None and micro is not own and micro.accumulated_speed is not None and record.effective:
        micro_batches = f"{rounded(micro.micro_batches)} micro-batches of {micro.size}"
        is_faster = micro.accumulated_speed.low > 1.0 and micro.accumulated_speed.median >= MIN_SPEEDUP
        results.append(
            f"at the same effective batch of {record.effective}, {micro_batches} would give {_ratio(micro.accumulated_speed)} the samples/s: computed from the "
            f"phases of a step at {micro.size}, not measured"
            if is_faster
            else f"at the same effective batch of {record.effective}, no micro-batch is clearly faster than {own.size} (computed from measured phases)"
        )
    elif any(point.accumulated_speed is not None for point in record.points if point is not own):
        results.append(
            f"at the same effective batch of {record.effective}, {own.size} a batch is still the fastest (smaller sizes computed from measured phases)"
        )
    results += _unmeasured_sizes(record)
    if record.repeat_ratio is not None:
        results.append(
            f"the own size measured again in other processes: {_ratio(record.repeat_ratio)}; differences within that are noise"
        )
    peak = "the size of all tensors of one step, without Python, libraries and loader workers"
    peak = "the allocator's maximum" if record.device == "cuda" else peak
    results.append(
        f"peak is {peak}; the limit is {size(record.limit_bytes)} ({record.limit_source}), of which a tenth is kept free"
    )
    return results


def _unmeasured_sizes(record: BatchRecord) -> list[str]:
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
    position = f"at step {noise.step:,}"
    if noise.high is not None and noise.high < (1 if noise.batch else NEGLIGIBLE_NOISE):
        return f"{position} the gradient has almost no noise: other batch sizes would learn the same per step"
    low, high = _samples(noise.low), _samples(noise.high)
    if noise.value is None or noise.high is None:
        return (
            f"{position} noise dominates the gradient: the noise scale is above {low} {unit}, and {noise.gradients} batches give no upper bound. "
            "Larger batches still help learning there. The noise scale varies from step to step and mostly grows during training (--at-step)"
        )
    estimate = f"{position} the gradient noise scale is about {_samples(noise.value)} {unit} (95 %: {low} to {high}, {noise.gradients} batches)"
    batch = own if noise.batch else 1
    if batch is None:
        return estimate
    relation = "near it, where doubling the batch saves some steps, but not half"
    if batch < 0.25 * noise.low:
        relation = "far below it, where doubling the batch nearly halves the steps"
    elif batch > noise.high:
        relation = "above it, where doubling the batch saves few steps"
    return f"{estimate}: the program's own batch is {relation}. The noise scale varies from step to step and mostly grows during training (--at-step)"


def _samples(value: float | None) -> str:
    return rounded(value, 2) if value is None or value < 100 else count(float(f"{value:.2g}"))


def _ratio(ratio: Ratio) -> str:
    return f"{factor(ratio.median)} ({interval(ratio.low, ratio.high)})"


def row(record: BatchRecord, point: BatchPoint) -> tuple[str, ...]:
    sizes = {"own": record.own_size, "fastest": record.best, "enough": record.knee}
    marks = [mark for mark, batch_size in sizes.items() if batch_size == point.size]
    remark = point.status if point.why else ", ".join(marks)
    speed_text, accumulated_text = (
        "1" if ratio and point.size == record.own_size else _ratio(ratio) if ratio else ""
        for ratio in (point.speed, point.accumulated_speed)
    )
    return (
        f"{point.size:,}",
        milliseconds(point.step_ms),
        rounded(point.samples_per_s),
        speed_text,
        accumulated_text,
        size(point.peak_bytes) if point.peak_bytes else "",
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
    points = [(p, value) for p in record.points if (value := finite(p.samples_per_s)) and finite(p.step_ms)]
    if len(points) < 2:
        return None
    tops = [value * (p.speed.high / p.speed.median if p.speed else 1.0) for p, value in points]
    y = Scale(0.0, LABEL_HEADROOM * max(tops))
    values = ", ".join(f"{point.size} {rounded(value)}" for point, value in points)
    label = f"Samples per second by batch size: {values}"
    plot = _plot_by_size(label, record, y, number_ticks(y), 300)
    _draw_noise_band(plot, record.noise)
    plot.line([(float(point.size), value) for point, value in points], "plain")
    for point, value in points:
        speed, low, high = point.speed, None, None
        if speed and speed.median > 0:
            low, high = (value * bound / speed.median for bound in (speed.low, speed.high))
        comparison = f", {factor(speed.median)} the own size" if speed else ""
        tip = f"{point.size} a batch: {rounded(value)} samples/s, {milliseconds(point.step_ms)} a step{comparison}"
        plot.dot(point.size, value, "c0" if point.fits else "c6", tip, low=low, high=high)
    marks_by_size: dict[int, list[str]] = {}
    for batch_size, name in ((record.own_size, "own"), (record.knee, "enough"), (record.best, "fastest")):
        if batch_size:
            marks_by_size.setdefault(batch_size, []).append(name)
    for batch_size, marks in sorted(marks_by_size.items()):
        plot.rule(x=batch_size, kind="grid", text=", ".join(marks))
    return plot


def memory_plot(record: BatchRecord) -> Plot | None:
    points = [(p, value) for p in record.points if (value := finite(p.peak_bytes)) and value > 0]
    if len(points) < 2:
        return None
    peak, limit = max(value for _, value in points), finite(record.limit_bytes)
    drawn_limit = limit if limit is not None and limit < 4 * peak else None
    y = Scale(0.0, 1.12 * max(peak, drawn_limit or 0.0))
    label = f"Peak memory by batch size: {', '.join(f'{p.size} {size(value)}' for p, value in points)}"
    plot = _plot_by_size(label, record, y, byte_ticks(y), 180)
    plot.line([(float(point.size), value) for point, value in points], "plain")
    for point, value in points:
        plot.dot(point.size, value, "c0", f"{point.size} a batch: {size(value)}")
    if drawn_limit is not None:
        plot.rule(y=drawn_limit, kind="limit", text=f"limit {size(drawn_limit)}")
    return plot


def _plot_by_size(label: str, record: BatchRecord, y: Scale, y_ticks: Ticks, height: int) -> Plot:
    """Return a plot over all sizes, including those that did not fit."""
    sizes = [float(point.size) for point in record.points]
    x = Scale(min(sizes) / 1.25, max(sizes) * 1.25, logarithmic=True)
    ticks = [(float(point.size), f"{point.size:,}") for point in record.points]
    plot = Plot(label, x, y, ticks, y_ticks, height, "samples a batch")
    for point in record.points:
        if not point.fits:
            plot.text(point.size, 0.03 * y.high, point.status, anchor="middle")
    return plot


def _draw_noise_band(plot: Plot, noise: NoiseScale) -> None:
    """Draw the band of the noise scale, as far as it lies in the plot."""
    low, high = finite(noise.low), finite(noise.high) or plot.x.high
    if noise.batch is not None and low is not None and low < plot.x.high and high > plot.x.low:
        tip = f"gradient noise scale at step {noise.step}: {rounded(low)} to {rounded(noise.high)} samples"
        plot.band(low, high, "c3", tip)
        plot.rule(x=max(low, plot.x.low), kind="grid", text=f"noise scale, step {noise.step}")
