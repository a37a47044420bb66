"""The metadata of a rescue checkpoint, as typed values. The manifest stores it as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SavedObject:
    """One thing that a checkpoint holds: its kind, name in the script, code that finds it, type and size."""

    kind: str
    name: str
    code: str
    type: str
    values: int


@dataclass(frozen=True)
class ExactMeta:
    """What an exact resume needs besides the state. ``why_not``: why this checkpoint cannot be resumed, or "".

    ``journal``: name of the journal file. ``program``: words of the command. ``sources``: digest of each
    source file of the program. ``cost_s``: recent cost of a checkpoint.
    """

    journal: str
    program: tuple[str, ...]
    sources: Mapping[str, str]
    why_not: str
    cost_s: float = 0.0


@dataclass(frozen=True)
class CheckpointMeta:
    """``why``: what asked for the checkpoint. ``ran_s``: age of the process. ``at``: date and time.

    ``inside``: taken inside a step; ``updated``: some weights were already updated then. ``surroundings``:
    the environment that affects the bits (`checkpoint.environment`).
    """

    why: str = ""
    ran_s: float | None = None
    at: str = ""
    inside: bool = False
    updated: bool = False
    holds: tuple[SavedObject, ...] = ()
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    exact: ExactMeta | None = None

    def position(self, step: int) -> str:
        """The position of a checkpoint: ``step 120``, or ``step 121 (in progress)``."""
        return f"step {step + 1} (in progress)" if self.inside else f"step {step}"

    @property
    def resumes(self) -> bool:
        """Whether the program can be resumed exactly from this checkpoint."""
        return self.exact is not None and not self.exact.why_not

    def to_json(self) -> dict[str, Any]:
        data = {**vars(self), "holds": [dict(vars(kept)) for kept in self.holds]}
        del data["exact"]
        if self.exact is not None:
            data |= {
                "exact": self.exact.why_not,
                "journal": self.exact.journal,
                "program": list(self.exact.program),
                "sources": dict(self.exact.sources),
                "cost_s": self.exact.cost_s,
            }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointMeta:
        """Read metadata of any origin: a value of the wrong type counts as missing."""
        holds = data.get("holds")
        return cls(
            why=_text(data.get("why")),
            ran_s=data["ran_s"] if isinstance(data.get("ran_s"), (int, float)) else None,
            at=_text(data.get("at")),
            inside=data.get("inside") is True,
            updated=data.get("updated") is True,
            holds=tuple(_saved_object(entry) for entry in holds if isinstance(entry, Mapping))
            if isinstance(holds, list)
            else (),
            surroundings=_mapping(data.get("surroundings")),
            exact=_exact(data) if isinstance(data.get("exact"), str) else None,
        )


def _exact(data: Mapping[str, Any]) -> ExactMeta:
    program, cost_s = data.get("program"), data.get("cost_s")
    return ExactMeta(
        journal=_text(data.get("journal")),
        program=tuple(map(str, program)) if isinstance(program, list) else (),
        sources={str(file): str(digest) for file, digest in _mapping(data.get("sources")).items()},
        why_not=_text(data.get("exact"))
        or ("" if isinstance(data.get("sources"), Mapping) else "its metadata lists no source files"),
        cost_s=float(cost_s) if isinstance(cost_s, (int, float)) else 0.0,
    )


def _saved_object(data: Mapping[str, Any]) -> SavedObject:
    kind, name, code, type_ = (_text(data.get(key)) for key in ("kind", "name", "code", "type"))
    return SavedObject(kind, name, code, type_, _count(data.get("values")))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
