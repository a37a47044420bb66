"""The Plan: a frozen, ordered set of choices, and the only configuration type of flatout.

On disk it is TOML. tomlkit writes it, with the evidence as comments. The standard library reads it, so a
program that runs under a Plan never needs tomlkit.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.schema.enums import Origin
from flatout.schema.errors import PlanError
from flatout.schema.lever import Value

PLAN_SCHEMA = 1
MAX_PLAN_BYTES = 64 * 1024  # tomllib needs quadratic time for a.a.a.a...: 74 s for 100 kB


@dataclass(frozen=True)
class Choice:
    """A lever with its value, its origin and, if measured, its evidence."""

    name: str
    value: Value
    origin: Origin = Origin.USER
    evidence: str = ""

    @property
    def text(self) -> str:
        return format_choice(self.name, self.value)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "origin": self.origin.value,
            "evidence": self.evidence,
        }


@dataclass(frozen=True)
class Plan:
    """Choices by lever.

    ``made_for`` describes what the Plan was tuned on: command, script digest, machine, versions."""

    choices: tuple[Choice, ...] = ()
    made_for: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [choice.name for choice in self.choices]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise PlanError(f"the plan names {', '.join(duplicates)} twice: keep one line of each")

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def names(self) -> set[str]:
        return {choice.name for choice in self.choices}

    def get(self, name: str) -> Choice | None:
        return next((choice for choice in self.choices if choice.name == name), None)

    def with_choice(self, choice: Choice) -> Plan:
        return Plan((*self.without(choice.name).choices, choice), self.made_for)

    def without(self, name: str) -> Plan:
        return Plan(tuple(c for c in self.choices if c.name != name), self.made_for)

    def on_top_of(self, base: Plan) -> Plan:
        """Return the choices of ``base`` overridden by these."""
        return Plan((*(c for c in base.choices if self.get(c.name) is None), *self.choices), self.made_for)

    @property
    def digest(self) -> str:
        """Return twelve hex digits that depend only on names and values, not on order, origin or evidence."""
        body = json.dumps(sorted((c.name, c.value) for c in self.choices), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:12]

    def describe(self) -> str:
        return ", ".join(c.text for c in self.choices) or "plain"

    def to_json(self) -> dict[str, Any]:
        return {"choices": [c.to_json() for c in self.choices], "made_for": dict(self.made_for)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        choices = [
            Choice(c["name"], c["value"], Origin(c["origin"]), c.get("evidence", "")) for c in data["choices"]
        ]
        return cls(tuple(choices), data.get("made_for", {}))

    def to_toml(self) -> str:
        import tomlkit

        document = tomlkit.document()
        document.add(
            tomlkit.comment("Written by `flatout tune`. `flatout plan` shows it with the equivalent code.")
        )
        document["schema"] = PLAN_SCHEMA
        if self.made_for:
            document["made_for"] = dict(self.made_for)
        levers = tomlkit.table()
        for choice in self.choices:
            entry = tomlkit.table()
            if choice.evidence:
                entry.add(tomlkit.comment("".join(c if c.isprintable() else " " for c in choice.evidence)))
            entry["value"] = choice.value
            entry["origin"] = choice.origin.value
            if choice.evidence:
                entry["evidence"] = choice.evidence
            levers[choice.name] = entry
        document["levers"] = levers
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, source: str = "the plan") -> Plan:
        """Read a Plan.

        A lever is ``name = value``, or a table with ``value``, ``origin`` and ``evidence``."""
        if len(text) > MAX_PLAN_BYTES:
            raise PlanError(
                f"{source} is {len(text):,} characters long; a plan is never that large. Is it the right file?"
            )
        try:
            data = read_toml(text)
        except ValueError as error:
            raise PlanError(
                f"{source} is not valid TOML ({error}). Fix it, or delete it and run `flatout tune` again."
            ) from None
        schema = data.get("schema", PLAN_SCHEMA)
        if schema != PLAN_SCHEMA:
            raise PlanError(
                f"{source} has schema {schema!r}; this flatout reads schema {PLAN_SCHEMA}. Run `flatout tune` again."
            )
        levers, made_for = data.get("levers", {}), data.get("made_for", {})
        if not isinstance(levers, dict) or not isinstance(made_for, dict):
            raise PlanError(
                f"{source}: [levers] and [made_for] must be tables. `flatout plan --template` prints a template."
            )
        unknown = [key for key in data if key not in ("schema", "levers", "made_for")]
        if unknown:  # a lever outside of [levers] would be ignored silently
            raise PlanError(
                f"{source} has the unknown key {unknown[0][:40]!r}; levers belong below [levers]. `flatout plan --template` prints a template."
            )
        return cls(tuple(_choices(levers, source)), made_for)


def _choices(levers: Mapping[str, Any], source: str) -> Iterable[Choice]:
    for name, entry in levers.items():
        origin, evidence, value = Origin.FILE, "", entry
        if isinstance(entry, dict) and "value" in entry:
            value, evidence = entry["value"], entry.get("evidence", "")
            try:
                origin = Origin(entry.get("origin", "file"))
            except ValueError:
                raise PlanError(
                    f"{source}: {name} has the unknown origin {entry['origin']!r}; use one of {', '.join(Origin)}."
                ) from None
        if not is_value(value) or not isinstance(evidence, str):
            raise PlanError(
                f"{source}: the value of {name} is {value!r}; use true, a number, a string, or a table of these."
            )
        yield Choice(name, value, origin, evidence)


def is_value(value: object) -> bool:
    """Return whether this is a value for a lever: a boolean, a number, a string, or a table of these."""
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and isinstance(item, (bool, int, float, str)) for key, item in value.items()
        )
    return isinstance(value, (bool, int, float, str))


def format_choice(name: str, value: Value) -> str:
    """Format a choice for users: ``channels_last`` · ``threads=1`` · ``loader(workers=2)``."""
    if value is True:
        return name
    if isinstance(value, dict):
        return f"{name}({', '.join(f'{k}={v}' for k, v in value.items())})"
    return f"{name}={value}"


DOTTED = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){33}""")


def read_toml(text: str) -> dict[str, Any]:
    """Raises ValueError, also for a number of thousands of digits."""
    if DOTTED.search(text):  # tomllib needs quadratic memory for dotted keys: a gigabyte for 60 kB
        raise ValueError("a key has too many parts")
    if sys.version_info >= (3, 11):
        import tomllib  # novm: guarded, which vermin does not see
    else:
        import tomli as tomllib  # the same parser
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
