"""Helpers for rules that check a profile: is a gain measured and large enough, what would fewer calls save.

A gain below MIN_GAIN is too small for a finding. A gain whose interval includes 1 is within the noise and gives
no finding either.
"""

from typing import Any

from flatout.diagnose.bottleneck import WHAT_IF_TEXTS
from flatout.schema.findings import SourceLocation
from flatout.schema.profile import ProfileRecord, SyncRecord
from flatout.schema.records import Ratio

MIN_GAIN = 1.05
OUTLIER_RATIO = 1.1  # of mean to median step: above it, a step is called a mean one
MIN_REPEATS = 3  # calls at one line that count as repeated
HOW_BY_TIME = "the step without these calls, by their own time"  # wait_causes.py replaces "these calls"


def certain_gain(profile: ProfileRecord, name: str) -> Ratio | None:
    """The speed-up under this what-if; None if it was not measured, is noise, or is below MIN_GAIN."""
    ratio = next((w.ratio for w in profile.what_ifs if w.name == name), None)
    return ratio if ratio is not None and ratio.significant and ratio.median >= MIN_GAIN else None


def was_measured(profile: ProfileRecord, name: str) -> bool:
    return any(w.name == name and w.ratio is not None for w in profile.what_ifs)


def how_by_what_if(name: str) -> str:
    return f"what-if: {WHAT_IF_TEXTS.get(name, name)}"


def speedup_without(profile: ProfileRecord, ms: float | None, min_gain: float = MIN_GAIN) -> Ratio | None:
    """The speed-up without calls of ``ms``, if it reaches ``min_gain``.

    Their time is measured; that nothing else would wait instead is not."""
    step = profile.step_with_ms(ms or 0.0)
    if not ms or not step or ms <= 0:
        return None
    ratio = step / max(step - ms, 0.05 * step)
    return Ratio(ratio, ratio, ratio, max(1, profile.steps)) if ratio >= min_gain else None


def event_of(profile: ProfileRecord, name: str) -> tuple[float, float, list[SourceLocation]]:
    """Calls per step, milliseconds per step and places of an event; zeros if there were none."""
    event: Any = profile.events.get(name) or {}
    places = [
        SourceLocation.from_json(place) if isinstance(place, dict) else place
        for place in event.get("places", ())
    ]
    return float(event.get("calls") or 0), float(event.get("ms") or 0), places


def note_of(profile: ProfileRecord, name: str) -> str:
    """What was noted of an event's calls; "" if there were none."""
    return str((profile.events.get(name) or {}).get("note", ""))


def calls_at_busiest_line(profile: ProfileRecord, name: str) -> int:
    return int((profile.events.get(name) or {}).get("most") or 0)


def synchronisations(profile: ProfileRecord, *kinds: str) -> list[SyncRecord]:
    """The device synchronisations of these kinds, the most expensive first."""
    return sorted((c for c in profile.synchronisations if c.kind in kinds), key=lambda c: -c.ms)


def format_ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{1000 * ms:.0f} us"


def share_of_step(profile: ProfileRecord, ms: float) -> str:
    """``3.1 ms of a step of 9.8 ms (32 %)``; the step is the mean one, of which parts are shares."""
    step = profile.step_with_ms(ms)
    if not step:
        return format_ms(ms)
    mean = "mean " if profile.step_ms and step > OUTLIER_RATIO * profile.step_ms else ""
    return f"{format_ms(ms)} of a {mean}{profile.unit} of {format_ms(step)} ({100 * ms / step:.0f} %)"
