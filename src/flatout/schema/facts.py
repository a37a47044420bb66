"""Facts about the machine and the software. Facts about the script are in the training context."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

TESTED_TORCH = (2, 14)  # the newest release that flatout was tested with
DEVICE_VARIABLE = "FLATOUT_DEVICE"  # environment variable with the device of `--device`


def untested_torch(torch: str) -> str:
    """Return a sentence about a version of torch that is newer than the tested ones; "" for others."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    if found is None or (int(found[1]), int(found[2])) <= TESTED_TORCH:
        return ""
    return f"torch {torch} is newer than {'.'.join(map(str, TESTED_TORCH))}, the newest release that flatout was tested with"


def machine_name(cpu: object, cores: object, gpus: Iterable[object]) -> str:
    """Name a machine by what its speed depends on; records of another name are of another machine."""
    return ", ".join([f"{cpu}, {cores} cores", *map(str, gpus)])


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """Facts about the machine and the software."""

    cpu: str = "unknown"
    cores: int = 1  # cores available to this process, after affinity and cgroup quota
    memory_bytes: int = 0
    cpu_flags: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    system: str = ""
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # distribution name -> version
    environment: dict[str, str] = field(default_factory=dict)  # the variables that levers use
    allocators: dict[str, str] = field(default_factory=dict)  # malloc name -> path of its library

    @property
    def redirected_device(self) -> str:
        """Return the device that the program is redirected to (`--device`), or "" without a redirection."""
        return self.environment.get(DEVICE_VARIABLE, "")

    @property
    def machine(self) -> str:
        return machine_name(self.cpu, self.cores, (gpu.name for gpu in self.gpus))

    @property
    def description(self) -> dict[str, Any]:
        """Return the machine for a record."""
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "system": self.system,
            "device": self.redirected_device,
            "gpus": [{**vars(gpu), "capability": list(gpu.capability)} for gpu in self.gpus],
        }

    @property
    def cuda(self) -> bool:
        return bool(self.gpus)

    def gpu(self, index: int | None) -> Gpu | None:
        """Return the GPU with this torch index, or None without GPUs.

        The first GPU is the default. It is also used if the index does not exist, as with a single redirected
        GPU."""
        return self.gpus[index if index is not None and index < len(self.gpus) else 0] if self.gpus else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        gpus = tuple(Gpu(g["name"], g["memory_bytes"], tuple(g["capability"])) for g in data.get("gpus", ()))
        return cls(**{**data, "gpus": gpus, "cpu_flags": tuple(data.get("cpu_flags", ()))})
