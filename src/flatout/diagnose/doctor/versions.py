"""Compatible versions of torch, CUDA builds, Python, drivers, GPUs and glibc.

The data is in versions.json, each row with its source and date.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flatout.diagnose.doctor.check import dotted, version

TABLE = Path(__file__).with_name("versions.json")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class TorchBuild:
    """One CUDA build of a torch release. Unknown values are None. Capabilities are for the x86-64 wheel."""

    cuda: str
    cudnn: str | None
    nccl: str | None
    capabilities: tuple[str, ...] | None

    @property
    def tag(self) -> str:
        return "cu" + self.cuda.replace(".", "")


@dataclass(frozen=True)
class TorchRelease:
    torch: str
    python_min: tuple[int, ...]
    python_max: tuple[int, ...]
    python_experimental: tuple[int, ...] | None
    glibc_min: tuple[int, ...] | None
    builds: tuple[TorchBuild, ...]

    def build(self, cuda: str | None) -> TorchBuild | None:
        wanted = version(cuda)
        return next((b for b in self.builds if wanted and version(b.cuda) == wanted[:2]), None)


@dataclass(frozen=True)
class VersionTable:
    releases: tuple[TorchRelease, ...]  # newest first
    drivers: dict[int, tuple[int, ...]]  # by CUDA's major version
    index: str
    torch_min: tuple[int, ...]  # supported by this flatout
    python_min: tuple[int, ...]

    def release(self, torch: str | None) -> TorchRelease | None:
        """The release of any patch version, or None if the table does not have it."""
        wanted = version(torch)
        return next((r for r in self.releases if wanted and version(r.torch) == wanted[:2]), None)

    def driver_for(self, cuda: str | None) -> tuple[int, ...] | None:
        """The oldest Linux driver that runs this CUDA version, by minor version compatibility."""
        wanted = version(cuda)
        return self.drivers.get(wanted[0]) if wanted else None

    def build_for_driver(self, release: TorchRelease, driver: tuple[int, ...]) -> TorchBuild | None:
        """The newest CUDA build of a release that a driver supports."""
        fitting = [
            b for b in release.builds if (least := self.driver_for(b.cuda)) is not None and driver >= least
        ]
        return max(fitting, key=lambda b: version(b.cuda) or (), default=None)

    def install(self, torch: str, build: str) -> str:
        """The command that installs a build ("cu126", "cpu") of a release."""
        return f"pip install --force-reinstall torch=={dotted(version(torch) or ())} --index-url {self.index.format(build=build)}"


def known(value: object) -> str | None:
    return value if isinstance(value, str) and value != UNKNOWN else None


@cache
def versions() -> VersionTable:
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    releases = tuple(
        TorchRelease(
            row["torch"],
            _numbers(row["python_min"]),
            _numbers(row["python_max"]),
            version(row.get("python_experimental")),
            version(known(row["glibc_min"])),
            tuple(
                TorchBuild(
                    b["cuda"],
                    known(b["cudnn"]),
                    known(b["nccl"]),
                    None if b["capabilities_x86_64"] == UNKNOWN else tuple(b["capabilities_x86_64"]),
                )
                for b in row["builds"]
            ),
        )
        for row in data["torch"]
    )
    ours = data["flatout"]
    return VersionTable(
        releases,
        {row["cuda_major"]: _numbers(row["driver_min"]) for row in data["drivers"]},
        data["index"],
        _numbers(ours["torch_min"]),
        _numbers(ours["python_min"]),
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Parses a version of the table. Raises ValueError for an invalid row."""
    numbers = version(text)
    if numbers is None:
        raise ValueError(f"{text!r} in {TABLE.name} is not a version")
    return numbers
