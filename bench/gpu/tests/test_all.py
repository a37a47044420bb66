"""The single command for a GPU: rows that fail, take too long or are done already; killed and
started again.
"""

import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import speed
from limits import hang_s

from flatout.schema.facts import Facts

pytestmark = pytest.mark.processes

ALL = Path(__file__).resolve().parents[1] / "all.py"
FIRST = "import pathlib; pathlib.Path('{0}/first').open('a').write('x'); print('fine')"
SECOND = "import sys; print('almost'); sys.exit('the card has gone')"
THIRD = "import time; print('begun', flush=True); time.sleep(600)"
MEETS = """
import pathlib, time
pathlib.Path('{0}/{1}').touch()
while not (pathlib.Path('{0}/one').exists() and pathlib.Path('{0}/two').exists()):
    time.sleep(0.02)
"""
LAST = "import pathlib; pathlib.Path('{0}/last').open('a').write('x')"
# The rows of the real command are replaced by these, and nothing else.
RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("all_rows", {path!r})
rows = importlib.util.module_from_spec(spec)
sys.modules["all_rows"] = rows
spec.loader.exec_module(rows)
rows.ROWS = tuple(
    rows.Row(name, limit, {folder!r} + "/" + name + ".py", beside={beside!r}, continues={continues!r})
    for name, limit in {limits!r}
)
rows.GRACE_S, rows.CORES_EACH = 1.0, 0.5
sys.exit(rows.main())
"""


@pytest.fixture
def command(tmp_path):
    for name, text in (("one", FIRST), ("two", SECOND), ("three", THIRD), ("four", LAST)):
        (tmp_path / f"{name}.py").write_text(text.format(tmp_path))

    def made(*arguments, three_s=2, beside=False, continues=False, names=("one", "two", "three", "four")):
        limits = [(name, three_s if name == "three" else 60) for name in names]
        text = RUN.format(
            path=str(ALL), folder=str(tmp_path), limits=limits, beside=beside, continues=continues
        )
        return [sys.executable, "-c", text, "--folder", str(tmp_path / "states"), *arguments]

    return made


def state(folder, name):
    return json.loads((folder / "states" / f"{name}.json").read_text())


def ran(command, folder):
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=hang_s(60), check=False
    )


def test_a_row_that_fails_or_times_out_is_reported_and_the_rest_continues(command, tmp_path):
    done = ran(command(), tmp_path)
    assert done.returncode == 1
    assert [state(tmp_path, name)["state"] for name in ("one", "two", "three", "four")] == [
        "done",
        "failed",
        "cut off",
        "done",
    ]
    assert re.search(r"two: failed, \d+ s: the card has gone", done.stdout)
    assert (tmp_path / "states" / "three.log").read_text() == "begun\n"


def test_started_again_it_continues_with_the_missing_rows(command, tmp_path):
    first = subprocess.Popen(command(three_s=600), cwd=tmp_path, stdout=subprocess.DEVNULL)
    log = tmp_path / "states" / "three.log"
    end = time.monotonic() + hang_s(30)
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = ran(command("--archive", str(tmp_path / "all.tar.gz"), "--out", str(tmp_path / "out")), tmp_path)
    assert "one: done already" in again.stdout
    assert (tmp_path / "first").read_text() == "x"
    assert (tmp_path / "last").read_text() == "x"
    assert (tmp_path / "all.tar.gz").stat().st_size > 0


def test_no_row_starts_that_may_not_end_in_time(command, tmp_path):
    done = ran(command("--minutes", "1.02", three_s=600), tmp_path)
    assert "no time for three" in done.stdout
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "states" / "three.log").exists()


def test_rows_that_time_nothing_run_side_by_side(command, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(MEETS.format(tmp_path, name))
    assert ran(command(beside=True, names=("one", "two")), tmp_path).returncode == 0


def test_a_row_that_continues_gets_the_minutes_that_are_left(command, tmp_path):
    (tmp_path / "one.py").write_text("import sys; print(sys.argv[1:])")
    ran(command("--minutes", "9", continues=True, names=("one",)), tmp_path)
    said = (tmp_path / "states" / "one.log").read_text()
    assert 8.5 < float(said.split("'")[3]) <= 9.0
    assert "one-sides.json" in said


def test_the_page_of_speed_names_what_is_not_finished(tmp_path):
    def side(ms):
        step = {"median": ms, "low": ms, "high": ms}
        rest = {"start_s": 9, "peak_memory_bytes": 2**30, "plan": "", "not_applied": []}
        return {"step_ms": step, "blocks_ms": [ms] * 8, "per_s": 128000 / ms, "mfu": 0.0123, **rest}

    state = tmp_path / "state.json"
    sides = {
        "tutorial": {"plain": side(30.0), "flatout tune": side(10.0)},
        "dcgan": {"plain": {"failure": "no"}},
    }
    state.write_text(json.dumps({"smoke": False, "sides": sides}))
    args = Namespace(minutes=0.0, smoke=False, out=tmp_path, state=state)
    bench = speed.Bench(args, Facts(), tmp_path)
    assert bench.run() == 1
    page = bench.page()
    assert "| flatout tune | 12,800 | 10 [10, 10] | 3.00x" in page
    assert "| one-liners | not finished |" in page
    assert "| plain | no |" in page


def test_the_list_and_names_that_are_not_in_it():
    listed = subprocess.run(
        [sys.executable, str(ALL), "--list"], capture_output=True, text=True, timeout=hang_s(60), check=True
    ).stdout
    assert listed.splitlines()[0].startswith("runs")
    assert float(listed.split()[-2]) <= 1500
    assert (
        "choose from runs, again"
        in subprocess.run(
            [sys.executable, str(ALL), "--only", "nothing"],
            capture_output=True,
            text=True,
            timeout=hang_s(60),
        ).stderr
    )
