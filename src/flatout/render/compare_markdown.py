"""Render the result of `flatout compare` as Markdown, for the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flatout.render.compare_page import headline, phase_rows, rows
from flatout.render.formatting import one_line, sentence
from flatout.schema.compare import CompareRecord

MARKS = {"passed": "✅", "failed": "❌", "cannot tell": "❔"}


def compare_markdown(record: CompareRecord) -> str:
    """Return a heading, the gates, the table of both sides, the losses and the notes."""
    assert record.a is not None
    assert record.b is not None
    lines = [f"### {_text(headline(record))}", ""]
    lines += [
        f"* {MARKS.get(gate.verdict, '')} gate on {_text(gate.name)}: **{_text(gate.verdict)}**: {_text(sentence(gate.why))}"
        for gate in record.gates
    ]
    lines += ["", f"A: {_code(record.a.label)}  ", f"B: {_code(record.b.label)}", ""]
    lines += _table([*rows(record), *phase_rows(record)])
    lines += ["", f"Losses: **{_text(record.losses.verdict)}**: {_text(sentence(record.losses.why))}", ""]
    lines += [f"* {_text(sentence(note))}" for note in record.notes]
    return "\n".join(lines) + "\n\n"


def _table(body: Iterable[tuple[str, ...]]) -> list[str]:
    lines = ["| | A | B | change |", "|---|---:|---:|---|"]
    return lines + [f"| {' | '.join(_text(cell) for cell in row)} |" for row in body]


def _text(value: object) -> str:
    """Return one line in which no character is markup: labels and paths come from the user's repository."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!])", r"\\\1", one_line(value, 600))


def _code(value: object) -> str:
    return f"`{one_line(value, 200).replace('`', chr(39))}`"
