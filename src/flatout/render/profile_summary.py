"""Summary of a profile in sentences: the headline, the cause of the step time, and the findings."""

from __future__ import annotations

from dataclasses import replace

from flatout.render.formatting import (
    drawable,
    figure,
    milliseconds,
    one_line,
    per_second,
    sentence,
    several,
    times,
)
from flatout.render.summary import spelled
from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.profile import ProfileRecord, WhatIf

BOUNDS = {
    "data": "it waits for data",
    "python": "Python limits it",
    "launch": "launch overhead limits it",
    "copy": "copies to the device limit it",
    "memory": "memory bandwidth limits it",
    "compute": "arithmetic limits it",
    "optimizer": "the optimizer limits it",
}


def headline(profile: ProfileRecord) -> str:
    if profile.status == "failed":
        return "The program could not be profiled"
    if drawable(profile.step_ms) is None:
        return "Nothing was measured yet"
    why = BOUNDS.get(profile.bound)
    return f"A {profile.unit} takes {milliseconds(profile.step_ms)}" + (f": {why}" if why else "")


def deck(profile: ProfileRecord) -> str:
    """Return the findings in one sentence."""
    if profile.status == "failed":
        return one_line(profile.message)
    if drawable(profile.step_ms) is None:
        return ""
    if not profile.findings:
        return "Nothing worth changing by hand. `flatout tune` looks for optimisations that need no code changes."
    best = max(
        (f.predicted for f in profile.findings if f.predicted), key=lambda ratio: ratio.median, default=None
    )
    gain = f"; the largest could make a {profile.unit} up to {times(best.median)} as fast" if best else ""
    return f"{several(len(profile.findings), 'finding')}{gain}."


def rows(profile: ProfileRecord) -> list[tuple[str, str]]:
    """Return (name, text) rows of the measured figures."""
    found = [
        (f"{profile.unit}", milliseconds(profile.step_ms)),
        ("samples", per_second(profile.samples_per_s)),
        (
            "measured",
            several(profile.steps, "step") + f" after {profile.warmup_steps} of warm-up"
            if profile.steps
            else "",
        ),
        ("first step", milliseconds(profile.first_step_ms)),
        ("of the peak FLOPs", "" if profile.mfu is None else f"{100 * profile.mfu:.1f} %"),
        ("operators a step", figure(profile.operators_a_step)),
        ("device idle", milliseconds(profile.idle_ms)),
        ("garbage collection", milliseconds(profile.gc_ms) if profile.gc_ms else ""),
        (
            "profiling overhead",
            "" if profile.overhead is None else f"{times(profile.overhead.median)} the {profile.unit}",
        ),
    ]
    return [(name, text) for name, text in found if text and text != "–"]


def prediction(finding: Finding) -> str:
    """Return ``up to 1.80x (1.60-2.00) predicted, 1.72x measured``, or "" if both are missing."""
    said = []
    if finding.predicted is not None:
        said.append(f"up to {spelled(finding.predicted)} predicted")
    if finding.measured is not None:
        said.append(f"{spelled(finding.measured)} measured")
    return ", ".join(said)


def title_of(finding: Finding) -> str:
    return capital(one_line(finding.name, 80).replace("_", " "))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def place_of(place: SourceLocation | None, cwd: str = "") -> str:
    """Return the place as text. Paths inside the program's folder are shown relative to it."""
    if place is None:
        return ""
    return one_line(replace(place, file=place.file.removeprefix(cwd.rstrip("/") + "/")).sentence(), 300)


def not_measured(what_ifs: list[WhatIf]) -> list[str]:
    return [
        f"{one_line(w.name, 40)}: {sentence(w.why_not)}" for w in what_ifs if w.ratio is None and w.why_not
    ]
