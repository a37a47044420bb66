"""The ceilings of this machine as `flatout doctor --bench` left them: where they lie, and how they are read again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from flatout.plan.ceilings import CEILINGS_SCHEMA, CeilingsRecord
from flatout.plan.facts import Facts
from flatout.plan.folder import read_json, write_json


def machine_key(facts: Facts) -> str:
    """What the figures depend on, as twelve hexadecimal digits: the processor, the cores this process may use, the GPUs, torch."""
    parts = [facts.cpu, str(facts.cores), *(gpu.name for gpu in facts.gpus), facts.versions.get("torch", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def place_of(key: str, folder: Path | None = None) -> Path:
    """The file of one machine, below the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    if folder is None:
        given = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()) / "flatout"
    return folder / f"ceilings-{key}.json"


def read(facts: Facts, folder: Path | None = None) -> CeilingsRecord | None:
    """The whole record of this machine, or None where nobody measured it, or not in a way that can be read."""
    key = machine_key(facts)
    data = read_json(place_of(key, folder))
    try:
        record = CeilingsRecord.from_json(data)
    except (TypeError, AttributeError):
        return None
    return record if record.schema == CEILINGS_SCHEMA and record.key == key else None


def load(facts: Facts, device: str = "cpu", folder: Path | None = None) -> dict[str, float] | None:
    """The ceilings of ``device`` ("cpu" or "cuda") by the names of ``plan.ceilings.NAMES``; None where they were never measured.

    A name is missing where its figure could not be had. ``facts`` are those of ``probe.machine.look()``.
    """
    record = read(facts, folder)
    return record.values(device) if record is not None else None


def save(record: CeilingsRecord, folder: Path | None = None) -> Path:
    """Raises StorageError."""
    path = place_of(record.key, folder)
    write_json(path, record.to_json())
    return path
