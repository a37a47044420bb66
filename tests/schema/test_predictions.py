"""The predictions of findings, the order of levers that follows from them, and their outcomes."""

from flatout.levers import TABLE as LEVERS
from flatout.schema.findings import Finding, Severity
from flatout.schema.predictions import levers_first, predictions, with_measured
from flatout.schema.records import Ratio
from flatout.schema.session import LeverRecord

TIME = Severity.TIME.value
SLOW = Finding(
    "FL150",
    "data_wait",
    TIME,
    "",
    levers=["loader", "cached_prefix"],
    predicted=Ratio(2.0, 1.8, 2.2, 9),
    how="what-if",
)
LEVERS_TRIED = [
    LeverRecord("loader", {"workers": 1}, "rejected", 1.2, 1.1, 1.3, 8),
    LeverRecord("cached_prefix", True, "applied", 1.9, 1.7, 2.1, 8),
    LeverRecord("gc_pause", True, "applied", 3.0, 2.9, 3.1, 8),
    LeverRecord("resident_data", True, "skipped"),
]


def test_findings_name_levers_in_the_order_of_predicted_gain():
    time = Severity.TIME.value
    findings = [
        Finding("FL1", "small", time, "", levers=["gc_pause"], predicted=Ratio(1.1, 1.05, 1.2, 9)),
        Finding(
            "FL2",
            "large",
            time,
            "",
            levers=["loader", "cached_prefix", "nobody_knows"],
            predicted=Ratio(2.0, 1.8, 2.2, 9),
        ),
        Finding("FL3", "unknown", time, "", levers=["compile", "gc_pause"]),
    ]
    assert levers_first(findings, [lever.name for lever in LEVERS]) == [
        "loader",
        "cached_prefix",
        "gc_pause",
        "compile",
    ]


def test_the_lever_with_the_largest_gain_is_compared_with_the_prediction():
    (found,) = predictions([SLOW, Finding("FL250", "leak", TIME, "")], LEVERS_TRIED)
    assert (found.rule, found.lever, found.predicted.median) == ("FL150", "cached_prefix", 2.0)
    assert found.measured == Ratio(1.9, 1.7, 2.1, 8)


def test_an_untried_prediction_has_no_outcome():
    (found,) = predictions([SLOW], LEVERS_TRIED[2:])
    assert (found.lever, found.measured) == ("", None)
    assert with_measured([SLOW], LEVERS_TRIED[2:]) == [SLOW]
