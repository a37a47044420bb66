"""The Lever type: a frozen value with two functions. A lever never prints, times, or reads another lever."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts


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
    if len(table_errors) == 1:
        return table_errors[0]
    return f"{title} must be {describe_forms(forms)}, not {value!r}"


def _accepts(form: Form, value: object) -> bool:
    if isinstance(form, Number):
        return type(value) in (int, int if form.integer else float) and form.low <= value <= form.high  # type: ignore[operator]
    if isinstance(form, Text):
        return isinstance(value, str) and re.fullmatch(form.pattern, value) is not None
    return type(value) is type(form) and value == form


Undo = Callable[[], None]
Value = bool | int | float | str | dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The values of a lever worth trying, likely best first.

    ``effect`` is a smaller effect than the lever declares, for this program. For example, more loader workers
    are RESAMPLED, but EXACT with a dataset that draws no random numbers."""

    values: tuple[Value, ...]
    effect: Effect | None = None

    def value_for(self, requested: Value) -> Value:
        """Return the requested value.

        If it is only ``true`` and not a value of the lever, return the first value."""
        is_open = requested is True and not any(value is True for value in self.values)
        return self.values[0] if is_open else requested


@dataclass(frozen=True)
class Skip:
    """The reason why a lever does not apply, as a sentence for the user."""

    reason: str


@dataclass(frozen=True)
class Lever:
    """One optimisation.

    * ``name`` is the file name and reads after "with".
    * ``moment`` is when it acts, in the order of a run.
    * ``effect`` is the most that it may change in any program, and so what the guard requires. Options may
      name a smaller effect for one program.
    * ``applies(facts, context)`` returns Options or Skip. ``context`` is the `TrainingContext` of
      schema/program.py, which lists what a lever can read. It is None before a program runs.
    * ``apply(context, value, ledger)`` applies the lever and returns its Undo.
    * ``environment`` replaces ``apply`` for a PROCESS lever: the variables to start the program with.
    * ``live`` levers can be switched between two steps, in the thread that trains. A setting that belongs to a
      thread (torch.set_flush_denormal) then misses all other threads, old and new.
    * ``accepts`` are the values that it takes. `--with` and plan files reject any other before a program starts.
    * ``sets_threads``: none of its values is chosen beside other processes.
    * ``warms_up``: the first steps with it are slow, a cost that later steps must recover.
    * ``bare``: the name without a value means the first value that it offers.
    * ``saves_memory`` levers trade speed for memory: the search tries them only under a memory limit.
    * ``takes_memory`` says in a sentence what it may need memory for.
    * ``after`` are levers that act before this one. A test checks that they come first in the table.
    * ``excludes`` are levers that the search does not combine with this one.
    * ``replaces`` are levers that may be superfluous beside this one.
    * ``needs`` are levers without which this one has no effect.
    * ``reduced_part(value)`` says what a PRECISION lever computes or sends in fewer bits, for the verdict: "bfloat16
      products".
    * ``code(value)`` returns the lines that a user would write to get the lever without flatout.
    * ``page`` is the docstring of its file, which ``flatout levers NAME`` shows."""

    name: str
    moment: Moment
    effect: Effect
    applies: Callable[[Facts, Any], Options | Skip]
    code: Callable[[Value], str] = lambda value: ""
    apply: Callable[[Any, Value, Any], Undo] | None = None
    environment: Callable[[Facts, Value], Mapping[str, str]] = lambda facts, value: {}
    live: bool = False
    sets_threads: bool = False
    warms_up: bool = False
    after: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    saves_memory: bool = False
    takes_memory: str = ""
    accepts: Sequence[Form] = (True,)
    bare: bool = True
    reduced_part: Callable[[Value], str] = lambda value: ""
    page: str = ""

    def check(self, value: Value) -> None:
        """Raise TypeError with a sentence if the lever does not accept this value of a user."""
        why = rejection(f"the value of {self.name}", self.accepts, value)
        if why and not (self.bare and value is True):
            raise TypeError(f"{why}. `flatout levers {self.name}` shows its page.")

    @property
    def single_process(self) -> bool:
        """Return whether it needs one process that fetches all samples and calls the model as in the script."""
        return self.moment is Moment.LOADER or (self.warms_up and self.moment is Moment.MODEL)
