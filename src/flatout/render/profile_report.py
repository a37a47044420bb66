"""Render a profile as one page (page.py): findings first, then the data behind them."""

from __future__ import annotations

from typing import Any

from flatout.plan.findings import Finding, Severity
from flatout.plan.profile import Crossing, Leak, LoaderSeen, MemorySeen, Operation, ProfileRecord
from flatout.plan.records import PHASES
from flatout.render import machine, profile_pictures, wording
from flatout.render import profile_story as story
from flatout.render.page import environment

MAX_ROWS = 40  # per table; the rest is in profile.json
MAX_OPERATIONS = 20
LIMITS = ("compute", "memory", "launch", "unknown")
KINDS = {Severity.WRONG.value: "wrong", Severity.TIME.value: "time", Severity.MEMORY.value: "memory", Severity.FRAGILE.value: "fragile"}


def profile_html(profile: ProfileRecord) -> str:
    """Return the page. A profile that failed or is still running gives a shorter page."""
    return environment("report.css", "profile.css").get_template("profile.html.j2").render(**_context(profile))


def _context(profile: ProfileRecord) -> dict[str, Any]:
    cwd, roof = profile.cwd, profile_pictures.roofline(profile)
    dots = roof[3] if roof else []
    order = [*dots, *(o for o in sorted(profile.operations, key=lambda o: -o.share) if all(o is not dot for dot in dots))]
    return {
        "headline": story.headline(profile),
        "deck": story.deck(profile),
        "because": story.capital(wording.sentence(profile.bound_why)),
        "failed": profile.status == "failed",
        "command": wording.shell(profile.command),
        "dateline": [part for part in (wording.day(profile.created), machine.device(profile)) if part],
        "unit": wording.one_line(profile.unit, 40),
        "findings": [_finding(finding, cwd) for finding in profile.findings[:MAX_ROWS]],
        "rows": story.rows(profile),
        "bar": profile_pictures.phase_bar(profile),
        "phases": _phases(profile),
        "what_ifs": profile_pictures.what_if_lines(profile.what_ifs),
        "not_measured": story.not_measured(profile.what_ifs),
        "roofline": roof,
        "roofed": bool(profile.ceilings.get("memory_bytes_per_s")),
        "limits": [limit for limit in LIMITS if any((o.limit or "unknown") == limit for o in dots)],
        "operations": [_operation(o, cwd, n + 1 if n < len(dots) else None) for n, o in enumerate(order[:MAX_OPERATIONS])],
        "crossings": [_crossing(c, cwd) for c in sorted(profile.crossings, key=lambda c: -c.ms)[:MAX_ROWS]],
        "loaders": [_loader(loader, cwd) for loader in profile.loaders[:MAX_ROWS]],
        "memory": _memory(profile.memory, cwd) if profile.memory else None,
        "growth": _growth(profile.leak, profile.unit, cwd) if profile.leak else None,
        "notes": [wording.sentence(note) for note in profile.notes[:MAX_ROWS]],
        "facts": machine.facts(profile),
        "version": wording.one_line(profile.flatout, 40),
    }


def _finding(finding: Finding, cwd: str) -> dict[str, Any]:
    return {
        "title": story.title_of(finding),
        "rule": wording.one_line(finding.rule, 20),
        "severity": wording.one_line(finding.severity, 40),
        "kind": KINDS.get(finding.severity, "fragile"),
        "said": story.capital(wording.sentence(finding.said)),
        "gain": story.prediction(finding),
        "how": wording.one_line(finding.how),
        "place": story.place_of(finding.place, cwd),
        "text": wording.one_line(finding.place.text, 200) if finding.place else "",
        "evidence": [wording.one_line(line) for line in finding.evidence[:8]],
        "mend": wording.legible(finding.mend, 2000).strip("\n"),
        "levers": ", ".join(wording.one_line(lever, 60) for lever in finding.levers),
    }


