"""The source runs on every Python that pyproject.toml names, and says so when torch is newer than the tested ones.

`make pythons` runs it on the interpreters of a machine; here its syntax and its names are checked for all.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.schema.facts import TESTED_TORCH
from flatout.schema.plan import read_toml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flatout"
PROJECT = read_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
POSSESSIVE = re.compile(r"(?<!\\)[*+?}]\+|\(\?>")
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def vermin(*paths):
    """Names of the standard library, keywords of its functions and syntax: none may be newer than the oldest Python."""
    command = [
        sys.executable,
        "-c",
        "from vermin import main; main()",
        f"--target={OLDEST}-",
        "--violations",
        "--no-tips",
        *paths,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_the_source_needs_nothing_newer_than_the_oldest_python():
    code, said = vermin(str(SOURCE))
    assert code == 0, said
    assert f"Minimum required versions: {OLDEST}" in said, "without files it would say something else"


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        "import tomllib",
        "from enum import StrEnum",
        "from typing import Self",
        "import subprocess\nsubprocess.Popen(['true'], process_group=0)",
        "try:\n    pass\nexcept* ValueError:\n    pass",
    ],
)
def test_what_the_oldest_python_lacks_is_found(tmp_path, text):
    (tmp_path / "newer.py").write_text(text)
    code, said = vermin(str(tmp_path))
    assert code != 0, said


def test_no_regular_expression_is_newer():
    """Possessive quantifiers and atomic groups came with Python 3.11; vermin does not read regular expressions."""
    found = {
        f"{path.relative_to(SOURCE)}:{text.lineno}"
        for path in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("re.")
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and POSSESSIVE.search(text.value)
    }
    assert not found


@pytest.mark.parametrize("text", [r"\w++=", r"a*+b", r"a?+", r"a{2}+", r"(?>a|b)"])
def test_newer_regular_expressions_are_found(text):
    assert POSSESSIVE.search(text)
    assert not POSSESSIVE.search(text.replace("+", r"\+").replace("(?>", "(?:"))


def test_all_tools_check_for_the_same_python():
    classifiers = {
        each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each
    }
    assert classifiers == {f"3.{minor}" for minor in range(10, 15)}
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + OLDEST.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == OLDEST


@pytest.mark.processes
def test_compiling_the_source_gives_no_warning():
    """Python 3.12 to 3.14 warn of what a later one rejects: unknown escapes, a number before a keyword, `finally: return`."""
    compiled = (
        "import sys, pathlib; files = sorted(pathlib.Path(sys.argv[1]).rglob('*.py')); "
        "[compile(each.read_bytes(), str(each), 'exec', dont_inherit=True) for each in files]; print(len(files))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", compiled, str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


# ------------------------------------------------------------------------- a torch newer than the tested ones

NEWER = f"{TESTED_TORCH[0]}.99.0"


@pytest.fixture
def newer_torch(tmp_path):
    """A package `torch` of a later version is installed first on the path; the program imports none."""
    info = tmp_path / "later" / f"torch-{NEWER}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {NEWER}\n")
    return {"PYTHONPATH": str(info.parent)}


@pytest.mark.processes
def test_a_newer_torch_is_named_once_and_recorded(flatout, newer_torch):
    (flatout.folder / "train.py").write_text("print('trained')\n")
    said = f"flatout: torch {NEWER} is newer than {'.'.join(map(str, TESTED_TORCH))}, the newest release that flatout was tested with\n"
    for words in (("run", "--with", "gc_pause"), ("tune", "--budget", "5s")):
        done = flatout(*words, "python", "train.py", env=newer_torch)
        assert done.err.count(NEWER) == 1, done.err
        assert said in done.err
        if words[0] == "run":
            assert (done.code, done.out) == (0, "trained\n")
    (session,) = flatout.folder.glob(".flatout/*/session.json")
    assert json.loads(session.read_text())["untested"] == said.removeprefix("flatout: ").rstrip()


@pytest.mark.processes
def test_the_tested_torch_is_not_named(flatout):
    (flatout.folder / "train.py").write_text("print('trained')\n")
    done = flatout("run", "python", "train.py")
    assert "tested with" not in done.err
