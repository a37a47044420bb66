"""Applies the choices of a Plan in the order of the lever table, and can remove the live ones.

A lever that fails is undone, reported and left out. The program continues without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.agent.ledger import Ledger
from flatout.schema.enums import Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo
from flatout.schema.plan import Choice, Plan
from flatout.schema.program import TrainingContext

BEFORE_FIRST_STEP = (Moment.IMPORT, Moment.LOADER)
AFTER_FIRST_STEP = (Moment.MODEL, Moment.OPTIMIZER, Moment.STEP)


@dataclass
class Outcome:
    """The result of one choice: applied, or left out with a reason."""

    choice: Choice
    applied: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.choice.name, "value": self.choice.value, "reason": self.reason}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        return cls(Choice(data["name"], data["value"]), not data["reason"], data["reason"])


class Applier:
    def __init__(self, table: Iterable[Lever], facts: Facts, context: TrainingContext) -> None:
        self.table = {lever.name: lever for lever in table}
        self.facts = facts
        self.context = context
        self.outcomes: list[Outcome] = []
        self._applied: list[tuple[Choice, Undo]] = []

    def lever(self, choice: Choice) -> Lever | None:
        return self.table.get(choice.name)

    def start(self, plan: Plan, moments: Sequence[Moment]) -> None:
        """Apply the choices of these moments. ``outcomes`` records those that cannot be applied."""
        for choice in self.in_order(plan.choices):
            lever = self.lever(choice)
            if lever is None:
                if Moment.IMPORT in moments:
                    self.outcomes.append(
                        Outcome(
                            choice, False, "this version of flatout has no such lever; see `flatout levers`"
                        )
                    )
            elif lever.moment in moments:
                self.outcomes.append(self._apply(lever, choice))

    def switch(self, choices: Sequence[Choice]) -> list[Outcome]:
        """Apply exactly these live choices, in addition to those from the start.

        Used between two blocks of steps.
        """
        wanted = self.in_order(choices)
        unchanged = 0
        while (
            unchanged < len(wanted)
            and unchanged < len(self._live())
            and self._live()[unchanged][0] == wanted[unchanged]
        ):
            unchanged += 1
        for choice, undo in reversed(self._live()[unchanged:]):
            undo()
            self._applied.remove((choice, undo))
        outcomes = []
        for choice in wanted[unchanged:]:
            lever = self.lever(choice)
            if lever is None or lever.apply is None:
                outcomes.append(Outcome(choice, False, "it cannot be switched while the program runs"))
            else:
                outcomes.append(self._apply(lever, choice, check_program=False))
        return outcomes

    def options(self) -> dict[str, Options | Skip]:
        """The answer of every lever for this program, in the table's order."""
        answers: dict[str, Options | Skip] = {}
        for name, lever in self.table.items():
            try:
                answers[name] = lever.applies(self.facts, self.context)
            except Exception as error:
                answers[name] = Skip(f"its check of this program failed ({type(error).__name__}: {error})")
        return answers

    def _live(self) -> list[tuple[Choice, Undo]]:
        return [
            (c, u)
            for c, u in self._applied
            if self.table[c.name].live and self.table[c.name].moment is not Moment.PROCESS
        ]

    def in_order(self, choices: Sequence[Choice]) -> list[Choice]:
        """The choices in the order in which they act."""
        order = {name: i for i, name in enumerate(self.table)}
        return sorted(choices, key=lambda c: order.get(c.name, len(order)))

    def _apply(self, lever: Lever, choice: Choice, check_program: bool = True) -> Outcome:
        clash = next((c.name for c, _ in self._applied if c.name in lever.excludes), None)
        if clash:
            return Outcome(choice, False, f"it cannot be combined with {clash}")
        missing = next((name for name in lever.needs if all(c.name != name for c, _ in self._applied)), None)
        if missing:
            return Outcome(choice, False, f"it requires {missing}, which is not applied")
        ledger = Ledger()  # one per lever, so that each can be removed separately
        try:
            answer = lever.applies(self.facts, self.context) if check_program else None
            if isinstance(answer, Skip):
                return Outcome(choice, False, answer.reason)
            if lever.apply is None:
                return Outcome(choice, False, "it acts before the program starts; use `flatout run`")
            if isinstance(answer, Options):
                choice = replace(choice, value=answer.value_for(choice.value))
            self._applied.append((choice, lever.apply(self.context, choice.value, ledger)))
            return Outcome(choice, True)
        except Exception as error:
            try:
                ledger.restore()
            except RuntimeError:
                pass  # report the first failure
            return Outcome(choice, False, _failed(error))


def before_start(
    table: Iterable[Lever], plan: Plan, facts: Facts, check_machine: bool = True
) -> tuple[dict[str, str], list[Outcome]]:
    """Apply the PROCESS levers of a plan, which act before the program starts.

    ``check_machine``: leave out levers that do not apply to this machine, and choose an available value.

    Returns environment variables for the program, and an outcome for each of these levers.
    """
    variables: dict[str, str] = {}
    outcomes = []
    for lever in table:
        choice = plan.get(lever.name)
        if choice is None or lever.moment is not Moment.PROCESS:
            continue
        try:
            answer = lever.applies(facts, None) if check_machine else None
            if isinstance(answer, Skip):
                outcomes.append(Outcome(choice, False, answer.reason))
                continue
            if answer is not None:
                choice = replace(choice, value=answer.value_for(choice.value))
            variables |= lever.environment(facts, choice.value)
            outcomes.append(Outcome(choice, True))
        except LookupError as error:  # the value is not available here
            outcomes.append(Outcome(choice, False, str(error) or "it is not available here"))
        except Exception as error:
            outcomes.append(Outcome(choice, False, _failed(error)))
    return variables, outcomes


def _failed(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"it failed to start ({type(error).__name__}: {lines[0] if lines else 'no message'})"


def one_line(outcomes: Sequence[Outcome]) -> str:
    """The line that a run prints at its start: what is applied, and what is not, with the reason."""
    applied = ", ".join(o.choice.text for o in outcomes if o.applied) or "nothing"
    skipped = "; ".join(f"{o.choice.text} ({o.reason})" for o in outcomes if not o.applied)
    return f"applied {applied}" + (f"; not applied: {skipped}" if skipped else "")
