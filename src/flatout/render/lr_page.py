"""Render learning-rate range tests: page, table and summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup
from rich.table import Table

from flatout.render import formatting
from flatout.render.charts import PLOT_HEIGHT
from flatout.render.page import environment
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    decades,
    element,
    line_through,
    percent,
    powers,
    round_ticks,
    stretched,
    title,
    upright,
    with_room,
)
from flatout.schema.lr_range import OWN, LrRange, LrRecord, LrTraining

MARKS = (("suggestion", "suggested"), ("lowest", "lowest loss"), ("diverged", "diverges"))
LAST = 10  # the final loss is the mean over the last 1/LAST of the steps
COLOURS = 7

Plot = tuple[Markup, Markup, Markup]  # loss axis, plot, axis below


def headline(record: LrRecord) -> str:
    rates = [test.suggestion for test in record.tests if test.suggestion is not None]
    if not rates:
        return "No learning rate to suggest"
    if len(record.tests) == 1:
        return f"A learning rate of {rates[0]:.2g}"
    ends = [
        (end, training.name) for training in record.trainings if (end := at_the_end(training)) is not None
    ]
    if not ends:
        return "A learning rate for each optimizer"
    best = min(ends)[1]
    return f"After the same compute time, {'your optimizer' if best == OWN else formatting.one_line(best, 60)} has the lowest loss"


def because(record: LrRecord) -> str:
    if len(record.tests) == 1:
        return formatting.sentence(record.tests[0].why or record.message)
    return formatting.sentence(
        "One run and one seed each: small differences are not significant"
        if record.trainings
        else record.message
    )


def at_the_end(training: LrTraining) -> float | None:
    """Return the mean loss over the last steps, or None if any of them is not finite."""
    last = [point.loss for point in training.points[-max(1, len(training.points) // LAST) :]]
    finite = [value for loss in last if (value := formatting.drawable(loss)) is not None]
    return sum(finite) / len(finite) if finite and len(finite) == len(last) else None


def lr_html(record: LrRecord) -> str:
    several = len(record.tests) > 1
    tests = [
        (
            formatting.one_line(test.name, 60) if several else "",
            formatting.sentence(test.why) if several else "",
            lr_plot(test),
            rows(test),
        )
        for test in record.tests
    ]
    return (
        environment("report.css", "profile.css")
        .get_template("lr.html.j2")
        .render(
            headline=headline(record),
            because=because(record),
            command=formatting.shell(record.command),
            tests=tests,
            trainings=training_plot(record.trainings),
            training_rows=training_rows(record),
            compute_s=record.compute_s,
            notes=[formatting.sentence(note) for note in record.notes[:20]],
            dateline=[part for part in (formatting.day(record.created), record.device) if part],
            version=formatting.one_line(record.flatout, 40),
        )
    )


def rows(test: LrRange) -> list[tuple[str, str]]:
    """Return (name, text) rows shown below the chart."""
    found = [("suggested", f"{test.suggestion:.3g}")] if test.suggestion is not None else []
    found += [("the script's own", ", ".join(f"{lr:.3g}" for lr in test.groups[:6]))] if test.groups else []
    places = (("falls fastest at", test.steepest), ("lowest at", test.lowest), ("diverges at", test.diverged))
    found += [(name, f"{value:.3g}") for name, value in places if value is not None]
    if test.points:
        first, last = test.points[0].lr, test.points[-1].lr
        found.append(
            (
                "range",
                f"{first:.2g} to {last:.2g} in {len(test.points)} steps, after {test.warmup_steps} normal ones",
            )
        )
    return [*found, ("optimizer", formatting.one_line(test.optimizer, 60))] if test.optimizer else found


def training_rows(record: LrRecord) -> list[tuple[str, str, str, str, str]]:
    """Return rows of name, learning rate, step time, steps and final loss."""
    found = []
    for each in record.trainings:
        end = at_the_end(each)
        said = f"{end:.4g}" if end is not None else formatting.one_line(each.why, 160) or "not finite"
        step = formatting.milliseconds(each.step_ms) if each.step_ms else ""
        found.append(
            (
                formatting.one_line(each.name, 60),
                f"{each.lr:.2g}" if each.lr is not None else "",
                step,
                str(len(each.points)),
                said,
            )
        )
    return found


def lr_table(record: LrRecord) -> Table:
    """Return the figures of a single test, or one row per test and training."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for test in record.tests:
        if len(record.tests) == 1:
            for name, value in rows(test):
                table.add_row(name, value)
        else:
            rate = f"{test.suggestion:.2g}: " if test.suggestion is not None else ""
            table.add_row(formatting.one_line(test.name, 60), f"{rate}{formatting.sentence(test.why)}")
    for name, lr, step, steps, end in training_rows(record):
        table.add_row(
            f"  {name}",
            f"loss {end} after {steps} steps{f' of {step}' if step else ''}{f' at {lr}' if lr else ''}",
        )
    return table


