"""A profile in a terminal: the bound first, foreign text as text, and no section without data."""

from __future__ import annotations

import io

from rich.console import Console

from flatout.render.profile_terminal import headline, next_step, profile_tables
from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.profile import (
    LoaderSeen,
    MemoryGrowth,
    MemorySeen,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)
from flatout.schema.records import PhaseTime, Ratio

PLACE = SourceLocation("/home/me/[red]train.py", 12, function="main", text="loss = model(x)")


def shown(profile: ProfileRecord, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(profile_tables(profile))
    return out.getvalue()


def full() -> ProfileRecord:
    return ProfileRecord(
        ["python", "train.py", "--name", "a b"],
        "/home/me",
        step_ms=12.5,
        steps=40,
        warmup_steps=9,
        samples_per_s=5120.0,
        bound="data",
        bound_why="60% of the step: so it is",
        phases={"data": PhaseTime(7.5, 7.0, 8.0, 0.6), "copy": PhaseTime(0.0, 0.0, 0.0, 0.0)},
        overhead=Ratio(1.8, 1.7, 1.9, 3),
        what_ifs=[
            WhatIf("loader", Ratio(2.5, 2.4, 2.6, 8), 5.0),
            WhatIf("copies", why_not="the program trains on the CPU"),
        ],
        operations=[
            Operation(
                "aten::addmm",
                4.0,
                2.0,
                share=0.7,
                dtypes=["float32"],
                roofline=0.55,
                limit="compute",
                place=PLACE,
                tensor_cores=False,
            )
        ],
        operators_a_step=80.0,
        operator_us=12.0,
        python_ms=1.5,
        flops_a_step=2.5e9,
        mfu=0.31,
        synchronisations=[
            SyncRecord("item", PLACE, 2.0, 0.4),
            SyncRecord("to device", PLACE, 1.0, 0.2, 64.0, False, False),
        ],
        loaders=[
            LoaderSeen(
                PLACE,
                made=3,
                begun=9,
                workers=2,
                wait_ms=7.5,
                start_ms=40.0,
                fetch_ms=6.0,
                slow_place=PLACE,
                slow_share=0.8,
            )
        ],
        memory=MemorySeen(
            "host",
            3 * 2**20,
            {"parameters": 2**20, "activations": 2**21, "other": 0},
            {"body.0": 2**20},
            PLACE,
        ),
        leak=MemoryGrowth(4096.0, 1e-7, True, "list `losses` of main()", PLACE, True, steps=24),
        gc_calls=0.5,
        gc_ms=0.2,
        gc_longest_ms=3.0,
        findings=[
            Finding(
                "FL150",
                "slow_loader",
                "wasted time",
                "the loader is slow",
                PLACE,
                predicted=Ratio(2.5, 2.4, 2.6, 8),
            )
        ],
        notes=["a note"],
    )


def test_the_first_and_last_lines():
    assert headline(full()).startswith("data-bound: 12.5 ms a step, 5,120 samples/s.")
    text = shown(full())
    assert text.startswith("data-bound: 12.5 ms")
    assert text.rstrip().endswith("flatout profile --memory python train.py --name 'a b'")
    calm = full()
    calm.leak = None
    assert next_step(calm)[1] == "flatout tune python train.py --name 'a b'"


def test_everything_measured_is_shown():
    text = shown(full(), width=200)
    for words in (
        "2.50x (2.40-2.60, n=8) as fast, 5.00 ms a step",
        "not measured: the program trains on the CPU",
        "addmm float32 (no Tensor Cores)",
        "of the possible",
        "55%",
        "calls a step",
        "time a step",
        "3.00 MiB of the tensors in a step, on the host",
        "80 operators a step, 12 us each",
        "1.50 ms of Python outside operators",
        "2 loader workers",
        "3.00 ms a step; a batch takes 6.00 ms; 7.50 ms waited for, 0 ms hidden",
        "2.50 GFLOP a step, 31% of the measured peak",
        "to device, pageable, blocking",
        "[red]train.py:12 main",
        "2 workers, 7.50 ms of waiting a step",
        "most of it (80%) in",
        "made 3x, iterated over 9x",
        "activations 2.00 MiB, parameters 1.00 MiB",
        "body.0 1.00 MiB",
        "4.00 KiB a step over 24 steps",
        "held by list `losses` of main()",
        "it keeps an autograd graph alive",
        "FL150 the loader is slow",
        "up to 2.50x",
        "0.50 collections a step",
        "a note",
        "1.80x as long",
    ):
        assert words in text, words
    assert "copy" not in text.split("what-ifs")[0]  # a phase without data


def test_a_narrow_terminal_and_an_empty_record():
    assert max(map(len, shown(full(), 60).splitlines())) <= 60
    text = shown(ProfileRecord(["python", "train.py"], "/"))
    assert "no step was measured" in text
    assert "None" not in text
