"""Records of `flatout doctor`: the machine snapshot and the checks.

A machine snapshot keeps texts unchanged: files of /proc, output of programs, tracebacks. A value that is not
available is absent or None: a check must be able to tell "none" from "not checked".
"""

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.enums import StrEnum
from flatout.schema.records import Record

SNAPSHOT_SCHEMA = 1


class Verdict(StrEnum):
    """Outcome of a check. Checks are shown in the order of the members."""

    PROBLEM = "problem"  # training will not start, not use the GPU, or die
    WARNING = "warning"  # it costs time or breaks under load
    NOTE = "note"  # worth knowing; may be intended
    NOT_CHECKED = "not checked"
    OK = "ok"


@dataclass
class CommandResult(Record):
    """Result of running a program. ``code`` is None if the program is missing or timed out."""

    command: list[str]
    code: int | None = None
    out: str = ""
    err: str = ""
    installed: bool = True
    timed_out: bool = False

    @property
    def output(self) -> str:
        return f"{self.out}\n{self.err}".strip()


@dataclass
class Disk(Record):
    """Space of the file system below a path, in bytes. ``writable`` is whether this user may write there."""

    path: str
    total_bytes: int
    free_bytes: int
    free_files: int | None = None
    writable: bool | None = None


@dataclass
class MachineSnapshot(Record):
    """Snapshot of a machine.

    * ``files`` are texts by absolute path, or None if unreadable.
    * ``folders`` are the names in a folder.
    * ``environment`` has only the relevant variables.
    * ``python`` describes this interpreter.
    * ``packages`` are the installed distributions as [name, version, folder].
    * ``torch`` is the output of a child that imported torch, as far as it got.
    * ``command_results`` are by title: nvidia-smi, c++, start-up hook, import torch."""

    schema: int = SNAPSHOT_SCHEMA
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
    command_results: dict[str, CommandResult] = field(default_factory=dict)
    disks: dict[str, Disk] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """Return the text of a file, or None if it is missing or was not read."""
        return self.files.get(path)

    def variable(self, name: str) -> str | None:
        return (self.environment or {}).get(name)

    def distribution(self, name: str) -> str | None:
        """Return the version of an installed distribution: the first on the path, as for an import."""
        return next((version for package, version, _ in self.packages or () if package == name), None)

    @property
    def has_nvidia_on_pci(self) -> bool | None:
        """Return whether the PCI bus has an NVIDIA display device, or None if the bus is not readable."""
        devices = self.folders.get("/sys/bus/pci/devices")
        if devices is None:
            return None
        paths = [f"/sys/bus/pci/devices/{name}" for name in devices]
        return any(
            (self.text(f"{path}/vendor") or "").strip() == "0x10de"
            and (self.text(f"{path}/class") or "").startswith("0x03")
            for path in paths
        )


@dataclass
class CheckResult(Record):
    """One check.

    ``observed`` is a sentence with the observed values. ``fix`` is the command that fixes it, or "" if nothing
    is wrong."""

    code: str
    name: str
    theme: str
    verdict: str
    observed: str
    why: str = ""
    fix: str = ""
    evidence: list[str] = field(default_factory=list)


CEILINGS_SCHEMA = 1

# In the order in which they are measured and shown. "tf32" is float32 data multiplied by Tensor Cores.
MATMUL_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass
class Ceiling(Record):
    """One measured ceiling.

    ``value`` is the best of ``n`` repetitions, ``low`` and ``high`` are the quartiles. ``value`` is None if the
    benchmark did not run; ``note`` says why, or the sizes. ``device`` is "cpu" or "cuda"."""

    name: str
    device: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    note: str = ""


@dataclass
class CeilingsRecord(Record):
    key: str  # of the machine, see measure/ceilings.machine_key
    schema: int = CEILINGS_SCHEMA
    created: str = ""
    flatout: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    threads: int = 0  # per operation, as chosen by torch
    busy_cores: float | None = None  # cores used by other processes just before
    ceilings: list[Ceiling] = field(default_factory=list)

    def values(self, device: str) -> dict[str, float]:
        """Return the figures of a device by name."""
        return {
            ceiling.name: ceiling.value
            for ceiling in self.ceilings
            if ceiling.device == device and ceiling.value is not None
        }
