"""The values that a lever accepts. Every other value is rejected before a program starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A number in a range that includes both ends."""

    low: float
    high: float
    integer: bool = True

    def __str__(self) -> str:
        return f"a {'whole ' if self.integer else ''}number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Text:
    """A string that matches a pattern. ``title`` describes it."""

    pattern: str
    title: str

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Table:
    """A table with all ``required`` keys and any of the other keys."""

    keys: Mapping[str, Sequence[Form]]
    required: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"a table {{{', '.join(f'{key} = {describe_forms(forms)}' for key, forms in self.keys.items())}}}"
        )


Form = bool | str | Number | Text | Table
SWITCH = (True, False)


def describe_forms(forms: Iterable[Form]) -> str:
    """Return the accepted values as text for a message."""
    texts = (json.dumps(form) if isinstance(form, (bool, str)) else str(form) for form in forms)
    return " or ".join(dict.fromkeys(texts))


def rejection(title: str, forms: Sequence[Form], value: object) -> str:
    """Return why none of the forms accepts the value, as a sentence; "" if one does."""
    table_errors = []
    for form in forms:
        if isinstance(form, Table):
            if isinstance(value, Mapping) and {*form.required} <= value.keys() <= form.keys.keys():
                errors = (
                    rejection(f"{key!r} in {title}", form.keys[key], item) for key, item in value.items()
                )
                table_errors.append(next(filter(None, errors), ""))
        elif _accepts(form, value):
            return ""
    if "" in table_errors:
        return ""
    return (
        table_errors[0]
        if len(table_errors) == 1
        else f"{title} must be {describe_forms(forms)}, not {value!r}"
    )


def _accepts(form: Form, value: object) -> bool:
    if isinstance(form, Number):
        return type(value) in (int, int if form.integer else float) and form.low <= value <= form.high  # type: ignore[operator]
    if isinstance(form, Text):
        return isinstance(value, str) and re.fullmatch(form.pattern, value) is not None
    return type(value) is type(form) and value == form
