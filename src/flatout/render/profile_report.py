"""Render a profile as one page (page.py): findings first, then the data behind them."""

from __future__ import annotations

from typing import Any

from flatout.render import formatting, machine, memory_charts, profile_charts
from flatout.render import profile_summary as story
from flatout.render.page import environment
from flatout.render.parallel_work import parallel_chart
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import LoaderSeen, MemoryGrowth, MemorySeen, Operation, ProfileRecord, SyncRecord
from flatout.schema.records import PHASES

MAX_ROWS = 40  # per table; the rest is in profile.json
MAX_OPERATIONS = 20
LIMITS = ("compute", "memory", "launch", "unknown")
KINDS = {
    Severity.WRONG.value: "wrong",
    Severity.TIME.value: "time",
    Severity.MEMORY.value: "memory",
    Severity.FRAGILE.value: "fragile",
}


def profile_html(profile: ProfileRecord) -> str:
    """Return the page. A profile that failed or is still running gives a shorter page."""
    return (
        environment("report.css", "profile.css").get_template("profile.html.j2").render(**_context(profile))
    )


def _context(profile: ProfileRecord) -> dict[str, Any]:
    cwd, roof = profile.cwd, profile_charts.roofline(profile)
    dots = roof[3] if roof else []
    order = [
        *dots,
        *(o for o in sorted(profile.operations, key=lambda o: -o.share) if all(o is not dot for dot in dots)),
    ]
    return {
        "headline": story.headline(profile),
        "deck": story.deck(profile),
        "because": story.capital(formatting.sentence(profile.bound_why)),
        "failed": profile.status == "failed",
        "command": formatting.shell(profile.command),
        "dateline": [part for part in (formatting.day(profile.created), machine.device(profile)) if part],
        "unit": formatting.one_line(profile.unit, 40),
        "findings": [_finding(finding, cwd) for finding in profile.findings[:MAX_ROWS]],
        "rows": story.rows(profile),
        "bar": profile_charts.phase_bar(profile),
        "parallel": parallel_chart(profile),
        "phases": _phases(profile),
        "what_ifs": profile_charts.what_if_lines(profile.what_ifs),
        "not_measured": story.not_measured(profile.what_ifs),
        "roofline": roof,
        "roofed": bool(profile.ceilings.get("memory_bytes_per_s")),
        "limits": [limit for limit in LIMITS if any((o.limit or "unknown") == limit for o in dots)],
        "operations": [
            _operation(o, cwd, n + 1 if n < len(dots) else None) for n, o in enumerate(order[:MAX_OPERATIONS])
        ],
        "synchronisations": [
            _synchronisation(c, cwd) for c in sorted(profile.synchronisations, key=lambda c: -c.ms)[:MAX_ROWS]
        ],
        "loaders": [_loader(loader, cwd) for loader in profile.loaders[:MAX_ROWS]],
        "memory": _memory(profile.memory, cwd) if profile.memory else None,
        "growth": _growth(profile.leak, profile.unit, cwd) if profile.leak else None,
        "notes": [formatting.sentence(note) for note in profile.notes[:MAX_ROWS]],
        "facts": machine.facts(profile),
        "version": formatting.one_line(profile.flatout, 40),
    }


def _finding(finding: Finding, cwd: str) -> dict[str, Any]:
    return {
        "title": story.title_of(finding),
        "rule": formatting.one_line(finding.rule, 20),
        "severity": formatting.one_line(finding.severity, 40),
        "kind": KINDS.get(finding.severity, "fragile"),
        "said": story.capital(formatting.sentence(finding.said)),
        "gain": story.prediction(finding),
        "how": formatting.one_line(finding.how),
        "place": story.place_of(finding.place, cwd),
        "text": formatting.one_line(finding.place.text, 200) if finding.place else "",
        "evidence": [formatting.one_line(line) for line in finding.evidence[:8]],
        "fix": formatting.legible(finding.fix, 2000).strip("\n"),
        "levers": ", ".join(formatting.one_line(lever, 60) for lever in finding.levers),
    }


