"""The records that flatout writes or prints, and the JSON Schema (draft 2020-12) of each, made from its fields."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class Published:
    """A record that flatout writes or prints.

    ``file`` is the file of the job's folder, or "". ``printed`` is the command that prints it, or "".
    ``computed`` are the properties that its JSON has besides its fields.
    """

    record: str  # module:class, below flatout.schema
    file: str = ""
    printed: str = ""
    computed: tuple[str, ...] = ()

    @property
    def type(self) -> type:
        module, _, name = self.record.partition(":")
        found: type = getattr(importlib.import_module(f"flatout.schema.{module}"), name)
        return found

    @property
    def number(self) -> int:
        """The number in the field ``schema``."""
        return next(each.default for each in fields(self.type) if each.name == "schema")  # type: ignore[return-value]


PUBLISHED = {
    "session": Published("session:SessionRecord", "session.json", "tune --json", ("outcome",)),
    "certificate": Published("session:CertificateRecord", "flatout.certificate.json"),
    "verification": Published("session:VerificationRecord", printed="verify --json"),
    "trial": Published("records:TrialRecord", "result.json (a trial)", "trial --json"),
    "profile": Published("profile:ProfileRecord", "profile.json", "profile --json"),
    "memory": Published("batch:MemoryForecast", "memory.json", "memory --json"),
    "batch": Published("batch:BatchRecord", "batch.json", "batch --json"),
    "lr": Published("batch:LrRecord", "lr.json", "lr --json"),
    "run": Published("run_request:RunSummary", "runs/*/rank0.json"),
    "compare": Published("compare:CompareRecord", "compare.json", "compare --json"),
    "scale": Published("scale:ScaleRecord", "scale.json", "scale --json"),
    "failure": Published("failure:FailureRecord", "failure.json"),
    "findings": Published("outputs:FindingsRecord", printed="check --json"),
    "explanations": Published("outputs:ExplanationsRecord", printed="explain --json"),
    "pages": Published("outputs:PagesRecord", printed="explain --list --json"),
    "doctor": Published("outputs:DoctorRecord", printed="doctor --json"),
    "plan": Published("outputs:PlanRecord", printed="plan --json"),
    "levers": Published("outputs:LeversRecord", printed="levers --json"),
    "history": Published("run_request:HistoryRecord", printed="ui --json"),
    "checkpoints": Published("outputs:CheckpointsRecord", printed="rescue --json"),
    "export": Published("outputs:ExportRecord", printed="rescue --to DIR --json"),
    "kernel_check": Published("outputs:KernelChecksRecord", printed="kernel check --json"),
}
SIMPLE: dict[Any, dict[str, Any]] = {
    Any: {},
    object: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},  # null: not finite
    NoneType: {"type": "null"},
}


def json_schema(name: str) -> dict[str, Any]:
    """Return the schema of a published record."""
    published = PUBLISHED[name]
    inner: dict[str, Any] = {}
    top = _table(published.type, inner)
    top["properties"]["schema"] = {"const": published.number}
    top["required"] = [*top.get("required", ()), "schema"]
    for each in published.computed:
        kind = get_type_hints(getattr(published.type, each).fget)["return"]
        top["properties"][each] = _kind(kind, inner, f"{name}.{each}")
    return {"$schema": DIALECT, "title": name, **top, **({"$defs": inner} if inner else {})}


def _table(record: type, inner: dict[str, Any]) -> dict[str, Any]:
    kinds, known = get_type_hints(record), list(_fields(record))
    found: dict[str, Any] = {"type": "object"}
    about = " ".join((record.__doc__ or "").split())
    if about and not about.startswith(f"{record.__name__}("):
        found["description"] = about
    found["properties"] = {name: _kind(kinds[name], inner, f"{record.__name__}.{name}") for name, _ in known}
    if required := [name for name, needed in known if needed]:
        found["required"] = required
    return found


def _fields(record: type) -> Iterator[tuple[str, bool]]:
    """Yield the name of each field, and whether it has no default."""
    for each in fields(record):
        yield each.name, each.default is MISSING and each.default_factory is MISSING


def _kind(kind: Any, inner: dict[str, Any], where: str) -> dict[str, Any]:
    if kind in SIMPLE:
        return dict(SIMPLE[kind])
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in inner:
            inner[kind.__name__] = {}  # a record may hold itself
            inner[kind.__name__] = _table(kind, inner)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [each.value for each in kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return {"anyOf": [_kind(each, inner, where) for each in arguments]}
    if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return {"type": "array", "items": _kind(arguments[0], inner, where)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_kind(each, inner, where) for each in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _kind(arguments[1], inner, where)}
    raise TypeError(f"{where} has the type {kind}, which has no JSON Schema")
