"""Helpers for rules that judge a profile: is a gain measured and large enough, what would fewer calls save.

A gain below WORTH is too small for a finding. A gain whose interval includes 1 is within the noise and gives
no finding either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.profile import ProfileRecord, SyncRecord
from flatout.schema.records import Ratio

if TYPE_CHECKING:
    from flatout.diagnose.rule import Rule

WORTH = 1.05
NOTABLE = 1.1  # from here on the mean step is not the typical one, and is called so
OFTEN = 3  # times at one line that count as repeated
BOUND = {
    "loader": "cached batches, without the loader",
    "copies": "batches on the device already",
    "optimizer": "an optimizer that does nothing",
    "syncs": "without waiting for values",
    "logging": "without printing and logging",
    "gc": "with the garbage collector off",
    "one thread fewer": "with one thread fewer",
    "one thread more": "with one thread more",
}
TIMED = "the step without these calls, by their own time"  # wait_causes.py replaces "these calls"


def certain_gain(profile: ProfileRecord, name: str) -> Ratio | None:
    """The speed-up under this what-if; None if it was not measured, is noise, or is below WORTH."""
    ratio = next((w.ratio for w in profile.what_ifs if w.name == name), None)
    return ratio if ratio is not None and ratio.significant and ratio.median >= WORTH else None


def measured(profile: ProfileRecord, name: str) -> bool:
    return any(w.name == name and w.ratio is not None for w in profile.what_ifs)


def how(name: str) -> str:
    return f"what-if: {BOUND.get(name, name)}"


def without(profile: ProfileRecord, ms: float | None, least: float = WORTH) -> Ratio | None:
    """The speed-up without calls of ``ms``, if it reaches ``least``.

    Their time is measured; that nothing else would wait instead is not.
    """
    step = profile.step_with_ms(ms or 0.0)
    if not ms or not step or ms <= 0:
        return None
    ratio = step / max(step - ms, 0.05 * step)
    return Ratio(ratio, ratio, ratio, max(1, profile.steps)) if ratio >= least else None


def found(
    rule: Rule,
    said: str,
    place: SourceLocation | None = None,
    *,
    evidence: Iterable[str] = (),
    fix: str = "",
    predicted: Ratio | None = None,
    how: str = "",
    others: Sequence[SourceLocation] = (),
    levers: Sequence[str] | None = None,
) -> Finding:
    return Finding(
        rule.code,
        rule.name,
        rule.severity.value,
        said,
        place,
        list(evidence),
        fix or _unwrapped(rule.section("How to fix it")),
        list(rule.levers if levers is None else levers),
        predicted,
        how if predicted else "",
        list(others),
    )


def _unwrapped(text: str) -> str:
    """Joins prose into one line; a command keeps its own line."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not line.startswith("flatout ") and not lines[-1].startswith("flatout "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


def event_of(profile: ProfileRecord, name: str) -> tuple[float, float, list[SourceLocation]]:
    """Calls per step, milliseconds per step and places of an event; zeros if there were none."""
    seen: Any = profile.events.get(name) or {}
    places = [
        SourceLocation.from_json(place) if isinstance(place, dict) else place
        for place in seen.get("places", ())
    ]
    return float(seen.get("calls") or 0), float(seen.get("ms") or 0), places


def times_at_one_place(profile: ProfileRecord, name: str) -> int:
    """The count at the busiest line, over the whole run."""
    return int((profile.events.get(name) or {}).get("most") or 0)


def synchronisations(profile: ProfileRecord, *kinds: str) -> list[SyncRecord]:
    """The device synchronisations of these kinds, the most expensive first."""
    return sorted((c for c in profile.synchronisations if c.kind in kinds), key=lambda c: -c.ms)


def said_ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{1000 * ms:.0f} us"


def of_step(profile: ProfileRecord, ms: float) -> str:
    """``3.1 ms of a step of 9.8 ms (32 %)``; the step is the mean one, of which parts are shares."""
    step = profile.step_with_ms(ms)
    if not step:
        return said_ms(ms)
    mean = "mean " if profile.step_ms and step > NOTABLE * profile.step_ms else ""
    return f"{said_ms(ms)} of a {mean}{profile.unit} of {said_ms(step)} ({100 * ms / step:.0f} %)"
