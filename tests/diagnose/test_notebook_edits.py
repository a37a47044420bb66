"""Edits of a notebook's JSON text, for any code, any layout and any way to split a source into strings."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.diagnose.notebook_edits import edit_notebook
from flatout.schema.findings import Edit

CODE = st.text(st.sampled_from('ab "\\/\t\n\n\r#é𝄞\u2028'), min_size=1, max_size=30)
SPLITS = {
    "lines": lambda code: code.splitlines(keepends=True),
    "one string": lambda code: code,
    "one in a list": lambda code: [code],
    "pieces": lambda code: [code[at : at + 3] for at in range(0, len(code), 3)],
}
LAYOUTS = st.fixed_dictionaries(
    {"indent": st.sampled_from([None, 1, "\t"]), "ensure_ascii": st.booleans(), "sort_keys": st.booleans()}
)


def position(code, at):
    """Line and column of a place, from 1; a place at the end of a line belongs to the next one."""
    lines = code[:at].splitlines(keepends=True)
    ended = not lines or lines[-1].splitlines()[0] != lines[-1]
    if code[at - 1 : at + 1] == "\r\n":
        ended = False
    return (len(lines) + 1, 1) if ended else (len(lines), len(lines[-1]) + 1)


@given(
    code=CODE,
    split=st.sampled_from(list(SPLITS)),
    layout=LAYOUTS,
    spans=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30), st.sampled_from(["", "x", 'é"', "y\nz"])),
        max_size=3,
    ),
)
@settings(max_examples=300, deadline=None)
def test_the_source_is_edited_and_nothing_else(code, split, layout, spans):
    edits, expected, end = [], [], 0
    for start, stop, new in sorted(spans):
        start, stop = min(start, len(code)), min(max(start, stop), len(code))
        if start < end or (edits and start == end):
            continue
        edits.append((2, Edit(*position(code, start), *position(code, stop), new)))
        newline = "\r\n" if "\r\n" in code else "\n"
        expected += [code[end:start], new.replace("\n", newline)]
        end = stop
    expected.append(code[end:])
    cells = [
        {"cell_type": "markdown", "source": ["a\n"], "metadata": {"é": [1.50, None]}},
        {"outputs": [{"text": code}], "source": SPLITS[split](code), "cell_type": "code"},
    ]
    whole = {"nbformat": 4, "cells": cells, "metadata": {"cells": []}}
    text = json.dumps(whole, **layout)
    got = edit_notebook(text, edits)
    assert got is not None
    after = json.loads(got)
    assert "".join(after["cells"][1]["source"]) == "".join(expected)
    after["cells"][1]["source"] = cells[1]["source"]
    assert after == whole
    assert list(after) == list(json.loads(text))
    if not edits:
        assert got == text
