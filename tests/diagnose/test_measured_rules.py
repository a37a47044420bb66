"""Every measured rule finds its own fault, first and in the right line, and reports nothing for a healthy
program or for mere noise.
"""

import dataclasses
import re

import pytest
from profiles import (
    GAIN,
    ILL,
    LINE,
    NO_GAIN,
    Operation,
    SourceLocation,
    event,
    healthy,
    loader,
    settings,
    what_ifs,
)

from flatout.diagnose.check import profile_findings, ranked
from flatout.diagnose.rules import TABLE
from flatout.levers import TABLE as LEVERS
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord, WhatIf
from flatout.schema.records import PhaseTime, Ratio
from flatout.schema.run_request import CompileRecord

MEASURED = [rule for rule in TABLE if rule.check_profile is not None]


def test_every_measured_rule_has_a_faulty_profile():
    assert {rule.name for rule in MEASURED} == set(ILL)


@pytest.mark.parametrize("name", ILL)
def test_the_fault_is_named_first_with_its_line(name):
    changes, place = ILL[name]
    findings = profile_findings(healthy(**changes))
    assert findings, f"{name} finds nothing"
    assert findings[0].name == name
    assert findings[0].place == place
    assert findings[0].message
    assert findings[0].fix


@pytest.mark.parametrize("name", ILL)
def test_the_profile_survives_its_file(name):
    """Profiles are often read from disk, and the verdict must be the same."""
    record = healthy(**ILL[name][0])
    again = ProfileRecord.from_json(record.to_json())
    assert [f.to_json() for f in profile_findings(again)] == [f.to_json() for f in profile_findings(record)]


NOTHING = {
    "a healthy program": healthy(),
    "an empty profile, in which nothing was measured": ProfileRecord([], ""),
    "a gain too small to report": healthy(
        what_ifs=what_ifs(loader=Ratio(1.08, 1.06, 1.09, 20)), loaders=loader(wait_ms=0.3)
    ),
    # Steps without it may be faster for other reasons. Fusing it saves its own time at most.
    "a fast optimizer": healthy(
        **{**ILL["optimizer_share"][0], "phases": {"optimizer": PhaseTime(0.6, 0.5, 0.7, 0.06)}}
    ),
    "a fused optimizer": healthy(what_ifs=what_ifs(optimizer=GAIN)),
    "frozen parts in evaluation mode": healthy(settings=settings(training={"train": 5, "eval": 40})),
    "a dynamic shape": healthy(compile_record=CompileRecord(3, 2, 0)),
    "the optimizers of a generator and of a discriminator, made in one line": healthy(
        events={"make_optimizer": event(most=2)}
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_found(name):
    assert profile_findings(NOTHING[name]) == []


@pytest.mark.parametrize("name", ILL)
@pytest.mark.parametrize("shorter", [1.0, 0.3, 0.05])
def test_no_part_takes_more_than_the_step(name, shorter):
    """A wait of an epoch's first step is not a share of the typical step, which leaves that one out."""
    record = healthy(**ILL[name][0])
    record = dataclasses.replace(record, step_ms=record.step_ms * shorter)
    texts = [text for f in profile_findings(record) for text in (f.message, *f.evidence) if " of a " in text]
    assert all(int(share) <= 100 for text in texts for share in re.findall(r"\((\d+) %\)", text)), texts


def test_a_float64_detour_is_found_at_the_cast():
    """A few lines of double precision in a float32 model."""
    cast = Operation("aten::copy_", 6, 1.0, share=0.1, dtypes=["float64"], shapes=["(64, 4)"], place=LINE)
    between = Operation("aten::div", 5, 2.0, share=0.2, dtypes=["float64"])
    scaled = Operation("aten::mul", 5, 2.0, share=0.3, dtypes=["float32"])
    findings = profile_findings(healthy(operations=[cast, between, scaled]))
    assert [(f.name, f.place) for f in findings] == [("double_precision", LINE)]
    assert findings[0].message.startswith("30 %")
    assert profile_findings(healthy(operations=[scaled])) == []
    number = dataclasses.replace(cast, shapes=[])  # an optimizer's step count, and its Python scalars
    assert profile_findings(healthy(operations=[number, between, scaled])) == []


def test_growing_memory_comes_before_wasted_time():
    slow, growing = ILL["data_wait"][0], ILL["leak"][0]
    assert [f.name for f in profile_findings(healthy(**slow, **growing))] == ["leak", "data_wait"]


@pytest.mark.parametrize(
    "name",
    ["data_wait", "slow_fetch", "loader_made_in_loop", "workers_not_kept", "optimizer_share", "thread_count"],
)
def test_a_gain_within_the_noise_is_no_finding(name):
    record = healthy(**ILL[name][0])
    record.what_ifs = [
        WhatIf(w.name, Ratio(1.4, 0.99, 1.9, 20) if w.ratio == GAIN else w.ratio) for w in record.what_ifs
    ]
    assert profile_findings(record) == []


def test_validation_loaders_are_not_blamed_for_the_training_loader():
    (slow,) = loader(wait_ms=4.0)
    other = dataclasses.replace(slow, wait_ms=0.1, place=SourceLocation("train.py", 31))
    findings = profile_findings(healthy(what_ifs=what_ifs(loader=GAIN), loaders=[other, slow]))
    assert [f.place for f in findings] == [slow.place]


def test_three_loaders_from_one_place_are_not_recreated_ones():
    """A function that makes the loaders for training, validation and test is one place that makes three."""
    findings = profile_findings(
        healthy(what_ifs=what_ifs(loader=GAIN), loaders=loader(wait_ms=4.0, created=3, iterators=12))
    )
    assert [f.name for f in findings] == ["data_wait"]


def test_one_fault_seen_twice_is_reported_once():
    """A device read inside a loop of tiny operators: only the narrower rule reports it."""
    wide, narrow = dict(ILL["tiny_operators"][0]), ILL["host_sync_every_step"][0]
    names = [f.name for f in profile_findings(healthy(**{**wide, **narrow}))]
    assert "host_sync_every_step" in names
    assert "tiny_operators" not in names


def test_wrong_results_come_before_wasted_time():
    changes = {**ILL["data_wait"][0], "events": {"loss_not_finite": event()}}
    assert [f.name for f in profile_findings(healthy(**changes))] == ["not_finite", "data_wait"]


def test_larger_gains_come_first_within_a_severity():
    def finding(name, gain):
        return Finding(
            "FL1",
            name,
            Severity.TIME.value,
            "",
            predicted=None if gain is None else Ratio(gain, gain, gain, 5),
        )

    assert [f.name for f in ranked([finding("a", None), finding("b", 1.2), finding("c", 2.0)])] == [
        "c",
        "b",
        "a",
    ]


def test_levers_of_rules_exist():
    assert {name for rule in MEASURED for name in rule.levers} <= {lever.name for lever in LEVERS}


def test_more_threads_than_cores_need_no_what_if():
    """With so many threads a step may take so long that there is no time for one."""
    record = healthy(
        settings=settings(threads=24),
        what_ifs=[WhatIf("one thread fewer", why_not="no time was left to measure it")],
    )
    assert [f.name for f in profile_findings(record)] == ["thread_count"]
    record.what_ifs = [WhatIf("one thread fewer", NO_GAIN)]
    assert profile_findings(record) == []
