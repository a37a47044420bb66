"""The tables of the terminal: complete, within their width, and safe from control sequences in
foreign text.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from flatout.render.terminal import plan_table, print_session, session_tables, why_left_out
from flatout.schema.enums import Origin
from flatout.schema.plan import Choice, Plan
from flatout.schema.session import LeverRecord, SessionRecord

RECORD = json.loads((Path(__file__).parent / "session.json").read_text(encoding="utf-8"))


def shown(renderable: RenderableType, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable)
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def printed(session: SessionRecord, width: int) -> list[str]:
    out = io.StringIO()
    print_session(Console(file=out, width=width, color_system=None, legacy_windows=False), session)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (
            "session",
            "1.34 times as fast, equivalent results",
            "  flatout run --procs 2 python main.py --lr 0.1",
        ),
        ("failed", "The tuning failed", "  flatout tune python -m pkg.train --data '/no/such folder'"),
        ("empty", "Still tuning: nothing to report yet", "guard  not checked: nothing was chosen yet"),
    ],
)
def test_verdict_first_and_the_next_command_last(recorded, name, first, last, width):
    lines = printed(recorded(name), width)
    assert (lines[0], lines[-1]) == (first, last)


def test_levers_below_their_reason_and_the_left_out_ones_in_a_line(recorded):
    session = recorded("session")
    lines = shown(session_tables(session), 80)
    headings = [line.partition(":")[0] for line in lines if line.startswith(("applied", "rejected"))]
    assert headings == sorted(headings)
    assert {"applied", "rejected"} == set(headings)
    skipped = [lever for lever in session.levers if lever.status == "skipped"]
    assert f"{len(skipped)} levers left out; `flatout levers --why` says why" in lines
    assert not any(lever.reason in line for lever in skipped for line in lines)
    why = "\n".join(shown(why_left_out(session), 200))
    assert all(lever.name in why and lever.reason in why for lever in skipped)
    text = "\n".join(lines)
    for name in ("malloc=tcmalloc", "1.17x (1.14-1.21)", "loader(workers=2,"):
        assert name in text
    for words in ("At step 12:", "1.34x (1.30-1.39, n=6)", "414 samples/s", "-4 %"):
        assert words in text


def test_our_own_text_is_ascii(recorded):
    text = "\n".join(shown(session_tables(recorded("session")), 80))
    assert all(sign.isascii() or sign == "─" for sign in text)


def test_a_command_is_shown_as_it_must_be_typed(recorded):
    session = recorded("session")
    session.ranks = None
    session.command = ["python", "train.py", "--name", "two  blanks – and [red]a dash[/red]"]
    session.plan_path = f"{'a long name/' * 12}flatout.toml"
    assert (
        printed(session, 100)[-1]
        == f"  flatout run --plan '{session.plan_path}' python train.py --name 'two  blanks – and [red]a dash[/red]'"
    )


def test_foreign_text_cannot_control_the_terminal(recorded):
    session = recorded("session")
    session.message = "[bold red]loud[/] \x1b[31mred\x1b[0m \x07"
    session.levers = [LeverRecord("[link=x]a[/link]", "[/]", "applied", 1.1, 1.0, 1.2, 3, "[reverse]x\x9b2J")]
    text = "\n".join(shown(session_tables(session)))
    assert "[bold red]loud[/]" in text
    assert "[link=x]a[/link]=[/]" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b"}


@given(text=st.text(max_size=60), width=st.integers(40, 140))
def test_any_text_fits_any_width(text, width):
    session = SessionRecord.from_json(RECORD)
    session.message = session.guard.why = text
    session.command = [text, text]
    session.levers = [
        LeverRecord(text, {text: text}, text, 1.0, None, None, 0, text),
        LeverRecord(text, None, "skipped", reason=text),
    ]
    plan = Plan((Choice(text, text, Origin.FILE, text),))
    for table in (session_tables(session), plan_table(plan, {text: text}, {text: text, "b": text})):
        lines = shown(table, width)
        assert lines
        assert max(map(cell_len, lines)) <= width


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
    lines = shown(
        plan_table(
            plan, code, {"loader": "this program has no DataLoader", "compile": "the run is too short"}
        ),
        width,
    )
    assert lines == [
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


def test_an_empty_plan_says_so():
    assert shown(plan_table(Plan(), {}, {})) == ["The plan is empty: the program runs as it is."]
