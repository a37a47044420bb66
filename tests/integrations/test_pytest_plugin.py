"""The pytest plugin, in a pytest of its own: limits, baselines, and what it costs a pytest that does not use it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import STEPS_BY_HAND

from flatout.schema.plan import read_toml

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]

ROOT = Path(__file__).parents[2]
PLUGIN = "flatout.integrations.pytest_plugin"
PROGRAM = f"""{STEPS_BY_HAND}
import pathlib
pause = float(pathlib.Path("pause").read_text())
for step in range(100000):
    steps(1)
    time.sleep(pause)
"""
TEST = """
import pytest

@pytest.mark.flatout({limits})
def test_speed(flatout_compare):
    flatout_compare({command!r})
"""


@pytest.fixture
def inner(flatout):
    """``inner(test, *options)`` runs pytest on a file; the plugin is loaded as its entry point does."""

    def run(test, *options):
        (flatout.folder / "pytest.ini").write_text("[pytest]\n")
        (flatout.folder / "test_speed.py").write_text(test)
        words = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-rs", *options]
        return flatout(*words, python=[], env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, timeout=200)

    return run


def test_the_entry_point_loads_nothing_heavy():
    project = read_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"flatout": PLUGIN}
    assert importlib.import_module(PLUGIN).flatout_compare is not None
    loaded = (
        f"import sys, pytest\nbefore = set(sys.modules)\nimport {PLUGIN}\nprint(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"flatout", "flatout.integrations", PLUGIN}


def test_a_missing_baseline_is_skipped_with_the_command_that_stores_it(inner, script):
    script(PROGRAM)
    done = inner(TEST.format(limits="max_slowdown='3%'", command="python train.py"))
    assert done.code == 0, done.out
    assert "1 skipped" in done.out
    assert "there is no baseline 'main-test_speed-" in done.out
    assert "`pytest --flatout-save test_speed.py::test_speed` stores one" in done.out


CANNOT = [
    ("baseline='main'", "python train.py", "has no limit, so it cannot fail"),
    ("slowdown='3%'", "python train.py", "takes only the keywords any_machine, baseline"),
    ("max_slowdown='3%'", "python trian.py", "there is no script"),
    ("max_slowdown='abc'", "python train.py", "'abc' is not a share"),
]


def test_a_test_that_cannot_compare_fails(inner):
    tests = [TEST.format(limits=limits, command=command) for limits, command, _ in CANNOT]
    done = inner("".join(test.replace("test_speed", f"test_{at}") for at, test in enumerate(tests)))
    assert done.code == 1
    assert "passed" not in done.out
    assert [says for _, _, says in CANNOT if says not in done.out] == []


@pytest.mark.full
def test_a_slower_program_fails_against_its_baseline(inner, flatout, script):
    pytest.importorskip("torch")
    script(PROGRAM)
    pause = flatout.folder / "pause"
    pause.write_text("0.004")
    limits = "max_slowdown='50%', max_memory='{memory}', pairs=3, budget='1s'"
    test = TEST.format(limits=limits.format(memory="8GB"), command="python train.py")
    done = inner(test, "--flatout-save")
    assert done.code == 0, done.out
    assert "flatout: stored baseline main-test_speed-" in done.out
    done = inner(test)
    assert done.code == 0, done.out
    assert "1 passed" in done.out
    pause.write_text("0.02")
    done = inner(TEST.format(limits=limits.format(memory="1MB"), command="python train.py"))
    assert done.code == 1, done.out
    assert "gate on step time: failed: the step time changes by +" in done.out
    assert "above the limit of +50 %" in done.out
    assert "gate on peak memory: failed: the peak memory of B is" in done.out
    (page,) = flatout.folder.glob(".flatout/tests/test_speed-*/compare.html")
    assert str(page) in done.out.replace("\n", "")


@pytest.mark.full
def test_what_cannot_be_told_is_a_warning(inner, flatout, script):
    """The limit is the change itself, so the interval lies on both sides of it."""
    pytest.importorskip("torch")
    script(PROGRAM)
    (flatout.folder / "pause").write_text("0.004")
    test = TEST.format(
        limits="max_slowdown='0.0001%', pairs=2, budget='1s', any_machine=True", command="python train.py"
    )
    assert inner(test, "--flatout-save").code == 0
    stored = next(flatout.folder.glob(".flatout/baselines/*.json"))
    baseline = json.loads(stored.read_text())
    baseline["key"]["machine"] = "another one"
    baseline["runs"][0]["blocks_ms"] = [2 * ms for ms in baseline["runs"][0]["blocks_ms"]]
    stored.write_text(json.dumps(baseline))
    done = inner(test)
    assert done.code == 0, done.out
    assert "1 passed, 1 warning" in done.out
    assert "CannotTell" in done.out
    assert "on both sides of the limit" in done.out
