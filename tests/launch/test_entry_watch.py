"""flatout in a program, however it is started: it is in it, or the cause is named."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import working_in

from flatout.launch.command import parse_command
from flatout.probe.machine import look
from flatout.schema.plan import Choice, Plan
from flatout.tune.plan_files import job_folder, plan_key

pytestmark = pytest.mark.processes

PROGRAM = """\
import sys, time
print("flatout.agent.bootstrap" in sys.modules, flush=True)
time.sleep(float(sys.argv[1]))
"""
WRAPPER = '#!/bin/sh\nexec env -i PATH="$PATH" HOME="$HOME" "$@"\n'  # as sudo does without -E
IN_FRONT = '#!/bin/sh\nexport PYTHONPATH="$PWD/other:$PYTHONPATH"\nexec "$@"\n'


@pytest.fixture
def ways(flatout):
    """The folder of a run with program.py, the wrappers `cleared` and `in_front`, and a folder `other` with a sitecustomize."""
    for name, text in (
        ("program.py", PROGRAM),
        ("with space/pro gram.py", PROGRAM),
        ("other/sitecustomize.py", "print('other')\n"),
        ("cleared", WRAPPER),
        ("in_front", IN_FRONT),
    ):
        path = flatout.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return flatout


PYTHON = sys.executable


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ([PYTHON, "program.py", "0"], {}),
        (["program.py", "0"], {}),
        ([PYTHON, "with space/pro gram.py", "0"], {}),
        (["bash", "-c", f"{PYTHON} program.py 0"], {}),
        ([PYTHON, "-u", "-Wignore", "program.py", "0"], {}),
        ([PYTHON, "-P", "-s", "program.py", "0"], {}),
        ([PYTHON, "program.py", "0"], {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}),
        ([PYTHON, "program.py", "0"], {"HOME": "/proc", "XDG_CACHE_HOME": "/proc"}),
        ([PYTHON, "program.py", "0"], {"PYTHONPATH": "other"}),
    ],
    ids=["plain", "script alone", "space", "shell", "options", "-P -s", "safe path", "home", "sitecustomize"],
)
def test_it_enters(ways, words, env):
    done = ways("run", "--no-summary", "--with", "gc_pause", *words, env=env)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "True"
    assert ("other" in done.out) == ("PYTHONPATH" in env)  # the hidden sitecustomize runs, too
    assert done.said == ["flatout: nothing was applied: this program never imported torch"]
    assert done.left == []


KEPT_OUT = {
    "-I": ([PYTHON, "-I", "program.py"], "`python -I` disables flatout; remove -I"),
    "-uS": ([PYTHON, "-uS", "program.py"], "`python -S` disables flatout; remove -S"),
    "-E": (["bash", "-c", f'{PYTHON} -E "$@"', "sh", "program.py"], "-E` disables flatout; remove -E"),
    "cleared": (["./cleared", PYTHON, "program.py"], "its environment was cleared before Python started"),
    "env -i": (["env", "-i", PYTHON, "program.py"], "its environment was cleared before Python started"),
    "replaced": (["env", "PYTHONPATH=/x", PYTHON, "program.py"], "a launcher replaced PYTHONPATH by '/x'"),
    "hidden": (["./in_front", PYTHON, "program.py"], "/other/sitecustomize.py hides flatout's own"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", KEPT_OUT)
def test_run_names_what_keeps_it_out(ways, way):
    words, cause = KEPT_OUT[way]
    done = ways("run", "--no-summary", "--with", "gc_pause", *words, "2")
    assert (done.code, done.out.splitlines()[-1]) == (0, "False")
    (said,) = done.said
    assert said.startswith("flatout: nothing was applied: ")
    assert cause in said
    assert done.left == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", KEPT_OUT)
def test_tune_ends_and_names_it(ways, way):
    words, cause = KEPT_OUT[way]
    done = ways(
        "tune", "--budget", "60s", "--no-write", *words, "600"
    )  # it ends long before the program would
    assert done.code == 3
    assert cause in done.said[-1]
    assert "did not train" not in done.err
    assert done.left == []


def test_a_short_program_that_it_never_enters_is_named_at_its_end(ways):
    done = ways("run", "--with", "gc_pause", "bash", "-c", "echo hi; exit 4")
    assert (done.code, done.out) == (4, "hi\n")
    assert "nothing was applied: no Python process of this command loaded flatout" in done.said[-1]
    assert done.left == []


@pytest.mark.parametrize("words", [["env", "-i", PYTHON], ["env", PYTHON, "-I"]], ids=["env -i", "env -I"])
def test_a_plan_of_the_folder_that_is_not_applied_is_named_once(ways, words):
    script = ways.folder / "train.py"
    script.write_text("print('trained')\n")
    with working_in(ways.folder):
        command = parse_command([*words, "train.py"])
        plan = replace(
            Plan().with_choice(Choice("gc_pause", True)), made_for=plan_key(command, look(command.argv))
        )
        job_folder(command).make().plan.write_text(plan.to_toml())
    done = ways("run", *words, "train.py")
    assert (done.code, done.out) == (0, "trained\n")
    (said,) = done.said
    assert said.startswith("flatout: nothing was applied: no Python process of this command loaded flatout")


def test_preparation_by_an_isolated_python_is_no_cause(ways):
    words = ("run", "--no-summary", "--with", "gc_pause", "bash", "-c")
    done = ways(*words, f"{PYTHON} -I program.py 1; {PYTHON} program.py 0")
    assert done.out.split() == ["False", "True"]
    assert done.said == ["flatout: nothing was applied: this program never imported torch"]


def test_an_old_python(ways):
    pyenv = sorted(map(str, Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python")))
    on_path = filter(None, (shutil.which(f"python3.{minor}") for minor in range(6, 10)))
    old = next(filter(_starts, [*pyenv, *on_path]), None)
    if old is None:
        pytest.skip("not run: no Python 3.6 to 3.9 on the PATH")
    done = ways("run", "--no-summary", "--with", "gc_pause", old, "program.py", "1")
    assert (done.code, done.out) == (0, "False\n")
    assert "is too old for flatout. Use Python 3.10 or newer" in done.said[-1]
    assert "Traceback" not in done.err


@pytest.fixture
def damaged(tmp_path):
    """``damaged("agent/site")`` is the command of a copy of flatout that lacks a folder, or whose file has more lines."""
    package = tmp_path / "package"
    shutil.copytree(Path(sys.modules["flatout"].__file__).parent, package / "flatout")

    def copy(name, more=""):
        path = package / "flatout" / name
        path.write_text(path.read_text() + more) if more else shutil.rmtree(path)
        begin = f"import sys; sys.path.insert(0, {str(package)!r}); from flatout.cli.main import main; main()"
        return [PYTHON, "-c", begin]

    return copy


def test_an_incomplete_installation_is_named_before_the_program_starts(ways, damaged):
    python = damaged("agent/site")
    for command in ("run", "tune"):
        done = ways(command, "program.py", "0", python=python)
        assert (done.code, done.out) == (1, "")
        assert "this installation of flatout is incomplete" in done.said[-1]
    done = ways("doctor", python=python)
    assert done.code == 1
    assert "FD005" in done.out.partition("notes")[0]


def test_a_failure_after_the_import_of_torch_is_named(ways, damaged):
    (ways.folder / "train.py").write_text("import time, torch\ntime.sleep(600)\n")
    in_the_program = "\nimport sys\nif 'torch' in sys.modules:\n    raise ImportError('damaged')\n"
    done = ways("tune", "--budget", "60s", "train.py", python=damaged("trial/worker.py", in_the_program))
    assert done.code == 3
    assert "flatout failed in it (ImportError: damaged)" in done.said[-1]
    assert "Install flatout again" in done.said[-1]
    assert done.left == []


def _starts(python):
    return (
        subprocess.run([python, "-c", ""], env=dict(os.environ), capture_output=True, check=False).returncode
        == 0
    )


def test_the_supervisor_is_not_taken_for_the_program(flatout, script):
    """It is a Python with -I and -S, and here it runs for longer than any other cause needs to be certain."""
    script("import torch\nw = torch.ones(3, requires_grad=True)\n(w * w).sum().backward()")
    shell = ("bash", "-c", f"sleep 5; {sys.executable} train.py")
    done = flatout("run", "--with", "gc_pause", "--supervise", *shell)
    assert done.code == 0, done.err
    assert "disables flatout" not in done.err