def _phases(profile: ProfileRecord) -> list[dict[str, str]]:
    return [{"name": wording.one_line(name, 40), "kind": name if name in PHASES else "other", "median": wording.milliseconds(time.median_ms),
             "spread": f"{wording.figure(time.low_ms)}–{wording.figure(time.high_ms)}"} for name, time in profile.phases.items() if time.share]


def _operation(operation: Operation, cwd: str, number: int | None) -> dict[str, str]:
    ms = operation.device_ms if operation.device_ms is not None else operation.host_ms
    reached = f", {100 * operation.roofline:.0f} % of the roof" if operation.roofline is not None else ""
    cores = {True: "Tensor Cores", False: "no Tensor Cores", None: ""}[operation.tensor_cores]
    return {
        "name": (f"{number}. " if number is not None else "") + wording.one_line(operation.name, 80),
        "shapes": wording.one_line(" ".join([*operation.dtypes[:2], *operation.shapes[:2]]), 160),
        "share": f"{100 * operation.share:.1f} %",
        "ms": wording.figure(ms),
        "calls": wording.figure(operation.calls),
        "limit": (wording.one_line(operation.limit, 20) + reached) if operation.limit not in ("", "unknown") else "",
        "cores": cores,
        "place": story.place_of(operation.place, cwd),
    }


def _crossing(crossing: Crossing, cwd: str) -> dict[str, str]:
    said = [crossing.kind]
    if crossing.pinned is not None:
        said.append("pinned" if crossing.pinned else "pageable")
    if crossing.non_blocking is not None:
        said.append("non-blocking" if crossing.non_blocking else "blocking")
    return {
        "place": story.place_of(crossing.place, cwd) or "outside your files",
        "text": wording.one_line(crossing.place.text, 160) if crossing.place else "",
        "kind": wording.one_line(", ".join(said), 80),
        "calls": wording.figure(crossing.calls),
        "ms": wording.figure(crossing.ms),
        "size": wording.size(crossing.sized_bytes) if crossing.sized_bytes else "",
    }


def _loader(loader: LoaderSeen, cwd: str) -> dict[str, str]:
    asked = [f"batches of {wording.count(loader.batch_size)}" if loader.batch_size else "", wording.several(loader.workers, "worker"),
             "pinned" if loader.pin_memory else "", "kept between epochs" if loader.persistent_workers else ""]
    return {
        "place": story.place_of(loader.place, cwd) or "outside your files",
        "dataset": wording.one_line(loader.dataset, 80),
        "asked": ", ".join(part for part in asked if part),
        "made": wording.count(loader.made),
        "begun": wording.count(loader.begun),
        "wait": wording.figure(loader.wait_ms),
        "fetch": wording.figure(loader.fetch_ms),
    }


def _memory(memory: MemorySeen, cwd: str) -> dict[str, Any]:
    said = [f"The peak of the {'device' if memory.where == 'device' else 'tensors in host memory'} is {wording.size(memory.peak_bytes)}"]
    if memory.peak_place:
        said.append(f"reached at {story.place_of(memory.peak_place, cwd)}")
    if memory.reserved_bytes:
        said.append(f"of {wording.size(memory.reserved_bytes)} reserved")
    return {
        "said": wording.sentence(", ".join(said)),
        "bar": profile_pictures.peak_bar(memory),
        "kinds": list(profile_pictures.kinds_present(memory)),
        "areas": profile_pictures.memory_areas(memory),
        "modules": [(wording.one_line(name, 120), wording.size(amount)) for name, amount in sorted(memory.by_module.items(), key=lambda m: -m[1])[:12]],
    }


def _growth(leak: Leak, unit: str, cwd: str) -> dict[str, Any]:
    if leak.leaking:
        held = f", held by {leak.holder}" if leak.holder else ""
        where = f", added at {story.place_of(leak.place, cwd)}" if leak.place else ""
        said = f"{wording.size(leak.bytes_a_step)} more after each {unit}{held}{where}"
    else:
        said = f"No: the trend over {wording.several(leak.steps or len(leak.series), 'step')} is not significant"
    return {"leaking": leak.leaking, "said": wording.sentence(said), "line": profile_pictures.growth_line(leak)}
