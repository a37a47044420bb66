"""Temporary folders: none stays after any end, as soon as the next command has run, and those of others stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import until

from flatout.job import temporary

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

ENDS = {
    "normal": "",
    "exception": "raise RuntimeError('no')",
    "os._exit": "os._exit(3)",
    "SIGTERM": "os.kill(os.getpid(), 15)",
    "SIGKILL": "os.kill(os.getpid(), 9)",
}


@pytest.fixture
def place():
    """An empty folder for temporary files, with a short name as usual."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def ours(place):
    """``ours()`` lists what flatout has left."""
    return lambda: list(place.glob("*flatout*"))


@pytest.fixture
def next_command(flatout, place):
    """Run a short command that makes a temporary folder of its own, and end it in order."""

    def run():
        words = (
            sys.executable,
            "-c",
            "from flatout.job.temporary import *\nwith temporary_folder('test'): pass",
        )
        done = flatout.plain(*words, env={"TMPDIR": str(place)})
        assert (done.code, done.err) == (0, "")

    return run


@pytest.mark.parametrize("words", [(), ("--no-summary",)], ids=" ".join)
def test_a_run(flatout, script, place, ours, next_command, words):
    """However the program ends, its folder goes with the next command: one for each end, then one for all."""
    for source in ENDS.values():
        script(f"import os\n{source}\n")
        flatout("run", *words, "python", "train.py", env={"TMPDIR": str(place)})
        assert len(ours()) <= 1
    assert len(ours()) == 1  # after SIGKILL
    next_command()
    assert ours() == []


def test_a_supervised_run(flatout, script, place, ours, next_command):
    """The supervisor and its reaper are killed: their folder in memory stays until the next command."""
    script("import os, time\nos.kill(os.getppid(), 19)\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    running = flatout.start("run", "--supervise", "python", "train.py", env={"TMPDIR": str(place)})
    until((flatout.folder / "begun").exists, 60)
    own = f"flatout-watched-{temporary.owner(running.pid)}-*"
    (folder,) = Path(temporary.MEMORY_FOLDER).glob(own)
    with open(f"/proc/{running.pid}/task/{running.pid}/children") as file:
        reapers = [int(number) for number in file.read().split() if not _names(int(number), folder)]
    for number in (*reapers, running.pid):
        os.kill(number, signal.SIGKILL)
    flatout.finish(running)
    assert folder.exists()
    next_command()
    assert ours() == []
    assert not folder.exists()


def _names(number, folder):
    return os.fsencode(folder) in Path(f"/proc/{number}/environ").read_bytes()


@pytest.mark.full
def test_commands_that_measure(flatout, script, by_hand, place, ours, next_command):
    """tune is killed while a program of it trains; trial and profile end in order."""
    script(by_hand)
    running = flatout.start("tune", "--budget", "60s", "python", "train.py", env={"TMPDIR": str(place)})
    until(lambda: any(flatout.folder.glob(".flatout/*/trials/*/claim")), 60)
    assert ours()
    running.kill()
    assert flatout.finish(running).left == []
    assert flatout("trial", "--steps", "3", "python", "train.py", env={"TMPDIR": str(place)}).code == 0
    assert [path.name.split("-")[1] for path in ours()] == ["trial"]  # its record, for the user
    long = place / ("a path longer than that of a socket may be" * 3)
    long.mkdir()
    done = flatout("profile", "--budget", "5s", "python", "train.py", env={"TMPDIR": str(long)})
    assert done.code == 0, done.err
    next_command()
    assert [*ours(), *long.glob("*flatout*")] == []


def test_work_trees_of_a_comparison(flatout, script, tmp_path, place, ours, next_command):
    """The user's repository forgets the work trees of a killed comparison, and keeps the user's own."""

    def git(*words):
        name = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", *name, *words], cwd=flatout.folder, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    script("import time\ntime.sleep(60)\n")
    git("add", ".")
    git("commit", "-qm", "one")
    git("worktree", "add", "-q", "--detach", str(tmp_path / "own"))
    (tmp_path / "own").rename(tmp_path / "on another disk")  # missing for now: the user's business
    before = git("worktree", "list")
    (flatout.folder / "data").mkdir()
    (flatout.folder / "data" / "kept").touch()
    running = flatout.start("compare", "--rev", "HEAD..", "python", "train.py", env={"TMPDIR": str(place)})
    until(lambda: any(place.glob("flatout-revisions-*/*/data/kept")), 60)
    running.kill()
    flatout.finish(running)
    assert git("worktree", "list") != before
    next_command()
    assert ours() == []
    assert git("worktree", "list") == before
    assert (flatout.folder / "data" / "kept").exists()


def test_what_stays(flatout, place, tmp_path, next_command):
    """Folders of a living process, of another machine or container, of another user, links, and other names."""
    own = temporary.owner()
    number, start, view = own.split(".")
    ended = f"{number}.{int(start, 16) - 1:x}.{view}"
    (tmp_path / "kept").mkdir()
    stays = [
        f"flatout-run-{own}-abc",  # of this process
        f"flatout-run-{number}.1.{int(view, 16) ^ 1:08x}-abc",
        "flatout-run-abcdefgh",
        "flatout-ranks-0123456789abcdef",
        f"other-run-{ended}-abc",
    ]
    for name in (*stays, f"flatout-run-{ended}-abc", f"flatout-ranks-0123/flatout-rank-{ended}-0"):
        (place / name / "below").mkdir(parents=True)
    (place / f"flatout-ranks-0123456789abcdef/flatout-rank-{own}-0").mkdir()
    (place / f"flatout-ranks-0123456789abcdef/flatout-rank-{ended}-1").mkdir()
    (place / f"flatout-run-{ended}-link").symlink_to(tmp_path / "kept")
    (place / f"flatout-run-{ended}-file").touch()
    (place / f"flatout-run-{ended}-abc" / "link").symlink_to(tmp_path / "kept")
    stays += [f"flatout-run-{ended}-link", f"flatout-run-{ended}-file"]
    if os.geteuid() == 0:
        (place / f"flatout-run-{ended}-theirs").mkdir()
        os.chown(place / f"flatout-run-{ended}-theirs", 65534, 65534)
        stays.append(f"flatout-run-{ended}-theirs")
    next_command()
    assert sorted(path.name for path in place.iterdir()) == sorted(stays)
    assert (tmp_path / "kept").is_dir()


def test_a_folder_in_use_outlives_its_process(flatout, script, place, ours, next_command):
    """A program in the background of a shell that has ended still reads its job."""
    script("import os, sys, time\nopen('begun', 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)\n")
    done = flatout.start("run", "sh", "-c", "python train.py >/dev/null 2>&1 &", env={"TMPDIR": str(place)})
    assert done.wait(60) == 0
    number = int(
        until(lambda: (flatout.folder / "begun").exists() and (flatout.folder / "begun").read_text())
    )
    next_command()
    assert len(ours()) == 1
    os.kill(number, signal.SIGKILL)
    flatout.finish(done)
    next_command()
    assert ours() == []
