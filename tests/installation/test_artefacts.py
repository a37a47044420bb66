"""The wheel and the source distribution hold every file of the source, and what a package index shows."""

import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from limits import hang_s

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def content(artefact):
    """Path in a wheel or a source distribution -> content; the outer folder of the latter is removed."""
    if artefact.suffix == ".whl":
        with ZipFile(artefact) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(artefact) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name.partition("/")[2]: file.read() for name, file in files.items() if file is not None}


def of_metadata(wheel, name):
    (text,) = (data for path, data in content(wheel).items() if path.endswith(f".dist-info/{name}"))
    return text.decode()


@pytest.fixture(scope="module")
def metadata(artefacts):
    return Parser().parsestr(of_metadata(artefacts.wheel, "METADATA"))


@pytest.fixture(scope="module")
def source():
    """Path -> content of each file below src that git tracks, or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not run: this is no checkout of git, so nothing tells which files belong to the source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=hang_s(60),
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_bytes() for name in names}


def test_the_wheel_holds_the_source_file_by_file(artefacts, source):
    packed = {
        f"src/{name}": data for name, data in content(artefacts.wheel).items() if ".dist-info/" not in name
    }
    assert packed.keys() ^ source.keys() == set()
    assert packed == source


def test_the_source_distribution_holds_the_source_file_by_file(artefacts, source):
    packed = content(artefacts.sdist)
    assert {name for name in packed if name.startswith("src/")} ^ source.keys() == set()
    assert source.items() <= packed.items()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        assert packed[name] == (ROOT / name).read_bytes()


def test_the_source_distribution_builds_the_same_wheel(artefacts):
    assert artefacts.wheel_of_sdist.name == artefacts.wheel.name
    assert content(artefacts.wheel_of_sdist) == content(artefacts.wheel)


def test_licence_types_and_entry_points(artefacts, metadata):
    names = content(artefacts.wheel).keys()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert of_metadata(artefacts.wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert "flatout/py.typed" in names
    assert "flatout/agent/site/sitecustomize.py" in names  # without it, flatout enters no program
    entries = ConfigParser()
    entries.read_string(of_metadata(artefacts.wheel, "entry_points.txt"))
    assert dict(entries["console_scripts"]) == {"flatout": "flatout.cli.main:main"}
    assert dict(entries["pytest11"]) == {"flatout": "flatout.integrations.pytest_plugin"}


def test_the_index_accepts_it_and_shows_the_readme(artefacts, metadata):
    pytest.importorskip("twine", reason="not run: twine is not installed; `make test` installs it")
    check = [
        sys.executable,
        "-m",
        "twine",
        "--no-color",
        "check",
        "--strict",
        artefacts.wheel,
        artefacts.sdist,
    ]
    done = subprocess.run(check, capture_output=True, text=True, timeout=hang_s(120))
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = metadata.get_payload()
    assert readme.startswith("# flatout")
    assert "](docs/" not in readme  # such a link leads nowhere on the index
