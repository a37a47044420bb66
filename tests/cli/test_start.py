"""What `flatout run` imports before the program starts. `bench/overhead.py` measures how long that takes."""

import re
import sys

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

HEAVY = {"rich", "markupsafe", "numpy", "torch", "psutil", "email"}
LEVERS, PAGES = "flatout.levers.", "flatout.render."


def imported(flatout, *words):
    """The modules that the process has imported when the program replaces it."""
    done = flatout(*words, python=[sys.executable, "-v", "-m", "flatout"])
    assert done.code == 0, done.err
    return set(re.findall(r"^import '([\w.]+)' #", done.err, re.MULTILINE))


def test_a_run_without_a_plan_imports_no_page_and_no_lever(flatout, script):
    script("print('trained')")
    found = imported(flatout, "run", "python", "train.py")
    assert {"flatout.cli.run", "flatout.render.formatting", "flatout.levers"} <= found
    assert not {name.partition(".")[0] for name in found} & HEAVY
    assert [name for name in found if name.startswith((LEVERS, PAGES))] == ["flatout.render.formatting"]


def test_a_plan_imports_its_own_levers_only(flatout, script):
    script("print('trained')")
    found = imported(flatout, "run", "--with", "gc_pause", "--with", "debug_off", "python", "train.py")
    assert not {name.partition(".")[0] for name in found} & (
        HEAVY - {"email"}
    )  # versions are read for a plan
    assert {name.removeprefix(LEVERS) for name in found if name.startswith(LEVERS)} == {
        "gc_pause",
        "debug_off",
    }


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_command(flatout, words):
    found = imported(flatout, *words)
    assert not {name.partition(".")[0] for name in found} & HEAVY
    assert not [name for name in found if name.startswith((LEVERS, PAGES, "flatout.cli.run", "flatout.tune"))]
