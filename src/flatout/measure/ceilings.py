"""Store and load the ceilings that `flatout doctor --bench` measured."""

import hashlib
import os
from pathlib import Path

from flatout.job.folder import read_json, write_json
from flatout.schema.facts import Facts
from flatout.schema.machine_snapshot import CEILINGS_SCHEMA, CeilingsRecord


def machine_key(facts: Facts) -> str:
    """Twelve hex digits that identify the machine.

    They depend on what affects the figures: the CPU, the cores available to this process, the GPUs, torch.
    """
    parts = [facts.cpu, str(facts.cores), *(gpu.name for gpu in facts.gpus), facts.versions.get("torch", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def record_path(key: str, folder: Path | None = None) -> Path:
    """The file of a machine, below the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    if folder is None:
        cache_home = os.environ.get("XDG_CACHE_HOME", "")
        folder = (
            Path(cache_home) if Path(cache_home).is_absolute() else Path("~/.cache").expanduser()
        ) / "flatout"
    return folder / f"ceilings-{key}.json"


def read(facts: Facts, folder: Path | None = None) -> CeilingsRecord | None:
    """The record of this machine, or None if it is missing or unreadable."""
    key = machine_key(facts)
    data = read_json(record_path(key, folder))
    try:
        record = CeilingsRecord.from_json(data)
    except (TypeError, AttributeError):
        return None
    return record if record.schema == CEILINGS_SCHEMA and record.key == key else None


def load(facts: Facts, device: str = "cpu", folder: Path | None = None) -> dict[str, float] | None:
    """The ceilings of ``device`` ("cpu" or "cuda") by name, or None if never measured.

    Unavailable figures are missing.
    """
    record = read(facts, folder)
    return record.values(device) if record is not None else None


def save(record: CeilingsRecord, folder: Path | None = None) -> Path:
    """Write a record. Raises StorageError."""
    path = record_path(record.key, folder)
    write_json(path, record.to_json())
    return path
