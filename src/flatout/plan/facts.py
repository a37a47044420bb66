"""What was seen of the machine and the software. What was seen of the script lives in the Scene."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
    def cuda(self) -> bool:
        return bool(self.gpus)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        gpus = tuple(Gpu(g["name"], g["memory_bytes"], tuple(g["capability"])) for g in data.get("gpus", ()))
        return cls(**{**data, "gpus": gpus, "cpu_flags": tuple(data.get("cpu_flags", ()))})
