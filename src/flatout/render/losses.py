"""The chart of two loss curves. A value that is not finite makes a gap and is counted."""

from collections.abc import Sequence
from itertools import zip_longest

from flatout.render.formatting import count, finite, rounded
from flatout.render.page import Figure
from flatout.render.plot import Plot, Scale, number_ticks, padded_scale

MAX_POINTS = 240
Curve = list[float | None]


def loss_figure(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    names: tuple[str, str] = ("plain", "tuned"),
) -> Figure | None:
    """Return the curves of the first seed, and the band of all seeds of ``first``. None without finite values.

    Both sides are thinned at the same positions by the mean of adjacent values, so equal curves stay equal."""
    non_finite = [
        sum(finite(loss) is None for loss in curves[0]) if curves else 0 for curves in (first, second)
    ]
    stride = max(
        1, -(-max((len(curve) for side in (first, second) for curve in side[:1]), default=0) // MAX_POINTS)
    )
    seeds = [_thin(curve, stride) for curve in first]
    curve_a = seeds[0] if seeds else Curve()
    curve_b = _thin(second[0], stride) if second else Curve()
    length = max(len(curve_a), len(curve_b))
    columns = [[v for v in column if v is not None] for column in zip_longest(*seeds)][:length]
    values = [v for curve in (curve_a, curve_b, *columns) for v in curve if v is not None]
    if not values:
        return None
    y = padded_scale(values)
    x = Scale(0.5 * (stride + 1), max((length - 0.5) * stride + 0.5, stride + 1))
    positions = [i * stride + (stride + 1) / 2 for i in range(length)]
    whole = [t for t, _ in number_ticks(x) if t == int(t)]
    ticks = [(t, count(t)) for t in whole or positions[:1]]
    label = f"Loss of {names[0]} and of {names[1]} over {count(length * stride)} positions, from {rounded(min(values))} to {rounded(max(values))}"
    plot = Plot(label, x, y, ticks, number_ticks(y, 5), axis="position")
    curves = (("plain", names[0], curve_a), ("tuned", names[1], curve_b))
    legend = [(kind, name) for kind, name, curve in curves if curve]
    if len(seeds) > 1:
        places = zip(positions, columns, strict=False)
        band = [(position, min(column), max(column)) for position, column in places if column]
        plot.area(band, "plain", f"all {len(seeds)} seeds")
        legend[0] = ("plain", f"{names[0]}; the band holds its {len(seeds)} seeds")
    for kind, name, curve in curves:
        plot.line(zip(positions, curve, strict=False), kind, name)
    remarks = ["Training loss of the first seed, in the order in which the program computed it."]
    if stride > 1:
        remarks.append(f"Each point is the mean of {count(stride)} losses.")
    gaps = [abs(a - b) for a, b in zip(curve_a, curve_b, strict=False) if a is not None and b is not None]
    if gaps:
        apart = f"are at most {rounded(max(gaps), 2)} apart" if max(gaps) else "coincide"
        remarks.append(f"The two lines {apart}.")
    remarks += [
        f"{count(number)} losses of {name} are not finite and not shown."
        for name, number in zip(names, non_finite, strict=True)
        if number
    ]
    return Figure(plot, " ".join(remarks), legend)


def _thin(curve: Sequence[float], stride: int) -> Curve:
    chunks = (curve[i : i + stride] for i in range(0, len(curve), stride))
    chunk_values = ([value for loss in chunk if (value := finite(loss)) is not None] for chunk in chunks)
    return [sum(values) / len(values) if values else None for values in chunk_values]
