"""The metadata of a rescue checkpoint, as typed values, and the checkpoint that a program resumes from.

The manifest stores the metadata as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, verified
from flatout.job.trust import file_digest
from flatout.schema.errors import CannotResume, CheckpointError

# The environment that the bits of a training depend on: recorded with a checkpoint, compared at a resume.
#
# Any difference is reported and rules out bit-identity. Exact resume refuses then (`check_surroundings` before
# the program begins, `resume/session.py` at the resume point), flatout.Loop warns.


def environment(torch: ModuleType, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Everything besides its state that the bits of a training depend on.

    ``more``: values from the caller (length of the data, digest of the script, number of ranks). CUDA devices
    are included only if the process already uses CUDA. Querying them would start CUDA, and children forked
    later could not use it."""
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return {
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
        "machine": os.uname().machine,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "devices": list(map(torch.cuda.get_device_name, range(devices))),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "matmul precision": torch.get_float32_matmul_precision(),
        **more,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each difference as a sentence; empty if there is none."""
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: {_shown(before.get(name))} when it was saved, {_shown(now.get(name))} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)[:120]


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
    source file of the program. ``cost_s``: recent cost of a checkpoint."""

    journal: str
    program: tuple[str, ...]
    sources: Mapping[str, str]
    why_not: str
    cost_s: float = 0.0


@dataclass(frozen=True)
class CheckpointMeta:
    """``why``: what asked for the checkpoint. ``ran_s``: age of the process. ``at``: date and time.

    ``inside``: taken inside a step; ``updated``: some weights were already updated then. ``surroundings``:
    the environment that affects the bits (`environment`)."""

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
        entries = holds if isinstance(holds, list) else []
        return cls(
            why=_text(data.get("why")),
            ran_s=data["ran_s"] if isinstance(data.get("ran_s"), (int, float)) else None,
            at=_text(data.get("at")),
            inside=data.get("inside") is True,
            updated=data.get("updated") is True,
            holds=tuple(_saved_object(entry) for entry in entries if isinstance(entry, Mapping)),
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


# Settings that a program makes, or devices that it begins to use, after torch was imported.
SET_BY_PROGRAM = (
    "threads",
    "threads between operators",
    "devices",
    "deterministic algorithms",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "matmul precision",
)


def newest_resumable(folder: Path) -> tuple[Checkpoint | None, str]:
    """Return the newest valid checkpoint of this program, with its journal, from which it can be resumed exactly.

    If there is none, also return why the newest one cannot be resumed; "" if the program was not interrupted."""
    why_not = ""
    for path in CheckpointFolder(folder).paths():
        try:
            checkpoint = verified(path)
        except CheckpointError:
            continue
        exact = CheckpointMeta.from_json(checkpoint.manifest.metadata).exact
        is_of_program = exact is not None and exact.program == tuple(sys.orig_argv[1:])
        if exact is not None and is_of_program and (folder / Path(exact.journal).name).is_file():
            if not exact.why_not:
                return checkpoint, ""
            why_not = why_not or exact.why_not
    return None, why_not


def check_surroundings(torch: ModuleType, checkpoint: Checkpoint, meta: CheckpointMeta) -> None:
    """Raise CannotResume if something that affects the bits has changed, before the program has begun."""
    sources = meta.exact.sources if meta.exact is not None else {}
    changed = [name for name, digest in sources.items() if file_digest(name) != digest]
    if changed:
        raise CannotResume(
            f"{', '.join(os.path.relpath(name) for name in changed[:4])} has changed since {checkpoint.path.name} was saved"
        )
    before = meta.surroundings
    now = {**environment(torch), **{name: before.get(name) for name in SET_BY_PROGRAM}}
    if before.get("devices") and not torch.cuda.device_count():
        now["devices"] = []
    differs = differences(before, now)
    if differs:
        raise CannotResume(
            f"the environment differs from that of {checkpoint.path.name}: {'; '.join(differs)}"
        )
