"""What a lever is: a frozen value with two functions. It never prints, times, or reads another lever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.words import Effect, Moment

Undo = Callable[[], None]
Value = bool | int | float | str | dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The values worth trying, likely best first.

    ``effect`` narrows or widens the lever's declared effect for this program: more loader workers, for
    example, are EXACT over a dataset that draws nothing and RESAMPLED over one that does.
    """

    values: tuple[Value, ...]
    effect: Effect | None = None

    def value_for(self, asked: Value) -> Value:
        """The value itself; for a lever that was only named (``true``) and has other values, the first of them."""
        return self.values[0] if asked is True and not any(value is True for value in self.values) else asked


@dataclass(frozen=True)
class Skip:
    """Why a lever does not apply here: a sentence for a person."""

    reason: str


class Comparison(StrEnum):
    """The comparison that must hold before a lever is kept (see ``flatout.measure.parity``)."""

    BITWISE = "bitwise"  # losses and weights are those of the plain run, bit for bit
    GRADIENT = "gradient"  # gradient, update and buffers of one step, beside a float64 reference
    DISTRIBUTION = "distribution"  # batches come from the same distribution


def _nothing_in_environment(facts: Facts, value: Value) -> Mapping[str, str]:
    return {}


def _anything(value: Value) -> None:
    pass


def _float32(value: Value) -> str:
    return ""


@dataclass(frozen=True)
class Lever:
    """One optimisation.

    ``name`` is the file's name and reads after "with". ``applies(facts, scene)`` answers Options or Skip;
    ``apply(scene, value, ledger)`` acts and returns the Undo. A PROCESS lever has ``environment`` instead:
    the variables that the program must be started with. ``live`` levers can be switched between two steps.
    ``check(value)`` raises TypeError, with a sentence, for a value that is none, wherever the program is not needed to tell.
    ``saves_memory`` levers are slower on purpose: the search looks at them only where memory is limited. ``needs`` are levers without which
    this one does nothing. ``half(value)`` names what a PRECISION lever computes or sends in fewer bits, as it stands in the
    verdict: "bfloat16 products". ``known_bad(scene, value, ledger)`` is a broken variant that the guard must reject. ``code(value)`` are
    the lines a person would write to have the lever without flatout.
    """

    name: str
    moment: Moment
    effect: Effect
    applies: Callable[[Facts, Any], Options | Skip]
    code: Callable[[Value], str]
    apply: Callable[[Any, Value, Any], Undo] | None = None
    environment: Callable[[Facts, Value], Mapping[str, str]] = _nothing_in_environment
    live: bool = False
    warms_up: bool = False  # the first steps after it was switched on are slow, and must be paid back
    guard: Comparison = Comparison.GRADIENT
    known_bad: Callable[[Any, Value, Any], Undo] | None = None
    after: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    saves_memory: bool = False
    check: Callable[[Value], Any] = _anything
    half: Callable[[Value], str] = _float32
    page: str = ""

    @property
    def of_one_process(self) -> bool:
        """Whether it counts on one process that fetches all samples and calls the model as the script wrote it."""
        return self.moment is Moment.LOADER or self.warms_up
