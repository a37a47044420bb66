"""Programs run with a time limit, and every way in which they end is an answer."""

import sys
import time
from pathlib import Path

import pytest
from limits import hang_s

from flatout.launch.process import TimedCommand

pytestmark = pytest.mark.processes


def test_its_output_and_how_it_ended():
    ran = TimedCommand(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    ).result(hang_s(20))
    assert (ran.code, ran.out, ran.err, ran.installed, ran.timed_out) == (3, "out\n", "err\n", True, False)


def test_a_missing_program():
    ran = TimedCommand(["flatout-has-no-such-program"]).result(1)
    assert (ran.code, ran.installed, ran.output) == (None, False, "")


def test_a_program_that_cannot_be_started_is_reported(tmp_path):
    """An executable file that is no program; another architecture's binary looks like that."""
    broken = tmp_path / "nvidia-smi"
    broken.write_bytes(b"\x7fELF\x00\x00")
    broken.chmod(0o755)
    ran = TimedCommand([str(broken)]).result(1)
    assert ran.code is None
    assert ran.installed
    assert "Exec format error" in ran.err


def test_a_hanging_program_is_killed_with_its_children():
    asked = TimedCommand(
        [
            sys.executable,
            "-c",
            "import subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()",
        ]
    )
    began = time.monotonic()
    ran = asked.result(hang_s(1.5))
    assert ran.timed_out
    assert ran.code is None
    assert time.monotonic() - began < hang_s(60)  # the program sleeps ten times as long
    child = int(ran.out)
    until = time.monotonic() + hang_s(20)
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(number):
    """A zombie has ended; reaping it is not the test's task."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_signals_are_negative():
    assert (
        TimedCommand([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]).result(hang_s(20)).code
        == -11
    )
