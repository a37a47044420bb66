"""Importing torch in a child: whatever is in its place and however it ends, the diagnosis continues and
reports it.
"""

import os
import subprocess
import sys
import time

import pytest
from limits import hang_s

from flatout.diagnose.doctor.checks import run_checks
from flatout.diagnose.doctor.snapshot import SnapshotTaker

pytestmark = pytest.mark.processes


@pytest.fixture
def look(monkeypatch, tmp_path):
    """``look(source)``: the checks by code, in a folder where torch.py is that source."""

    def looked(source, limit_s=20.0):
        (tmp_path / "torch.py").write_text(source, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        with SnapshotTaker() as looking:
            return {check.code: check for check in run_checks(looking.take(limit_s))}

    return looked


def test_nothing_heavy_is_loaded_here():
    """This covers the command and the code that the child runs before it imports torch."""
    code = """
from flatout.cli.doctor import command
import flatout.diagnose.doctor.torch_child
from flatout.schema.machine_snapshot import MachineSnapshot
from flatout.probe.snapshot import gather
from flatout.diagnose.doctor.checks import run_checks
run_checks(gather(MachineSnapshot()))
import sys
heavy = {"torch", "numpy", "tomlkit", "pynvml"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=hang_s(60))
    assert done.returncode == 0, done.stderr


def test_leaving_ends_the_children(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "import os, time\nopen('number', 'w').write(str(os.getpid()))\ntime.sleep(600)", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    with SnapshotTaker():
        until = time.monotonic() + hang_s(20)
        while not (tmp_path / "number").exists() or not (tmp_path / "number").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
    assert not os.path.exists(f"/proc/{(tmp_path / 'number').read_text()}")


def test_it_hangs(look):
    found = look("import time\nprint('connecting', flush=True)\ntime.sleep(600)", limit_s=hang_s(1.5))[
        "FD010"
    ]
    assert (found.verdict, found.evidence) == ("problem", ["connecting"])
    assert "did not finish within the time limit" in found.observed


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGILL)",
            "was ended by SIGILL: the processor lacks an instruction",
        ),
        ("import os\nos._exit(7)", "exit code 7"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("def f(:", "SyntaxError: "),
        ("import no_such_module_x", "No module named 'no_such_module_x'"),
        ("import torch\ntorch.nn", "partially initialized module"),
        ("x = 1", "is not torch: AttributeError"),
    ],
)
def test_it_ends_in_its_own_way(look, source, seen):
    found = look(source)
    assert found["FD003"].verdict == "problem"
    assert found["FD018"].verdict == found["FD024"].verdict == "not checked"
    assert found["FD010"].verdict == "problem"
    assert seen in found["FD010"].observed


def test_the_working_folder_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    with SnapshotTaker() as looking:
        found = {check.code: check for check in run_checks(looking.take())}
    assert found["FD003"].verdict == "not checked"
