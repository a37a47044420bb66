"""Render a session as one self-contained page (page.py).

Every value is escaped by jinja2's autoescape or by ``svg.element``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flatout.render import before_after, charts, formatting, machine, ranks_summary, summary
from flatout.render.curves import loss_curves, remarks
from flatout.render.frontier import frontier_plot
from flatout.render.page import environment
from flatout.render.svg import Scale, ratio_scale
from flatout.schema.enums import Status
from flatout.schema.records import PHASES
from flatout.schema.session import ComparisonRecord, GuardCheck, LeverRecord, NamedRecord, SessionRecord

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
    baseline, best = (
        before_after.parts(session.baseline),
        before_after.parts(before_after.tuned_side(session)),
    )
    ordered = summary.levers_in_order(session)
    curves = loss_curves(session.guard.plain_losses, session.guard.tuned_losses)
    rows = before_after.before_after(session)
    return {
        "headline": summary.headline(session),
        "outcome": session.outcome,
        "message": summary.message(session),
        "details": summary.details(session),
        "command": formatting.shell(session.command),
        "dateline": [part for part in (formatting.day(session.created), machine.device(session)) if part],
        "rows": rows,
        "both": before_after.both_sides(rows),
        "next": summary.next_step(session),
        "bars": charts.step_bars(baseline, best),
        "sides": [name for name, shown in (("plain", baseline), ("tuned", best)) if shown],
        "phases": _phase_rows(baseline, best),
        "ranks": _ranks(session),
        "unit": formatting.one_line(session.baseline.unit or "step", 40),
        "forest": _forest(session, ordered),
        "frontier": frontier_plot(session),
        "points": summary.frontier_rows(session),
        "limit": formatting.size(session.memory_limit_bytes) if session.memory_limit_bytes else "",
        "levers": [_lever_row(lever) for lever in ordered[:MAX_ROWS]],
        "more_levers": max(0, len(ordered) - MAX_ROWS),
        "predictions": summary.predicted_and_measured(session)[:MAX_ROWS],
        "guard": session.guard,
        "guard_words": summary.guard_sentence(session.guard),
        "checks": [_check_row(check) for check in session.guard.checks[:MAX_ROWS]],
        "plot": charts.loss_plot(curves) if curves else None,
        "seeds": curves.seeds if curves else 0,
        "seed": session.guard.seeds[0] if session.guard.seeds else None,
        "remarks": remarks(session.guard, curves) if curves else [],
        "named": [_named(each) for each in session.named[:MAX_ROWS]],
        "payback": summary.payback_sentence(session),
        "comparisons": [_comparison_row(comparison) for comparison in session.comparisons[:MAX_ROWS]],
        "more_comparisons": max(0, len(session.comparisons) - MAX_ROWS),
        "effort": summary.effort(session),
        "noise": summary.noise(session),
        "other_programs": summary.other_programs(session),
        "effects": ", ".join(formatting.one_line(effect, 40).replace("_", " ") for effect in session.effects),
        "facts": machine.facts(session),
        "version": formatting.one_line(session.flatout, 40),
    }


def _named(each: NamedRecord) -> dict[str, Any]:
    curves = loss_curves([each.plain_losses], [each.losses])
    return {
        "plan": formatting.one_line(each.plan, 200),
        "summary": summary.named_sentence(each),
        "plot": charts.loss_plot(curves) if curves else None,
    }


def _ranks(session: SessionRecord) -> dict[str, Any] | None:
    found = session.ranks
    if found is None:
        return None
    return {
        "summary": ranks_summary.summary(session),
        "bars": ranks_summary.rank_bars(found),
        "rows": ranks_summary.rows(found),
        "remarks": ranks_summary.remarks(found),
    }


def _phase_rows(
    plain: Iterable[before_after.PhasePart], tuned: Iterable[before_after.PhasePart]
) -> list[dict[str, str]]:
    """Return one row per phase, with the same number of decimals. Phases that took no time are left out."""
    before, after = {p.phase: p for p in plain}, {p.phase: p for p in tuned}
    medians = [p.median_ms for p in (*before.values(), *after.values()) if p.median_ms is not None]
    decimals = formatting.decimals(max(medians, default=0.0))
    rows = []
    for phase in dict.fromkeys([*before, *after]):
        a, b = before.get(phase), after.get(phase)
        if not any(part and (part.ms or part.median_ms) for part in (a, b)):
            continue
        change = (
            formatting.signed(b.median_ms - a.median_ms, decimals)
            if a and b and a.median_ms is not None and b.median_ms is not None
            else ""
        )
        kind = phase if phase in PHASES else "other"
        rows.append(
            {
                "phase": phase,
                "kind": kind,
                "plain": _median(a, decimals),
                "plain_spread": _quartiles(a, decimals),
                "tuned": _median(b, decimals),
                "tuned_spread": _quartiles(b, decimals),
                "change": change,
            }
        )
    return rows


def _median(part: before_after.PhasePart | None, decimals: int) -> str:
    return formatting.NOTHING if part is None or part.median_ms is None else f"{part.median_ms:,.{decimals}f}"


def _quartiles(part: before_after.PhasePart | None, decimals: int) -> str:
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
    shown = [lever for lever in ordered if formatting.is_positive(lever.ratio)][:40]
    total = session.speedup if session.speedup and formatting.is_positive(session.speedup.median) else None
    if not shown:
        return None
    floor = session.noise_floor
    band = [v for v in (floor.low, floor.high) if formatting.is_positive(v)] if floor else []
    ratios = (
        [v for lever in shown for v in (lever.ratio, lever.low, lever.high)]
        + ([total.median, total.low, total.high] if total else [])
        + band
    )
    scale = ratio_scale([v for v in ratios if v is not None and formatting.is_positive(v)])
    pair = (band[0], band[1]) if len(band) == 2 else None
    lines = [_forest_line(scale, lever, pair) for lever in shown]
    if total:
        drawn = charts.forest_row(
            scale,
            "all together",
            total.median,
            formatting.drawable(total.low),
            formatting.drawable(total.high),
            True,
            pair,
            total=True,
        )
        lines.append(
            ForestLine(
                "all together",
                drawn,
                formatting.times(total.median),
                formatting.interval(total.low, total.high),
                "total",
            )
        )
    return {"lines": lines, "axis": charts.forest_axis(scale), "floor": pair is not None}


def _forest_line(scale: Scale, lever: LeverRecord, floor: tuple[float, float] | None) -> ForestLine:
    name, kept = formatting.lever(lever.name, lever.value), lever.status == Status.APPLIED
    row = charts.forest_row(
        scale,
        name,
        float(lever.ratio or 1),
        formatting.drawable(lever.low),
        formatting.drawable(lever.high),
        kept,
        floor,
    )
    return ForestLine(
        name,
        row,
        formatting.times(lever.ratio),
        formatting.interval(lever.low, lever.high),
        formatting.one_line(lever.status, 20),
    )


def _lever_row(lever: LeverRecord) -> dict[str, str]:
    measured = (
        before_after.with_interval(lever.ratio, lever.low, lever.high, lever.n)
        if formatting.drawable(lever.ratio) is not None
        else ""
    )
    return {
        "name": formatting.one_line(lever.name, 80),
        "value": "" if lever.value is None else formatting.setting(lever.value),
        "status": formatting.one_line(lever.status, 20),
        "ratio": measured,
        "how": HOW.get(lever.how, formatting.one_line(lever.how, 60))
        if formatting.drawable(lever.ratio) is not None
        else "",
        "reason": summary.because(lever),
        "effect": EFFECTS.get(lever.effect, formatting.one_line(lever.effect, 60))
        if lever.status != Status.SKIPPED
        else "",
    }


def _check_row(check: GuardCheck) -> dict[str, Any]:
    return {
        "name": formatting.one_line(check.name, 120),
        "passed": bool(check.passed),
        "value": formatting.short(check.value),
        "limit": formatting.short(check.limit),
        "why": formatting.one_line(check.why),
    }


def _comparison_row(comparison: ComparisonRecord) -> dict[str, str]:
    return {
        "plan": formatting.one_line(comparison.plan, 200),
        "against": formatting.one_line(comparison.against, 200),
        "how": HOW.get(comparison.how, formatting.one_line(comparison.how, 60))
        + (f", on {formatting.one_line(comparison.host, 200)}" if comparison.host else ""),
        "ratio": before_after.with_interval(comparison.ratio, comparison.low, comparison.high, comparison.n)
        if formatting.drawable(comparison.ratio) is not None
        else formatting.NOTHING,
        "seconds": formatting.duration(comparison.seconds)
        if formatting.drawable(comparison.seconds)
        else formatting.NOTHING,
        "note": formatting.one_line(comparison.note),
    }