def _phases(profile: ProfileRecord) -> list[dict[str, str]]:
    return [
        {
            "name": formatting.one_line(name, 40),
            "kind": name if name in PHASES else "other",
            "median": formatting.milliseconds(time.median_ms),
            "spread": f"{formatting.figure(time.low_ms)}–{formatting.figure(time.high_ms)}",
        }
        for name, time in profile.phases.items()
        if time.share
    ]


def _operation(operation: Operation, cwd: str, number: int | None) -> dict[str, str]:
    ms = operation.device_ms if operation.device_ms is not None else operation.host_ms
    cores = {True: "Tensor Cores", False: "no Tensor Cores", None: ""}[operation.tensor_cores]
    return {
        "name": (f"{number}. " if number is not None else "") + formatting.one_line(operation.name, 80),
        "shapes": formatting.one_line(" ".join([*operation.dtypes[:2], *operation.shapes[:2]]), 160),
        "share": f"{100 * operation.share:.1f} %",
        "ms": formatting.figure(ms),
        "calls": formatting.figure(operation.calls),
        "limit": (formatting.one_line(operation.limit, 20) + profile_charts.reached(operation))
        if operation.limit not in ("", "unknown")
        else "",
        "cores": cores,
        "place": story.place_of(operation.place, cwd),
    }


def _synchronisation(synchronisation: SyncRecord, cwd: str) -> dict[str, str]:
    said = [synchronisation.kind]
    if synchronisation.pinned is not None:
        said.append("pinned" if synchronisation.pinned else "pageable")
    if synchronisation.non_blocking is not None:
        said.append("non-blocking" if synchronisation.non_blocking else "blocking")
    return {
        "place": story.place_of(synchronisation.place, cwd) or "outside your files",
        "text": formatting.one_line(synchronisation.place.text, 160) if synchronisation.place else "",
        "kind": formatting.one_line(", ".join(said), 80),
        "calls": formatting.figure(synchronisation.calls),
        "ms": formatting.figure(synchronisation.ms),
        "size": formatting.size(synchronisation.sized_bytes) if synchronisation.sized_bytes else "",
    }


def _loader(loader: LoaderSeen, cwd: str) -> dict[str, str]:
    asked = [
        f"batches of {formatting.count(loader.batch_size)}" if loader.batch_size else "",
        formatting.several(loader.workers, "worker"),
        "pinned" if loader.pin_memory else "",
        "kept between epochs" if loader.persistent_workers else "",
    ]
    return {
        "place": story.place_of(loader.place, cwd) or "outside your files",
        "dataset": formatting.one_line(loader.dataset, 80),
        "asked": ", ".join(part for part in asked if part),
        "made": formatting.count(loader.made),
        "begun": formatting.count(loader.begun),
        "wait": formatting.figure(loader.wait_ms),
        "fetch": formatting.figure(loader.fetch_ms),
    }


def _memory(memory: MemorySeen, cwd: str) -> dict[str, Any]:
    said = [
        f"The peak of the tensors in a step, {'on the device' if memory.where == 'device' else 'in host memory'}, is {formatting.size(memory.peak_bytes)}"
    ]
    if memory.peak_place:
        said.append(f"reached at {story.place_of(memory.peak_place, cwd)}")
    if memory.reserved_bytes:
        said.append(f"of {formatting.size(memory.reserved_bytes)} reserved")
    return {
        "said": formatting.sentence(", ".join(said)),
        "bar": memory_charts.peak_bar(memory),
        "kinds": list(memory_charts.kinds_present(memory)),
        "areas": memory_charts.memory_areas(memory),
        "modules": [
            (formatting.one_line(name, 120), formatting.size(amount))
            for name, amount in sorted(memory.by_module.items(), key=lambda m: -m[1])[:12]
        ],
    }


def _growth(leak: MemoryGrowth, unit: str, cwd: str) -> dict[str, Any]:
    if leak.leaking:
        held = f", held by {leak.holder}" if leak.holder else ""
        where = f", added at {story.place_of(leak.place, cwd)}" if leak.place else ""
        said = f"{formatting.size(leak.bytes_a_step)} more after each {unit}{held}{where}"
    else:
        said = f"No: the trend over {formatting.several(leak.steps or len(leak.series), 'step')} is not significant"
    return {
        "leaking": leak.leaking,
        "said": formatting.sentence(said),
        "line": memory_charts.growth_line(leak),
    }
