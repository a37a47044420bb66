"""The chart of two loss curves. A value that is not finite makes a gap and is counted."""

from collections.abc import Sequence
from itertools import zip_longest

from flatout.render.formatting import count, drawable, figure
from flatout.render.page import Figure
from flatout.render.plot import Plot
from flatout.render.svg import Scale, number_ticks, with_room

MAX_POINTS = 240
Curve = list[float | None]


def loss_figure(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    names: tuple[str, str] = ("plain", "tuned"),
) -> Figure | None:
    """Return the curves of the first seed, and the band of all seeds of ``first``. None without finite values.

    Both sides are thinned at the same positions by the mean of adjacent values, so equal curves stay equal.
    """
    lost = [sum(drawable(loss) is None for loss in curves[0]) if curves else 0 for curves in (first, second)]
    every = max(
        1, -(-max((len(curve) for side in (first, second) for curve in side[:1]), default=0) // MAX_POINTS)
    )
    seeds, (other, *_) = (
        [_thinned(curve, every) for curve in first],
        [
            *(_thinned(curve, every) for curve in second),
            Curve(),
        ],
    )
    own = seeds[0] if seeds else Curve()
    length = max(len(own), len(other))
    columns = [[v for v in column if v is not None] for column in zip_longest(*seeds)][:length]
    drawn = [v for curve in (own, other, *columns) for v in curve if v is not None]
    if not drawn:
        return None
    y = with_room(drawn)
    x = Scale(0.5 * (every + 1), max((length - 0.5) * every + 0.5, every + 1))
    where = [i * every + (every + 1) / 2 for i in range(length)]
    ticks = [(t, count(t)) for t, _ in number_ticks(x) if t == int(t)] or [(where[0], count(where[0]))]
    label = f"Loss of {names[0]} and of {names[1]} over {count(length * every)} positions, from {figure(min(drawn))} to {figure(max(drawn))}"
    plot = Plot(label, x, y, ticks, number_ticks(y, 5), axis="position")
    legend = [
        (kind, name) for kind, name, curve in (("plain", names[0], own), ("tuned", names[1], other)) if curve
    ]
    if len(seeds) > 1:
        band = [(at, min(column), max(column)) for at, column in zip(where, columns, strict=False) if column]
        plot.area(band, "plain", f"all {len(seeds)} seeds")
        legend[0] = ("plain", f"{names[0]}; the band holds its {len(seeds)} seeds")
    plot.line(zip(where, own, strict=False), "plain", names[0])
    plot.line(zip(where, other, strict=False), "tuned", names[1])
    remarks = ["Training loss of the first seed, in the order in which the program computed it."]
    if every > 1:
        remarks.append(f"Each point is the mean of {count(every)} losses.")
    apart = [abs(a - b) for a, b in zip(own, other, strict=False) if a is not None and b is not None]
    if apart:
        remarks.append(
            f"The two lines are at most {figure(max(apart), 2)} apart."
            if max(apart)
            else "The two lines coincide."
        )
    remarks += [
        f"{count(number)} losses of {name} are not finite and not shown."
        for name, number in zip(names, lost, strict=True)
        if number
    ]
    return Figure(plot, " ".join(remarks), legend)


def _thinned(curve: Sequence[float], every: int) -> Curve:
    runs = (curve[i : i + every] for i in range(0, len(curve), every))
    finite = ([value for loss in run if (value := drawable(loss)) is not None] for run in runs)
    return [sum(values) / len(values) if values else None for values in finite]
