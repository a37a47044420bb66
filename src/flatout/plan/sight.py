"""What `flatout doctor` saw of a machine, and what it concludes: plain records, JSON.

A Sight keeps texts as they were found (files of /proc, what programs printed, tracebacks), so that one recorded elsewhere is judged as if
it were here. What could not be seen is absent or None, never an invented value: a check must be able to tell "none" from "not looked at".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from flatout.plan.records import Record
from flatout.plan.shapes import MISFIT, fitted

SIGHT_SCHEMA = 1


class Verdict(StrEnum):
    """The order of the members is the order in which checks are shown."""

    PROBLEM = "problem"  # training will not start, not use the GPU, or die
    WARNING = "warning"  # it costs time or breaks under load
    NOTE = "note"  # worth knowing; may be meant
    UNSEEN = "not seen"  # could not be looked at
    OK = "ok"


@dataclass
class Ran(Record):
    """One program that was run. ``code`` is None where it was not there, or was ended for taking too long."""

    command: list[str]
    code: int | None = None
    out: str = ""
    err: str = ""
    there: bool = True
    timed_out: bool = False

    @property
    def said(self) -> str:
        return f"{self.out}\n{self.err}".strip()


@dataclass
class Disk(Record):
    """What the file system below a path has, in bytes; ``writable`` is whether this user may write there."""

    path: str
    total_bytes: int
    free_bytes: int
    free_files: int | None = None
    writable: bool | None = None


@dataclass
class Sight(Record):
    """Everything that was seen. ``files`` go by their absolute path, None where there was nothing to read.

    ``folders`` holds the names in a folder. ``environment`` holds the variables that matter and no other, ``python`` what this interpreter
    says of itself, ``packages`` each installed distribution as [name, version, folder], ``torch`` what a child that imported torch wrote
    (as far as it came), ``libraries`` the CUDA libraries on LD_LIBRARY_PATH by folder, ``preloads`` whether each file of LD_PRELOAD exists.
    """

    schema: int = SIGHT_SCHEMA
    flatout: str = ""
    created: str = ""
    working_folder: str = ""
    home_cache: str = ""
    temporary_folder: str = ""
    files: dict[str, str | None] = field(default_factory=dict)
    folders: dict[str, list[str] | None] = field(default_factory=dict)
    environment: dict[str, str] | None = None
    python: dict[str, Any] = field(default_factory=dict)
    packages: list[list[str]] | None = None
    torch: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Ran] = field(default_factory=dict)
    disks: dict[str, Disk] = field(default_factory=dict)
    libraries: dict[str, list[str]] | None = None
    preloads: dict[str, bool] | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sight:
        """What does not have its shape counts as not seen. Raises TypeError for what is JSON, and no Sight."""
        kept = fitted(data, SHAPE)
        if kept is MISFIT or data.get("schema") != SIGHT_SCHEMA:
            raise TypeError(f"a Sight is a table with the schema {SIGHT_SCHEMA}")
        kept["packages"] = [each for each in kept["packages"] if len(each) == 3] if "packages" in kept else None
        kept["runs"] = {name: Ran.from_json(run) for name, run in kept.get("runs", {}).items() if run.get("command")}
        kept["disks"] = {name: Disk.from_json(disk) for name, disk in kept.get("disks", {}).items() if {"path", "total_bytes", "free_bytes"} <= set(disk)}
        return super().from_json(kept)

    def text(self, path: str) -> str | None:
        """A file's text; None where it was not there or not looked at."""
        return self.files.get(path)

    def variable(self, name: str) -> str | None:
        return (self.environment or {}).get(name)

    def distribution(self, name: str) -> str | None:
        """The version of an installed distribution: of the first one on the path, as Python would take it."""
        return next((version for found, version, _ in self.packages or () if found == name), None)

    @property
    def pci_nvidia(self) -> bool | None:
        """Whether an NVIDIA display device sits on the PCI bus; None where the bus could not be looked at."""
        devices = self.folders.get("/sys/bus/pci/devices")
        if devices is None:
            return None
        for name in devices:
            kind = self.text(f"/sys/bus/pci/devices/{name}/class") or ""
            if (self.text(f"/sys/bus/pci/devices/{name}/vendor") or "").strip() == "0x10de" and kind.startswith("0x03"):
                return True
        return False


NONE = type(None)
_STAGES: dict[str, dict[str, Any]] = {
    "found": {"origin": (str, NONE), "places": [str], "compiled": [str]}, "imported": {"import_s": float, "file": (str, NONE)},
    "import failed": {"kind": str, "message": str, "traceback": str}, "build": {"version": str, "cuda": (str, NONE), "hip": (str, NONE), "debug": bool},
    "host": {"threads": int, "interop_threads": int, "capability": str, "mkl": bool, "mkldnn": bool, "openmp": bool}, "libraries": {"loaded": [str]},
    "numpy": {"version": (str, NONE), "works": bool, "why": str},
    "cuda": {"available": bool, "archs": [str], "cudnn": (int, NONE), "nccl": (str, NONE), "computes": bool,
             "devices": [{"name": str, "capability": [int], "memory_bytes": int, "bfloat16": bool}]},
}
SHAPE: dict[str, Any] = {
    "schema": int, "flatout": str, "created": str, "working_folder": str, "home_cache": str, "temporary_folder": str,
    "files": {str: (str, NONE)}, "folders": {str: [str]}, "environment": {str: str}, "packages": [[str]], "libraries": {str: [str]}, "preloads": {str: bool},
    "python": {"version": str, "implementation": str, "executable": str, "machine": str, "prefix": str, "base_prefix": str, "user_site": str,
               "user_site_used": bool, "path": [str], "free_threaded": bool, "dev_mode": bool, "libc": [str], "cpu_count": int, "header": bool, "root": bool,
               "torch_requires": [str],
               "soabi": (str, NONE)},
    "torch": {name: {**stage, "raised": str, "warnings": [str]} for name, stage in _STAGES.items()},
    "runs": {str: {"command": [str], "code": (int, NONE), "out": str, "err": str, "there": bool, "timed_out": bool}},
    "disks": {str: {"path": str, "total_bytes": int, "free_bytes": int, "free_files": (int, NONE), "writable": (bool, NONE)}},
}


@dataclass
class Check(Record):
    """One thing that was looked at. ``seen`` is a sentence with the values in it; ``mend`` is the one command, empty where nothing is wrong."""

    code: str
    name: str
    theme: str
    verdict: str
    seen: str
    why: str = ""
    mend: str = ""
    evidence: list[str] = field(default_factory=list)
