"""The bound is the largest share of the step, and a measured what-if counts before anything else."""

import pytest

from flatout.diagnose.bottleneck import name_bottleneck, removed_share, shares
from flatout.schema.profile import IdleGap, Operation, ProfileRecord, WhatIf
from flatout.schema.records import PhaseTime, Ratio


def profile(**more):
    made = ProfileRecord(
        ["python", "train.py"],
        "/home/me",
        step_ms=10.0,
        steps=40,
        phases={"data": PhaseTime(5.0, 4.0, 6.0, 0.5)},
        operations=[
            Operation("aten::addmm", 4, 2.0, share=0.8, flops=1e6),
            Operation("aten::relu", 4, 0.5, share=0.2),
        ],
        python_ms=2.0,
    )
    for name, value in more.items():
        made.__dict__[name] = value
    return made


def measured(**ratios):
    return [WhatIf(name, Ratio(ratio, 0.99 * ratio, 1.01 * ratio, 8)) for name, ratio in ratios.items()]


def of(**operation):
    """Measured, with a loader that costs nothing and one operator."""
    made = {"name": "aten::add", "calls": 4, "host_ms": 8.0, "share": 1.0, **operation}
    return {"what_ifs": measured(loader=1.0), "operations": [Operation(**made)]}


@pytest.mark.parametrize(
    ("more", "bound", "words"),
    [
        ({"what_ifs": measured(loader=2.5)}, "data", "2.50x (2.48-2.52, n=8) as fast"),
        ({"what_ifs": measured(loader=1.005, optimizer=3.0)}, "optimizer", "an optimizer that does nothing"),
        (
            {"what_ifs": measured(copies=1.9, optimizer=1.1, loader=1.005)},
            "copy",
            "batches on the device already",
        ),
        ({"what_ifs": []}, "data", "waited for the loader"),
        (
            {"what_ifs": [WhatIf("loader", Ratio(11.0, 1.3, 106.0, 4))]},
            "data",
            "50% of the step: the step waited",
        ),
        ({"what_ifs": measured(loader=1.0), "python_ms": 7.0}, "python", "7.00 ms outside operators"),
        ({"what_ifs": measured(loader=1.0, logging=3.0)}, "python", "no messages"),
        (
            {"what_ifs": measured(loader=1.0)},
            "compute",
            "aten::addmm, takes 80% of the time of all operators",
        ),
        ({**of(calls=1000), "operators_a_step": 1000.0}, "launch", "1000 operators"),
        (of(), "memory", "the largest such operator, aten::add, takes 100%"),
        (of(name="aten::addmm", flops=1.0, limit="memory"), "memory", "aten::addmm"),
    ],
)
def test_each_bound(more, bound, words):
    found, why = name_bottleneck(profile(**more))
    assert found == bound
    assert words in why


def test_a_gain_within_the_noise_is_no_gain():
    record = profile(
        what_ifs=[
            WhatIf("loader", Ratio(1.05, 0.97, 1.14, 8)),
            WhatIf("optimizer", why_not="no optimizer here"),
        ]
    )
    assert removed_share(record, "loader") == 0.0
    assert removed_share(record, "optimizer") is None
    assert shares(record)["data"] == 0.0


def test_on_a_device_python_counts_only_while_the_device_waits():
    kernel = Operation("aten::mm", 4, 1.0, device_ms=8.0, share=1.0, flops=1.0)
    busy = profile(
        what_ifs=measured(loader=1.0),
        operations=[kernel],
        python_ms=9.0,
        idle_ms=0.2,
        idle_gaps=[IdleGap("python", 0.2, 3)],
    )
    assert name_bottleneck(busy)[0] == "compute"
    gaps = [IdleGap("aten::add", 7.0, 3), IdleGap("python", 1.0, 3)]
    idle = profile(
        what_ifs=measured(loader=1.0), operations=[kernel], python_ms=9.0, idle_ms=8.0, idle_gaps=gaps
    )
    assert name_bottleneck(idle)[0] == "launch"


def test_shares_are_parts_of_one_step():
    assert sum(
        shares(profile(what_ifs=measured(loader=2.0, optimizer=1.2), python_ms=9.0)).values()
    ) == pytest.approx(1.0)


def test_an_unmeasured_share_is_not_named():
    assert name_bottleneck(ProfileRecord(["a"], "/")) == ("", "")


def test_a_small_measured_share_is_not_the_bound():
    seen = {"data": PhaseTime(0.1, 0.1, 0.1, 0.01)}
    assert name_bottleneck(profile(phases=seen, operations=[], python_ms=None)) == ("", "")
