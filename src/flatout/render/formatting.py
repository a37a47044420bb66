"""Format values for users: numbers with units, and untrusted text made safe.

Every function accepts any value that a record can hold: None, NaN, infinity, or text in place of a number.
A missing value becomes ``NOTHING``, never an invented zero.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.job.sanitize import sanitize
from flatout.schema import sizes
from flatout.schema.plan import format_choice

MISSING = "–"
TEXT_LIMIT = 600


def safe_text(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return untrusted text without control characters, cut to ``limit``.

    Line breaks and tabs stay. The caller still has to escape markup."""
    text = value if isinstance(value, str) else str(value)
    cut = text if len(text) <= limit else text[: limit - 2].rstrip() + " …"
    return sanitize(cut)


def one_line(value: object, limit: int = TEXT_LIMIT) -> str:
    return " ".join(safe_text(value, limit).split())


def sentence(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return one line that ends with a full stop. The first letter keeps its case: it may start a name."""
    text = one_line(value, limit)
    return text + ("." if text and text[-1] not in ".!?…:" else "")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def finite(value: object) -> float | None:
    """Return the value as a finite float that is safe to print and plot, or None.

    Magnitudes of 1e30 and more come from a diverged run and give None. Magnitudes below 1e-30 become zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number) or abs(number) >= 1e30:
        return None
    return number if abs(number) >= 1e-30 else 0.0


def is_positive(value: object) -> bool:
    number = finite(value)
    return number is not None and number > 1e-9


def rounded(value: object, digits: int = 3) -> str:
    """Format a number without a unit, with ``digits`` significant digits."""
    number = finite(value)
    if number is None:
        return MISSING
    if number != 0 and not 1e-3 <= abs(number) < 1e6:
        return f"{number:.{digits}g}"
    before_point = math.floor(math.log10(abs(number))) + 1 if number else digits
    return f"{number:,.{max(0, digits - before_point)}f}"


def factor(ratio: object) -> str:
    """Format a ratio: ``1.31x``."""
    number = finite(ratio)
    if number is None:
        return MISSING
    if number >= 100:
        return f"{number:,.0f}x"
    return f"{number:.1f}x" if number >= 10 else f"{number:.2f}x"


def interval(low: object, high: object) -> str:
    """Format an interval of ratios: ``1.28–1.35``, or "" if an end is missing."""
    if finite(low) is None or finite(high) is None:
        return ""
    return f"{factor(low)[:-1]}–{factor(high)[:-1]}"


def milliseconds(value: object) -> str:
    """Format milliseconds. What is below a nanosecond is rounding of sums, so it is zero."""
    number = finite(value)
    return MISSING if number is None else f"{rounded(number if abs(number) >= 1e-6 else 0)} ms"


def per_second(value: object) -> str:
    return MISSING if finite(value) is None else f"{rounded(value)} samples/s"


def duration(seconds: object) -> str:
    """Format a duration: ``9.1 s`` · ``4 min 20 s`` · ``1 h 03 min``."""
    number = finite(seconds)
    if number is None:
        return MISSING
    if number < 1:
        return milliseconds(number * 1000)
    if round(number) < 60:
        return f"{number:.1f} s" if number < 10 else f"{number:.0f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def size(count_bytes: object) -> str:
    number = finite(count_bytes)
    return MISSING if number is None else sizes.size(number)


def count(value: object) -> str:
    number = finite(value)
    return MISSING if number is None else f"{round(number):,}"


def plural(value: object, noun: str) -> str:
    """Format a count with its noun: ``1 step`` · ``3 steps``."""
    return f"{count(value)} {noun}" + ("" if finite(value) == 1 else "es" if noun.endswith("s") else "s")


def day(created: str) -> str:
    """Format an ISO 8601 time as ``2026-11-21 06:26 UTC``. Other text is returned unchanged."""
    found = re.match(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)", created)
    return f"{found[1]} {found[2]} UTC" if found else one_line(created, 40)


def lever(name: object, value: Any) -> str:
    """Format a lever with its value: ``channels_last`` · ``loader(workers=2)``."""
    return one_line(name, 80) if value is None else one_line(format_choice(str(name), value), 160)


def setting(value: object) -> str:
    """Format a lever's value alone: ``on`` · ``1`` · ``workers=2, pin=True``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return MISSING
    if isinstance(value, dict):
        return one_line(", ".join(f"{k}={v}" for k, v in value.items()), 160)
    return one_line(value, 160)


def shell(command: Sequence[object]) -> str:
    """Quote a command for the shell, on one line."""
    return safe_text(shlex.join(map(str, command)), 2000).replace("\n", "'$'\\n''")


def on_device(machine: Mapping[str, object]) -> list[str]:
    """Return the ``--device`` option of a record, or [] if none was given."""
    return ["--device", str(machine["device"])] if machine.get("device") else []


def short(value: object) -> str:
    """Format a number with up to three significant digits: ``0.00024`` · ``1`` · ``812``."""
    number = finite(value)
    return MISSING if number is None else f"{number:.3g}"


def signed(difference: float, digits: int) -> str:
    """Format a signed number with a typographic minus: ``−41.0`` · ``+3.2`` · ``0.0``."""
    text = f"{abs(difference):,.{digits}f}"
    if not text.strip("0.,"):
        return text
    return ("−" if difference < 0 else "+") + text
