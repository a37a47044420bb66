"""The tables of `flatout plan` and `flatout levers --why`."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import session
from rich.cells import cell_len
from rich.console import Console

from flatout.render.terminal import plan_table, why_left_out
from flatout.schema.enums import Origin
from flatout.schema.plan import Choice, Plan


def shown(renderable, width=100):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable)
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_with_the_code_that_does_the_same(width):
    plan = Plan(
        (
            Choice("channels_last", True, Origin.TUNER, "1.11x (1.08-1.13, n=32)"),
            Choice("loader", {"workers": 2}, Origin.USER),
        )
    )
    code = {
        "channels_last": "model = model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)\n"
    }
    reasons = {"loader": "this program has no DataLoader", "compile": "the run is too short"}
    assert shown(plan_table(plan, code, reasons), width) == [
        "channels_last = on   found by the tuner",
        "  1.11x (1.08-1.13, n=32)",
        "",
        "    model = model.to(memory_format=torch.channels_last)",
        "    x = x.to(memory_format=torch.channels_last)",
        "",
        "loader = workers=2   requested by you",
        "  but: this program has no DataLoader",
        "",
        "not in the plan",
        "compile  the run is too short",
    ]
    assert shown(plan_table(Plan(), {}, {})) == ["The plan is empty: the program runs as it is."]


def test_each_lever_that_was_left_out_has_its_reason():
    record = session()
    why = "\n".join(shown(why_left_out(record, "the session"), 200))
    skipped = [lever for lever in record.levers if lever.status == "skipped"]
    assert skipped
    assert all(lever.name in why and lever.reason in why for lever in skipped)


@given(text=st.text(max_size=60), width=st.integers(40, 140))
def test_any_text_fits_any_width(text, width):
    plan = Plan((Choice(text, text, Origin.FILE, text),))
    assert shown(plan_table(plan, {text: text}, {text: text, "b": text}), width)