def lr_plot(test: LrRange) -> Plot | None:
    """Return the chart of a test, or None without a curve. Dots are single batches, the line is smoothed."""
    smooth = [
        (point.lr, value)
        for point in test.points
        if (value := formatting.drawable(point.smooth)) is not None and point.lr > 0
    ]
    if len(smooth) < 3:
        return None
    before = [value for lr, value in smooth if test.diverged is None or lr <= test.diverged] or [
        value for _, value in smooth
    ]
    y = with_room(before)
    x = Scale(smooth[0][0], test.points[-1].lr, logarithmic=True)
    ticks = [tick for tick in powers(decades([x.low, x.high])) if x.low <= tick <= x.high]
    shapes = _grid(x, ticks, y)
    shapes += [
        element(
            "circle",
            title(f"lr {point.lr:.3g}: loss {value:.4g}"),
            cx=percent(x(point.lr)),
            cy=percent(1 - y(value)),
            r=2.2,
            class_="dot",
        )
        for point in test.points
        if (value := formatting.drawable(point.loss)) is not None and y.low <= value <= y.high
    ]
    shapes.append(stretched([_curve(smooth, x, y, "steady")]))
    shapes += _marks(test, x)
    said = f"; suggested {test.suggestion:.2g}" if test.suggestion is not None else ""
    label = f"Loss of {formatting.one_line(test.name, 60)} while the learning rate grows from {x.low:.2g} to {x.high:.2g}{said}"
    return (
        _levels(y),
        chart(label, PLOT_HEIGHT, shapes, "chart plot"),
        axis_below(x, [(t, f"{t:g}") for t in ticks]),
    )


def training_plot(trainings: Sequence[LrTraining]) -> tuple[Plot, list[str]] | None:
    """Return smoothed losses over seconds of compute, one line per training, with names in colour order."""
    curves = []
    for each in trainings[:COLOURS]:
        seconds = (each.step_ms or 0.0) / 1000
        curve = [
            ((at + 1) * seconds, value)
            for at, point in enumerate(each.points)
            if (value := formatting.drawable(point.smooth)) is not None
        ]
        if seconds > 0 and len(curve) > 1:
            curves.append((each.name, curve))
    if not curves:
        return None
    # A diverging curve would flatten all others: the axis ends near the worst initial loss.
    ceiling = 1.5 * max(abs(curve[0][1]) for _, curve in curves) + min(curve[0][1] for _, curve in curves)
    y = with_room(
        [value for _, curve in curves for _, value in curve if value <= ceiling]
        or [curve[0][1] for _, curve in curves]
    )
    x = Scale(0.0, max(curve[-1][0] for _, curve in curves))
    ticks = round_ticks(x.low, x.high)
    shapes = [
        *_grid(x, ticks, y),
        stretched([_curve(curve, x, y, f"series-{at}") for at, (_, curve) in enumerate(curves)]),
    ]
    label = "Loss over seconds of compute: " + ", ".join(
        f"{formatting.one_line(name, 40)} ends at {curve[-1][1]:.3g}" for name, curve in curves
    )
    plot = (
        _levels(y),
        chart(label, PLOT_HEIGHT, shapes, "chart plot"),
        axis_below(x, [(t, f"{t:g} s") for t in ticks]),
    )
    return plot, [formatting.one_line(name, 60) for name, _ in curves]


def _grid(x: Scale, ticks: Sequence[float], y: Scale) -> list[Markup]:
    return [*(upright(x, t) for t in ticks), *(across(y, t) for t in round_ticks(y.low, y.high))]


def _levels(y: Scale) -> Markup:
    return axis_beside(y, [(t, f"{t:.3g}") for t in round_ticks(y.low, y.high)], PLOT_HEIGHT)


def _curve(points: Sequence[tuple[float, float]], x: Scale, y: Scale, kind: str) -> Markup:
    return element("path", d=line_through(points, x, y), class_=f"curve {kind}")


def _marks(test: LrRange, x: Scale) -> Iterator[Markup]:
    """Yield vertical lines with labels at different heights so that they do not overlap."""
    for at, (name, words) in enumerate(MARKS):
        value = getattr(test, name)
        if value is None or value <= 0:
            continue
        place = x(value)
        yield element("line", x1=percent(place), x2=percent(place), y1="0%", y2="100%", class_="axis")
        beside, anchor = (-5, "end") if place > 0.6 else (5, "start")
        yield element(
            "text",
            f"{words} {value:.2g}",
            x=percent(place),
            y=14 + 16 * at,
            dx=beside,
            text_anchor=anchor,
            class_="label",
        )
