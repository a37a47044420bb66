"""The typed command: which program, which script, and whether Python allows flatout."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.launch.command import parse_command
from flatout.launch.environment import SITE, job_environment
from flatout.schema.errors import FlatoutError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with train.py, a package with __main__, and programs called python, torchrun and go.sh on the
    PATH.
    """
    for name in (
        "train.py",
        "sub/other.py",
        "pkg/__init__.py",
        "pkg/__main__.py",
        "pkg/train.py",
        "app/__main__.py",
        "with space.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    for name in ("python", "python3.11", "torchrun", "accelerate", "go.sh"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "script", "module", "closed"),
    [
        ("python train.py --lr 0.1", "train.py", None, None),
        ("python3.11 -u -X dev -W ignore train.py x.py", "train.py", None, None),
        ("python -Xdev -Wignore -OO train.py", "train.py", None, None),
        ("python -m pkg.train --x", "pkg/train.py", "pkg.train", None),
        ("python -m pkg", "pkg/__main__.py", "pkg", None),
        ("python -um pkg.train", "pkg/train.py", "pkg.train", None),
        ("python -m not.here", None, "not.here", None),
        (
            "python -m torch.distributed.run --nproc-per-node 2 train.py",
            "train.py",
            "torch.distributed.run",
            None,
        ),
        ("python -I train.py", "train.py", None, "-I"),
        ("python -sE train.py", "train.py", None, "-E"),
        ("python -uS -m pkg", "pkg/__main__.py", "pkg", "-S"),
        ("python --check-hash-based-pycs always train.py", "train.py", None, None),
        ("python -c pass", None, None, None),
        ("python -", None, None, None),
        ("python", None, None, None),
        ("python app", "app", None, None),
        ("torchrun --nproc-per-node 2 sub/other.py --lr 1", "sub/other.py", None, None),
        ("accelerate launch --config x.yaml train.py", "train.py", None, None),
        ("go.sh", None, None, None),
        ("./run.sh a b", "run.sh", None, None),
    ],
)
def test_commands(here, typed, script, module, closed):
    command = parse_command(typed.split())
    assert command.typed == tuple(typed.split())
    assert command.argv == tuple(typed.split())
    assert (str(command.script) if command.script else None, command.module, command.disabled_by) == (
        script,
        module,
        closed,
    )


def test_a_script_alone_runs_under_this_python(here):
    command = parse_command(["train.py", "--lr", "0.1"])
    assert command.argv == (sys.executable, "train.py", "--lr", "0.1")
    assert command.script == Path("train.py")


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8), max_size=5
    )
)
def test_any_words_are_a_command_or_a_clear_error(here, words):
    for first in ([], ["python"], ["python", "-m"], ["torchrun"]):
        try:
            command = parse_command([*first, *words])
        except FlatoutError as error:
            said = str(error)
            assert said.strip().endswith((".", "`", "`."))
            continue
        assert command.typed == (*first, *words)
        assert command.title
        assert "/" not in command.title
        assert len(command.digest) == 8


def test_titles_are_names_of_folders(here):
    assert parse_command(["python", "with space.py"]).title == "with-space"
    assert parse_command(["python", "-m", "pkg.train"]).title == "train"
    assert parse_command(["python", "-m", "not.here"]).title == "not-here"
    assert parse_command(["go.sh"]).title == "go-sh"


def test_the_digest_distinguishes_commands_and_folders(here, monkeypatch):
    commands = [
        ["python", "train.py"],
        ["python", "train.py", "--lr", "1"],
        ["python", "train.py", "--lr 1"],
        ["train.py"],
    ]
    digests = [parse_command(words).digest for words in commands]
    assert len(set(digests)) == len(digests)
    assert parse_command(commands[0]).digest == digests[0]
    (here / "sub" / "train.py").write_text("pass\n")
    monkeypatch.chdir(here / "sub")
    assert parse_command(commands[0]).digest not in digests


def test_the_digest_of_the_script_follows_its_content(here):
    command = parse_command(["python", "train.py"])
    before = command.script_digest
    (here / "train.py").write_text("pass  # changed\n")
    assert command.script_digest != before
    (here / "train.py").unlink()
    assert command.script_digest == ""


def test_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/mine:/other")
    monkeypatch.setenv("KEEP", "this")
    environment = job_environment(tmp_path / "job.json", {"LD_PRELOAD": "x", "KEEP": "that"})
    assert environment["PYTHONPATH"] == f"{SITE}:/mine:/other"
    assert environment["FLATOUT_JOB"] == str(tmp_path / "job.json")
    assert (environment["LD_PRELOAD"], environment["KEEP"]) == ("x", "that")
    monkeypatch.delenv("PYTHONPATH")
    assert job_environment(tmp_path, {})["PYTHONPATH"] == str(
        SITE
    )  # an empty entry would put the current folder on the path
    assert (SITE / "sitecustomize.py").is_file()
