"""Compare the predictions of findings with the measured levers. Pure functions from records to records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatout.schema.findings import Finding
from flatout.schema.records import Ratio
from flatout.schema.session import LeverRecord, Prediction


def levers_first(findings: Iterable[Finding], known: Sequence[str]) -> list[str]:
    """Return the levers that the findings suggest, most promising first, without duplicates.

    ``known`` are the existing levers.
    """
    promise: dict[str, float] = {}
    for finding in findings:
        gain = finding.predicted.median if finding.predicted else 1.0
        for place, lever in enumerate(finding.levers):
            if lever in known:
                # The first lever of a finding is the most likely. Later ones rank below it, not below other
                # findings.
                promise[lever] = max(promise.get(lever, 0.0), 1 + (gain - 1) * 0.95**place)
    return sorted(promise, key=lambda lever: -promise[lever])


def predictions(findings: Iterable[Finding], levers: Sequence[LeverRecord]) -> list[Prediction]:
    """Return, per finding with a prediction, its fastest lever, measured alone against the plain program."""
    found = []
    for finding in findings:
        if finding.predicted is None or not finding.levers:
            continue
        best = _best(finding, levers)
        name, measured = (best.name, _ratio(best)) if best is not None else ("", None)
        found.append(Prediction(finding.rule, finding.name, finding.predicted, finding.how, name, measured))
    return found


def with_measured(findings: Iterable[Finding], levers: Sequence[LeverRecord]) -> list[Finding]:
    """Return the findings with the measured speed-up of their fastest lever, if any was measured."""
    return [
        finding if (best := _best(finding, levers)) is None else replace(finding, measured=_ratio(best))
        for finding in findings
    ]


def _best(finding: Finding, levers: Sequence[LeverRecord]) -> LeverRecord | None:
    tried = [lever for lever in levers if lever.name in finding.levers and _ratio(lever) is not None]
    return max(tried, key=lambda lever: lever.ratio or 0.0, default=None)


def _ratio(lever: LeverRecord) -> Ratio | None:
    if lever.ratio is None or lever.low is None or lever.high is None:
        return None
    return Ratio(lever.ratio, lever.low, lever.high, lever.n)
