"""What users install, made as `pip wheel .` and `python -m build --sdist` make it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import built
from limits import hang_s

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Artefacts:
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory):
    for name in ("build", "hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(name, reason=f"not run: {name} is not installed; `make test` installs it")
    one, two, three = (tmp_path_factory.mktemp(name) for name in ("wheel", "sdist", "wheel_of_sdist"))
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", two, ROOT]
    subprocess.run(build, cwd=two, capture_output=True, check=True, timeout=hang_s(300))
    (sdist,) = two.glob("*.tar.gz")
    return Artefacts(built(ROOT, one), sdist, built(sdist, three))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("wheel"))
