"""The Markdown of `flatout compare`."""

from __future__ import annotations

from flatout.render.compare_markdown import compare_markdown
from flatout.schema.compare import Change, CompareRecord, Gate, LossVerdict, SideRecord


def test_the_summary_has_gates_and_table_and_labels_are_no_markup():
    record = CompareRecord(
        ["python", "train.py"],
        "/work",
        a=SideRecord("main", ["python"], step_ms=4.0, peak_memory_bytes=2**30),
        b=SideRecord("</code>`x` | <img>", ["python"], step_ms=5.0, peak_memory_bytes=2**30),
        step_time=Change(0.25, 0.2, 0.3, 6),
        losses=LossVerdict("different", "loss 3 is <b>nan</b> | _worse_"),
        gates=[Gate("step time", "3 %", "failed", "the step time changes by +20.0 % to +30.0 %")],
        notes=["another program ran"],
    )
    lines = compare_markdown(record).splitlines()
    assert lines[0] == "### B is slower: +25.0 % time per step (+20.0 to +30.0, n=6)"
    assert "* ❌ gate on step time: **failed**: the step time changes by +20.0 % to +30.0 %." in lines
    assert "B: `</code>'x' | <img>`" in lines
    assert "| time of a step | 4.00 ms | 5.00 ms | +25.0 % (+20.0 to +30.0) |" in lines
    (losses,) = [line for line in lines if line.startswith("Losses")]
    assert r"\<b\>nan\</b\> \| \_worse\_" in losses
    assert "* another program ran." in lines
