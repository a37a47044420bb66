"""The page of a learning-rate range test, for the terminal and as HTML."""

from flatout.render.formatting import capital, finite, milliseconds, sentence
from flatout.render.page import Figure, Page, Section, Table, dateline, notes
from flatout.render.plot import Plot, Scale, number_ticks, padded_scale, powers
from flatout.schema.batch import LrRecord

CAPTION = (
    "Dots are the losses of single batches, the line is their exponential mean. The learning rate changes every step, so the suggestion is a "
    "first value, not the best one."
)


def lr_page(record: LrRecord) -> Page:
    rate = record.suggestion
    rows = [
        ("suggested", _rate(rate)),
        ("the script's own", ", ".join(map(_rate, record.groups[:6]))),
        ("falls fastest at", _rate(record.steepest)),
        ("lowest at", _rate(record.lowest)),
        ("diverges at", _rate(record.diverged)),
        ("range", _range(record)),
        ("optimizer", record.optimizer),
        ("a step", milliseconds(record.step_ms)),
    ]
    table = Table((), [row for row in rows if row[1]])
    return Page(
        "learning-rate range test",
        f"A learning rate of {rate:.2g}" if rate is not None else "No learning rate to suggest",
        "lr.json",
        [
            Section("The loss as the learning rate grows", [Figure(lr_plot(record), CAPTION), table]),
            notes(map(sentence, record.notes)),
        ],
        capital(sentence(record.why or record.message)),
        command=record.command,
        dateline=dateline(record.created, record.device),
        version=record.flatout,
    )


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}"


def _range(record: LrRecord) -> str:
    if not record.points:
        return ""
    ends = f"{_rate(record.points[0].lr)} to {_rate(record.points[-1].lr)}"
    return f"{ends} in {len(record.points)} steps, after {record.warmup_steps} normal ones"


def lr_plot(record: LrRecord) -> Plot | None:
    """Return the losses against the learning rate, with the marked rates. None without a curve."""
    smooth = [(p.lr, v) for p in record.points if (v := finite(p.smooth)) is not None and p.lr > 0]
    if len(smooth) < 3:
        return None
    diverged = record.diverged
    y = padded_scale([v for lr, v in smooth if diverged is None or lr <= diverged] or [v for _, v in smooth])
    x = Scale(smooth[0][0], record.points[-1].lr, logarithmic=True)
    label = f"Loss while the learning rate grows from {x.low:.2g} to {x.high:.2g}"
    plot = Plot(label, x, y, [(t, f"{t:g}") for t in powers(x)], number_ticks(y), axis="learning rate")
    for point in record.points:
        if (loss := finite(point.loss)) is not None and y.low <= loss <= y.high:
            plot.dot(point.lr, loss, "c1", f"lr {point.lr:.3g}: loss {loss:.4g}", 2.2)
    plot.line(smooth, "c0")
    marks = (("suggested", record.suggestion), ("lowest loss", record.lowest), ("diverges", diverged))
    for name, rate in marks:
        if rate is not None and rate > 0:
            plot.rule(x=rate, text=f"{name} {rate:.2g}")
    return plot
