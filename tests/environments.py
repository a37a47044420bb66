"""Environments of their own that cost about two seconds and no download.

``environment(folder, torch=True)`` is a fresh virtual environment with torch and what torch requires, and nothing else: no numpy, no rich, no
flatout. With ``wheel=`` flatout is installed into it for real, beside exactly the distributions that the wheel declares. Whatever a package
uses and does not declare is therefore missing. Distributions are links to those of the Python that is given; a download of torch takes 5 GB.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from limits import hang_s
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What the markers of requirements ask of a Python, and where it looks for packages.
ASK = """
import json, os, platform, sys
print(json.dumps([sys.path, {
    "os_name": os.name,
    "sys_platform": sys.platform,
    "platform_machine": platform.machine(),
    "platform_system": platform.system(),
    "platform_release": platform.release(),
    "platform_version": platform.version(),
    "platform_python_implementation": platform.python_implementation(),
    "implementation_name": sys.implementation.name,
    "implementation_version": platform.python_version(),
    "python_version": "%d.%d" % sys.version_info[:2],
    "python_full_version": platform.python_version(),
}]))
"""


@dataclass(frozen=True)
class Packages:
    """The distributions that a Python has, and the values by which it decides markers."""

    by_name: Mapping[str, importlib.metadata.Distribution]
    markers: Mapping[str, str]

    @classmethod
    def of(cls, python):
        # Not in the current folder, which `-c` would put first on the path.
        answer = subprocess.run(
            [python, "-c", ASK], cwd="/", capture_output=True, text=True, check=True, timeout=hang_s(120)
        )
        path, markers = json.loads(answer.stdout)
        by_name = {}
        for found in importlib.metadata.distributions(path=[place for place in path if place]):
            by_name.setdefault(canonicalize_name(found.metadata["Name"]), found)
        return cls(by_name, markers)

    def closure(self, requirements):
        """All distributions that these requirements need, directly or through others."""
        needed = {}
        seen = set()
        left = [(Requirement(line), "") for line in requirements]
        while left:
            wanted, extra = left.pop()
            if wanted.marker is not None and not wanted.marker.evaluate({**self.markers, "extra": extra}):
                continue
            name = canonicalize_name(wanted.name)
            if name not in self.by_name:
                raise LookupError(
                    f"{wanted} is required and not installed beside the tests: pip install '{wanted}'"
                )
            needed[name] = self.by_name[name]
            for asked in ("", *wanted.extras):
                if (name, asked) not in seen:
                    seen.add((name, asked))
                    left += [(Requirement(line), asked) for line in needed[name].requires or ()]
        return list(needed.values())


def environment(folder, *, wheel=None, torch, more=(), python=sys.executable):
    """The Python of a new virtual environment in `folder`, with torch, or flatout from `wheel`, or both, and `more` requirements."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=hang_s(300))
    made = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    packages = Packages.of(python)
    wanted = [*(["torch"] if torch else []), *(requirements(wheel) if wheel else []), *more]
    for found in packages.closure(wanted):
        link(found, site)
    if wheel is not None:
        install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", made, *install], check=True, timeout=hang_s(300)
        )
    return made


def built(source, folder):
    """The wheel of a source tree or a source distribution, made without a download."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*pip, *options, source], cwd=folder, check=True, timeout=hang_s(300))
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(wheel):
    """What a wheel requires without an extra."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def link(found, site):
    """Links of a distribution's packages and metadata. A folder that several distributions may fill (a namespace, such as `nvidia`) is made, and
    each of its files linked: the link of a folder would bring the others.
    """
    files = [PurePosixPath(str(file)) for file in found.files or ()]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    for file in files:
        if ".." in file.parts or file.is_absolute() or "__pycache__" in file.parts:
            continue  # console scripts, which name another Python, and what Python compiles by itself
        whole = [
            part
            for part in (*reversed(file.parents), file)
            if part in packages or part.suffix == ".dist-info"
        ]
        target = whole[0] if whole else file
        place = site / target
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(str(found.locate_file(target))).absolute())
