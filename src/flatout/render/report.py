"""Render a session as one self-contained page (page.py).

Every value is escaped by jinja2's autoescape or by ``svg.element``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flatout.plan.records import PHASES, Contest, GuardCheck, LeverRecord, NamedRecord, SessionRecord
from flatout.plan.words import Status
from flatout.render import machine, pictures, ranks_story, story, wording
from flatout.render.curves import loss_curves, remarks
from flatout.render.frontier import frontier_plot
from flatout.render.page import environment
from flatout.render.svg import Scale, ratio_scale

MAX_ROWS = 150  # per table; the rest is in session.json

EFFECTS = {
    "exact": "The results stay the same, bit for bit.",
    "rounding": "The same maths with different rounding, in the same number format.",
    "precision": "The same maths, with products or communication in half precision.",
    "resampled": "The same distribution, different random draws.",
    "changes_math": "Changes the maths.",
}
HOW = {"live": "switched live", "processes": "interleaved processes", "fresh pairs": "fresh pairs"}


def report_html(session: SessionRecord) -> str:
    """Return the page. A session that failed or is still running gives a shorter page."""
    return environment("report.css").get_template("report.html.j2").render(**_context(session))


def _context(session: SessionRecord) -> dict[str, Any]:
    baseline, best = story.parts(session.baseline), story.parts(story.tuned_side(session))
    ordered = story.levers_in_order(session)
    curves = loss_curves(session.guard.plain_losses, session.guard.tuned_losses)
    rows = story.before_after(session)
    return {
        "headline": story.headline(session),
        "outcome": story.outcome(session),
        "message": story.message(session),
        "details": story.details(session),
        "command": wording.shell(session.command),
        "dateline": [part for part in (wording.day(session.created), machine.device(session)) if part],
        "rows": rows,
        "both": story.both_sides(rows),
        "next": story.next_step(session),
        "bars": pictures.step_bars(baseline, best),
        "sides": [name for name, shown in (("plain", baseline), ("tuned", best)) if shown],
        "phases": _phase_rows(baseline, best),
        "ranks": _ranks(session),
        "unit": wording.one_line(session.baseline.unit or "step", 40),
        "forest": _forest(session, ordered),
        "frontier": frontier_plot(session),
        "points": story.frontier_rows(session),
        "limit": wording.size(session.memory_limit_bytes) if session.memory_limit_bytes else "",
        "levers": [_lever_row(lever) for lever in ordered[:MAX_ROWS]],
        "more_levers": max(0, len(ordered) - MAX_ROWS),
        "predictions": story.predicted_and_measured(session)[:MAX_ROWS],
        "guard": session.guard,
        "guard_words": story.guard_sentence(session.guard),
        "checks": [_check_row(check) for check in session.guard.checks[:MAX_ROWS]],
        "plot": pictures.loss_plot(curves) if curves else None,
        "seeds": curves.seeds if curves else 0,
        "seed": session.guard.seeds[0] if session.guard.seeds else None,
        "remarks": remarks(session.guard, curves) if curves else [],
        "named": [_named(each) for each in session.named[:MAX_ROWS]],
        "payback": story.payback_sentence(session),
        "contests": [_contest_row(contest) for contest in session.contests[:MAX_ROWS]],
        "more_contests": max(0, len(session.contests) - MAX_ROWS),
        "effort": story.effort(session),
        "noise": story.noise(session),
        "other_programs": story.other_programs(session),
        "effects": ", ".join(wording.one_line(effect, 40).replace("_", " ") for effect in session.effects),
        "facts": machine.facts(session),
        "version": wording.one_line(session.flatout, 40),
    }


def _named(each: NamedRecord) -> dict[str, Any]:
    curves = loss_curves([each.plain_losses], [each.losses])
    return {"plan": wording.one_line(each.plan, 200), "summary": story.named_sentence(each), "plot": pictures.loss_plot(curves) if curves else None}


def _ranks(session: SessionRecord) -> dict[str, Any] | None:
    found = session.ranks
    if found is None:
        return None
    return {"summary": ranks_story.summary(session), "bars": ranks_story.rank_bars(found), "rows": ranks_story.rows(found),
            "remarks": ranks_story.remarks(found)}


def _phase_rows(plain: Iterable[story.Part], tuned: Iterable[story.Part]) -> list[dict[str, str]]:
    """Return one row per phase, with the same number of decimals. Phases that took no time are left out."""
    before, after = {p.phase: p for p in plain}, {p.phase: p for p in tuned}
    medians = [p.median_ms for p in (*before.values(), *after.values()) if p.median_ms is not None]
    decimals = wording.decimals(max(medians, default=0.0))
    rows = []
    for phase in dict.fromkeys([*before, *after]):
        a, b = before.get(phase), after.get(phase)
        if not any(part and (part.ms or part.median_ms) for part in (a, b)):
            continue
        change = wording.signed(b.median_ms - a.median_ms, decimals) if a and b and a.median_ms is not None and b.median_ms is not None else ""
        kind = phase if phase in PHASES else "other"
        rows.append({"phase": phase, "kind": kind, "plain": _median(a, decimals), "plain_spread": _quartiles(a, decimals),
                     "tuned": _median(b, decimals), "tuned_spread": _quartiles(b, decimals), "change": change})
    return rows


def _median(part: story.Part | None, decimals: int) -> str:
    return wording.NOTHING if part is None or part.median_ms is None else f"{part.median_ms:,.{decimals}f}"


def _quartiles(part: story.Part | None, decimals: int) -> str:
    if part is None or part.low_ms is None or part.high_ms is None:
        return ""
    return f"{part.low_ms:,.{decimals}f}–{part.high_ms:,.{decimals}f}"


@dataclass(frozen=True)
class ForestLine:
    name: str
    row: Markup
    ratio: str
    interval: str
    status: str


def _forest(session: SessionRecord, ordered: list[LeverRecord]) -> dict[str, Any] | None:
    """Return the forest plot of the measured levers, with the whole plan last. None without data."""
    shown = [lever for lever in ordered if _positive(lever.ratio)][:40]
    total = session.speedup if session.speedup and _positive(session.speedup.median) else None
    if not shown:
        return None
    floor = session.noise_floor
    band = [v for v in (floor.low, floor.high) if _positive(v)] if floor else []
    ratios = [v for lever in shown for v in (lever.ratio, lever.low, lever.high)] + ([total.median, total.low, total.high] if total else []) + band
    scale = ratio_scale([v for v in ratios if v is not None and _positive(v)])
    pair = (band[0], band[1]) if len(band) == 2 else None
    lines = [_forest_line(scale, lever, pair) for lever in shown]
    if total:
        drawn = pictures.forest_row(scale, "all together", total.median, wording.drawable(total.low), wording.drawable(total.high), True, pair, total=True)
        lines.append(ForestLine("all together", drawn, wording.times(total.median), wording.interval(total.low, total.high), "total"))
    return {"lines": lines, "axis": pictures.forest_axis(scale), "floor": pair is not None}


def _forest_line(scale: Scale, lever: LeverRecord, floor: tuple[float, float] | None) -> ForestLine:
    name, kept = wording.lever(lever.name, lever.value), lever.status == Status.APPLIED
    row = pictures.forest_row(scale, name, float(lever.ratio or 1), wording.drawable(lever.low), wording.drawable(lever.high), kept, floor)
    return ForestLine(name, row, wording.times(lever.ratio), wording.interval(lever.low, lever.high), wording.one_line(lever.status, 20))


def _positive(value: object) -> bool:
    number = wording.drawable(value)
    return number is not None and number > 1e-9


def _lever_row(lever: LeverRecord) -> dict[str, str]:
    measured = story.with_interval(lever.ratio, lever.low, lever.high, lever.n) if wording.drawable(lever.ratio) is not None else ""
    return {
        "name": wording.one_line(lever.name, 80),
        "value": "" if lever.value is None else wording.setting(lever.value),
        "status": wording.one_line(lever.status, 20),
        "ratio": measured,
        "how": HOW.get(lever.how, wording.one_line(lever.how, 60)) if wording.drawable(lever.ratio) is not None else "",
        "reason": story.because(lever),
        "effect": EFFECTS.get(lever.effect, wording.one_line(lever.effect, 60)) if lever.status != Status.SKIPPED else "",
    }


def _check_row(check: GuardCheck) -> dict[str, Any]:
    return {
        "name": wording.one_line(check.name, 120),
        "passed": bool(check.passed),
        "value": wording.short(check.value),
        "limit": wording.short(check.limit),
        "why": wording.one_line(check.why),
    }


def _contest_row(contest: Contest) -> dict[str, str]:
    return {
        "plan": wording.one_line(contest.plan, 200),
        "against": wording.one_line(contest.against, 200),
        "how": HOW.get(contest.how, wording.one_line(contest.how, 60)) + (f", on {wording.one_line(contest.host, 200)}" if contest.host else ""),
        "ratio": story.with_interval(contest.ratio, contest.low, contest.high, contest.n) if wording.drawable(contest.ratio) is not None else wording.NOTHING,
        "seconds": wording.duration(contest.seconds) if wording.drawable(contest.seconds) else wording.NOTHING,
        "note": wording.one_line(contest.note),
    }
