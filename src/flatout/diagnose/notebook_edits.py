"""Edits of a notebook's cells in its JSON text: every character outside an edit stays as it is.

A cell's source is one string or a list of strings. Both are edited where they stand, so indents, the order of
keys, escapes and outputs stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flatout.schema.findings import Edit

SPACE = re.compile(r"[ \t\r\n]*")
CHARACTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
Span = tuple[int, int]
DECODER = json.JSONDecoder()


@dataclass
class CellSource:
    """The source of one cell. ``strings`` are the spans of its strings in the JSON text, with their quotes."""

    text: str
    value: Span
    strings: list[Span]

    def characters(self) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the source, and for each of its characters the number of its string, its start and end."""
        found = [
            (number, start + 1 + one.start(), start + 1 + one.end())
            for number, (start, end) in enumerate(self.strings)
            for one in CHARACTER.finditer(self.text[start + 1 : end - 1])
        ]
        return "".join(json.loads(self.text[slice(*span)]) for span in self.strings), found

    @property
    def new_string(self) -> str:
        """What ends one string of the list and begins the next one; "" if the source is one string."""
        if self.text[self.value[0]] != "[":
            return ""
        before = self.strings[0][1] if len(self.strings) > 1 else self.value[0] + 1
        after = self.strings[1][0] if len(self.strings) > 1 else self.strings[0][0]
        return f'"{"" if len(self.strings) > 1 else ","}{self.text[before:after]}"'

    def encoded(self, text: str) -> str:
        """Text as the content of a JSON string, with \\u escapes only if the file has no other characters."""
        whole = json.dumps(text, ensure_ascii=self.text.isascii())[1:-1]
        return whole.replace("\\n", "\\n" + self.new_string)


def edit_notebook(text: str, edits: Iterable[tuple[int, Edit]]) -> str | None:
    """Return the JSON text with edits of cells, whose numbers begin with 1; None if two of them overlap.

    The text must be a notebook that ``probe.script.notebook`` reads. Lines of an edit count from the start of
    its cell.
    """
    cells = _cells(text)
    of_cell: dict[int, list[Edit]] = {}
    for number, edit in edits:
        of_cell.setdefault(number, []).append(edit)
    changes = [change for number, wanted in of_cell.items() for change in _changes(cells[number - 1], wanted)]
    parts, at = [], 0
    for start, end, new in sorted(changes):
        if start < at:
            return None
        parts += [text[at:start], new]
        at = end
    return "".join([*parts, text[at:]])


def _changes(cell: CellSource, edits: list[Edit]) -> Iterator[tuple[int, int, str]]:
    """The spans of the JSON text to replace, and what replaces them."""
    value, where = cell.characters()
    starts = [0]
    for line in value.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    newline = "\r\n" if "\r\n" in value else "\n"
    gone: set[int] = set()
    for edit in edits:
        start = starts[edit.line - 1] + edit.column - 1
        end = starts[edit.end_line - 1] + edit.end_column - 1
        new = cell.encoded(edit.text.replace("\n", newline))
        if start == end:
            at = where[start][1] if start in starts and start < len(where) else where[start - 1][2]
            yield at, at, new
            continue
        for number in range(where[start][0], where[end - 1][0] + 1):
            inside = [each for each in where[start:end] if each[0] == number]
            if not new and len(inside) == sum(each[0] == number for each in where):
                gone.add(number)
            elif inside:
                yield inside[0][1], inside[-1][2], new
                new = ""
    yield from _without(cell, gone)


def _without(cell: CellSource, gone: set[int]) -> Iterator[tuple[int, int, str]]:
    """The spans of strings of a source that are gone whole, with the commas between them."""
    spans, last = cell.strings, len(cell.strings) - 1
    if cell.text[cell.value[0]] != "[":
        yield from ((start + 1, end - 1, "") for number, (start, end) in enumerate(spans) if number in gone)
        return
    if len(gone) > last:
        yield cell.value[0] + 1, cell.value[1] - 1, ""
        return
    tail = last
    while tail in gone:
        tail -= 1
    if tail < last:
        yield spans[tail][1], spans[last][1], ""
    yield from ((spans[number][0], spans[number + 1][0], "") for number in gone if number < tail)


def _cells(text: str) -> list[CellSource]:
    whole = dict(_members(text, SPACE.match(text).end()))  # type: ignore[union-attr]
    found = []
    for start, _ in _elements(text, whole["cells"][0]):
        value = dict(_members(text, start)).get("source")
        if value is None:
            found.append(CellSource(text, (0, 0), []))
        else:
            strings = list(_elements(text, value[0])) if text[value[0]] == "[" else [value]
            found.append(CellSource(text, value, strings))
    return found


def _elements(text: str, at: int) -> Iterator[Span]:
    """The span of each element of the JSON list that begins at a place."""
    at = _next(text, at + 1)
    while text[at] != "]":
        _, end = DECODER.raw_decode(text, at)
        yield at, end
        at = _next(text, end)
        if text[at] == ",":
            at = _next(text, at + 1)


def _members(text: str, at: int) -> Iterator[tuple[str, Span]]:
    """The key of each member of the JSON object that begins at a place, and the span of its value."""
    at = _next(text, at + 1)
    while text[at] != "}":
        key, end = DECODER.raw_decode(text, at)
        at = _next(text, _next(text, end) + 1)
        _, end = DECODER.raw_decode(text, at)
        yield key, (at, end)
        at = _next(text, end)
        if text[at] == ",":
            at = _next(text, at + 1)


def _next(text: str, at: int) -> int:
    """The next place that is no white space."""
    return SPACE.match(text, at).end()  # type: ignore[union-attr]
