"""Compatible versions of torch, CUDA builds, Python, drivers, GPUs and glibc.

The data is in versions.json, each row with its source and date.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flatout.diagnose.doctor.check import dotted, version

TABLE_FILE = Path(__file__).with_name("versions.json")


@dataclass(frozen=True)
class TorchRelease:
    torch: str
    python_min: tuple[int, ...]
    python_max: tuple[int, ...]
    python_experimental: tuple[int, ...] | None
    glibc_min: tuple[int, ...] | None  # None if unknown
    cuda_builds: tuple[str, ...]


@dataclass(frozen=True)
class VersionTable:
    releases: tuple[TorchRelease, ...]  # newest first
    drivers: dict[int, tuple[int, ...]]  # by CUDA's major version
    index: str
    torch_min: tuple[int, ...]  # supported by this flatout
    python_min: tuple[int, ...]

    def release(self, torch: str | None) -> TorchRelease | None:
        """The release of any patch version, or None if the table does not have it."""
        numbers = version(torch)
        return next((r for r in self.releases if numbers and version(r.torch) == numbers[:2]), None)

    def driver_for(self, cuda: str | None) -> tuple[int, ...] | None:
        """The oldest Linux driver that runs this CUDA version, by minor version compatibility."""
        numbers = version(cuda)
        return self.drivers.get(numbers[0]) if numbers else None

    def cuda_for_driver(self, release: TorchRelease, driver: tuple[int, ...]) -> str | None:
        """The CUDA version of the newest build of a release that a driver supports."""
        supported = [
            cuda
            for cuda in release.cuda_builds
            if (oldest := self.driver_for(cuda)) is not None and driver >= oldest
        ]
        return max(supported, key=lambda cuda: version(cuda) or (), default=None)

    def install_command(self, torch: str, cuda: str | None) -> str:
        """The command that installs the build of a release for a CUDA version, or for the CPU."""
        build = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        return f"pip install --force-reinstall torch=={dotted(version(torch) or ())} --index-url {self.index.format(build=build)}"


@cache
def versions() -> VersionTable:
    data = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    releases = tuple(
        TorchRelease(
            row["torch"],
            _numbers(row["python_min"]),
            _numbers(row["python_max"]),
            version(row.get("python_experimental")),
            version(row["glibc_min"]),
            tuple(build["cuda"] for build in row["builds"]),
        )
        for row in data["torch"]
    )
    return VersionTable(
        releases,
        {row["cuda_major"]: _numbers(row["driver_min"]) for row in data["drivers"]},
        data["index"],
        _numbers(data["flatout"]["torch_min"]),
        _numbers(data["flatout"]["python_min"]),
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Parses a version of the table. Raises ValueError for an invalid row."""
    numbers = version(text)
    if numbers is None:
        raise ValueError(f"{text!r} in {TABLE_FILE.name} is not a version")
    return numbers
