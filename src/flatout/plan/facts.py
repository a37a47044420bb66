"""What was seen of the machine and the software. What was seen of the script lives in the Scene."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ASKED_DEVICE = "FLATOUT_DEVICE"  # the variable that names the device of `--device`


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """``how`` names, for each field, where it was learned."""

    cpu: str = "unknown"
    cores: int = 1  # cores this process may use: affinity and cgroup quota counted in
    memory_bytes: int = 0
    cpu_flags: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    system: str = ""
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # distribution name -> version
    environment: dict[str, str] = field(default_factory=dict)  # the variables that levers care about
    allocators: dict[str, str] = field(default_factory=dict)  # malloc name -> path of its library
    how: dict[str, str] = field(default_factory=dict)

    @property
    def asked_device(self) -> str:
        """The device that the program is redirected to (`--device`); "" where it runs on its own."""
        return self.environment.get(ASKED_DEVICE, "")

    @property
    def cuda(self) -> bool:
        return bool(self.gpus)

    def gpu(self, index: int | None) -> Gpu | None:
        """The device that torch gives this number; the first where nobody has said one, or where one alone was asked for. None where there is none."""
        return self.gpus[index if index is not None and index < len(self.gpus) else 0] if self.gpus else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        gpus = tuple(Gpu(g["name"], g["memory_bytes"], tuple(g["capability"])) for g in data.get("gpus", ()))
        return cls(**{**data, "gpus": gpus, "cpu_flags": tuple(data.get("cpu_flags", ()))})
