"""Elements of HTML and SVG, the scales of charts, and their ticks.

`element` cleans and escapes every text of a page, so nothing else has to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from flatout.render.formatting import safe_text, size

MARGIN = 0.08  # margin around the outermost values, as a share of the span
MAX_CHARACTERS = 4000  # of a text
Ticks = Sequence[tuple[float, str]]  # value and label


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return one element. Text is cleaned and escaped unless it is Markup; None leaves an attribute out.

    Underscores in attribute names become hyphens; ``class_`` becomes ``class``.
    """
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute_text(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, Markup("").join(map(clean, children)))


def clean(text: str) -> Markup:
    """Return a text that is safe in a page. The home folder becomes ``~``: pages are shared."""
    if isinstance(text, Markup):
        return text
    home = os.path.expanduser("~").rstrip("/")
    safe = safe_text(text, MAX_CHARACTERS)
    return escape(safe.replace(f"{home}/", "~/") if home.startswith("/") else safe)


def _attribute_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return safe_text(value, limit=1_000_000)  # a path is long


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + "%"


@dataclass(frozen=True)
class Scale:
    """Map a value to a position between 0 and 1. Values outside the range are clamped."""

    low: float
    high: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            if value <= 0:
                return 0.0
            position = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            # Halved, because the difference of two large numbers of opposite sign may overflow.
            span = self.high / 2 - self.low / 2
            position = (value / 2 - self.low / 2) / span if span > 0 else 0.5
        return min(1.0, max(0.0, position))


def padded_scale(values: Sequence[float]) -> Scale:
    """Return a scale with a margin around the outermost values."""
    low, high = min(values), max(values)
    margin = MARGIN * 2 * (high / 2 - low / 2) or abs(high) * MARGIN or 1.0
    return Scale(low - margin, high + margin)


def ratio_scale(ratios: Sequence[float]) -> Scale:
    """Return a logarithmic scale, on which twice as fast and half as fast are equally far from 1."""
    low, high = min([*ratios, 1 / 1.05]), max([*ratios, 1.05])
    margin = (high / low) ** 0.06
    return Scale(low / margin, high * margin, logarithmic=True)


# fmt: off
_RATIOS = (1, 2, 0.5, 1.5, 0.75, 1.25, 1.1, 0.9, 4, 0.25, 10, 0.1, 100, 0.01, 3, 1.05, 0.95, 6, 20, 50, 1.02, 0.98)
# fmt: on


def ratio_ticks(scale: Scale, gap: float = 0.12) -> list[float]:
    """Return round ratios for ticks, at least ``apart`` of the width from each other."""
    chosen: list[float] = []
    for tick in _RATIOS:
        if 0.03 < scale(tick) < 0.97 and all(abs(scale(tick) - scale(other)) >= gap for other in chosen):
            chosen.append(tick)
    return sorted(chosen)


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    target = high / count - low / count
    if not target > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(target))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= target * 0.99), 10 * power)
    first = math.ceil(low / step - 1e-9)
    ticks = [(first + i) * step for i in range(3 * count)]
    return [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks if tick <= high + step * 1e-9] or [low]


def powers(scale: Scale) -> list[float]:
    """Return powers of ten on a logarithmic scale, at most about six."""
    first, last = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]


def number_ticks(scale: Scale, count: int = 4, unit: str = "") -> Ticks:
    """Return round numbers with as many decimals as tell them apart."""
    ticks = [tick for tick in round_ticks(scale.low, scale.high, count) if 0.01 < scale(tick) < 0.97]
    digits = next((d for d in range(8) if len({f"{tick:.{d}f}" for tick in ticks}) == len(ticks)), 8)
    return [
        (tick, (f"{tick:,.{digits}f}" if abs(tick) < 1e5 else f"{tick:.3g}").replace("-", "−") + unit)
        for tick in ticks
    ]


def byte_ticks(scale: Scale, count: int = 4) -> Ticks:
    """Return round amounts of memory."""
    unit = 1024.0 ** next((power for power in (3, 2, 1) if scale.high >= 1024**power), 0)
    ticks = (tick * unit for tick in round_ticks(scale.low / unit, scale.high / unit, count))
    return [(tick, size(tick)) for tick in ticks if 0.01 < scale(tick) < 0.97]
