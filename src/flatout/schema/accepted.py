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
    whole: bool = True

    def __str__(self) -> str:
        return f"a {'whole ' if self.whole else ''}number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Text:
    """A string of a pattern; ``title`` says which."""

    pattern: str
    title: str

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Table:
    """A table with all of the keys ``needed``, and with any of the others."""

    keys: Mapping[str, Sequence[Form]]
    needed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"a table {{{', '.join(f'{key} = {listed(forms)}' for key, forms in self.keys.items())}}}"


Form = bool | str | Number | Text | Table
SWITCH = (True, False)


def listed(forms: Iterable[Form]) -> str:
    """Return the accepted values as a person would write them."""
    texts = (json.dumps(form) if isinstance(form, (bool, str)) else str(form) for form in forms)
    return " or ".join(dict.fromkeys(texts))


def refusal(title: str, forms: Sequence[Form], value: object) -> str:
    """Return why none of the forms accepts the value, as a sentence; "" if one does."""
    inside = []
    for form in forms:
        if isinstance(form, Table):
            if isinstance(value, Mapping) and {*form.needed} <= value.keys() <= form.keys.keys():
                wrong = (refusal(f"{key!r} in {title}", form.keys[key], item) for key, item in value.items())
                inside.append(next(filter(None, wrong), ""))
        elif _takes(form, value):
            return ""
    if "" in inside:
        return ""
    return inside[0] if len(inside) == 1 else f"{title} must be {listed(forms)}, not {value!r}"


def _takes(form: Form, value: object) -> bool:
    if isinstance(form, Number):
        return type(value) in (int, int if form.whole else float) and form.low <= value <= form.high  # type: ignore[operator]
    if isinstance(form, Text):
        return isinstance(value, str) and re.fullmatch(form.pattern, value) is not None
    return type(value) is type(form) and value == form
