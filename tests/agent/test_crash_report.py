"""The crash report of a program: after the program's own output, never instead of it, and at no
cost before.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

import flatout
from flatout.launch.environment import crash_environment

pytestmark = pytest.mark.processes

SITE = Path(flatout.__file__).parent / "agent" / "site"
ENTRY = """
def explain(error):
    return [f"because of {type(error).__name__}", "  mend   so"]
def nothing(error):
    return []
def broken(error):
    raise KeyError("ours")
asked = []
def interrupted(error):
    asked.append(error)
    if len(asked) == 1:
        raise RuntimeError("a signal's handler")
    return explain(error)
def leaves(error):
    raise SystemExit(9)
"""


@pytest.fixture
def die(tmp_path):
    """``plain, observed = die(source)``: the output of the program alone, and with its crash report."""
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    info = tmp_path / "info"

    def run(source, *, function="explain", options=(), first=True):
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(source)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLATOUT")}
        found = []
        for observed in (False, True):
            environment = {**kept, "PYTHONPATH": str(tmp_path)}
            if observed:
                environment |= {
                    "PYTHONPATH": f"{SITE}{os.pathsep}{tmp_path}",
                    "FLATOUT_EXPLAIN": f"entry_of_test:{function}",
                    "FLATOUT_CRASH_REPORTS": str(info),
                }
            command = [sys.executable, *options, "script.py"]
            if observed and first:  # exec keeps the process number, as `flatout run` does
                becomes = f"import os; os.environ['FLATOUT_FIRST'] = str(os.getpid()); os.execv({sys.executable!r}, {command!r})"
                command = [sys.executable, "-S", "-c", becomes]
            found.append(
                subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=hang_s(60)
                )
            )
        return found

    return run


WORDS = "flatout: because of {}\nflatout:   mend   so\n"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("1 / 0", "ZeroDivisionError"),
        (
            "def f():\n    raise ValueError('x' * 10)\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
            "ValueError",
        ),
        ("import sys\nprint('out')\nsys.stderr.write('err')\n{}['a']", "KeyError"),
        (
            "import threading\nthreading.Thread(target=lambda: None).start()\nraise OSError(5, 'io')",
            "OSError",
        ),
    ],
)
def test_they_follow_the_programs_own(die, source, kind):
    plain, observed = die(source)
    assert observed.stderr == plain.stderr + WORDS.format(kind)
    assert (observed.stdout, observed.returncode) == (plain.stdout, plain.returncode) == (plain.stdout, 1)


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(3)",
        "raise KeyboardInterrupt",
        "import os; os._exit(4)",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "def f(:\n  pass",
    ],
)
def test_other_exits_have_no_crash_report(die, source):
    plain, observed = die(source)
    if "def f(:" in source:  # a program that cannot be parsed fails, too
        assert observed.stderr == plain.stderr + WORDS.format("SyntaxError")
        return
    assert (observed.stdout, observed.stderr.replace("Thread-1", ""), observed.returncode) == (
        plain.stdout,
        plain.stderr.replace("Thread-1", ""),
        plain.returncode,
    )


HOOK = "import sys\nbefore = sys.excepthook\ndef mine(kind, error, trace):\n    print('mine', kind.__name__, file=sys.stderr)\n    {}\nsys.excepthook = mine\n1 / 0\n"


def test_a_hook_of_the_programs_own_still_runs(die):
    """This includes a hook that replaces flatout's and does not call it: then the report comes at the very
    end.
    """
    for more in ("pass", "sys.__excepthook__(kind, error, trace)", "before(kind, error, trace)"):
        plain, observed = die(HOOK.format(more))
        assert plain.stderr.startswith("mine ZeroDivisionError\n")
        assert observed.stderr == plain.stderr + WORDS.format("ZeroDivisionError")


def test_an_exception_caught_by_a_test_runner_is_no_failure(die):
    """pytest and debuggers leave caught exceptions in sys.last_value."""
    plain, observed = die(
        "import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    sys.last_value = error\nsys.exit(1)"
    )
    assert observed.stderr == plain.stderr == ""


def test_an_error_in_flatout_is_suppressed(die):
    for function in ("broken", "leaves", "missing", "nothing"):
        plain, observed = die("1 / 0", function=function)
        assert (observed.stderr, observed.returncode) == (plain.stderr, 1), function


def test_an_interrupting_signal_does_not_suppress_the_report(die):
    """torch's SIGCHLD handler raises for a dead loader worker, wherever the process is."""
    plain, observed = die("1 / 0", function="interrupted")
    assert observed.stderr == plain.stderr + WORDS.format("ZeroDivisionError")


def test_nothing_is_imported_before(die):
    source = "import sys\nprint(sorted(name for name in sys.modules if name.startswith('flatout')))\nprint(len(sys.meta_path))\n"
    source += "print('typing' in sys.modules, 'json' in sys.modules, 'traceback' in sys.modules)\nprint(sorted(sys.path))"
    plain, observed = die(source)
    assert (
        observed.stdout.splitlines()[0]
        == "['flatout', 'flatout.agent', 'flatout.agent.crash_report', 'flatout.agent.ledger']"
    )
    assert observed.stdout.splitlines()[1:3] == plain.stdout.splitlines()[1:3]
    assert set(ast.literal_eval(observed.stdout.splitlines()[3])) == {
        *ast.literal_eval(plain.stdout.splitlines()[3]),
        str(SITE),
    }


CHILDREN = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", "raise ValueError('child')"])
{}
"""


def test_one_process_reports_and_the_first_one_always(die, tmp_path):
    """Two children die of the same error; the first process dies of another, or only reports them."""
    _, observed = die(CHILDREN.format("1 / 0"))
    assert observed.stderr.count("because of ValueError") == 1
    assert observed.stderr.count("because of ZeroDivisionError") == 1
    _, reports = die(
        CHILDREN.format("class ChildFailedError(Exception): pass\nraise ChildFailedError('they died')")
    )
    assert reports.stderr.count("because of") == 1
    assert not (tmp_path / "info").exists()  # the first process cleans up


def test_the_environment_that_enables_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    environment = crash_environment(tmp_path / "info", replaces_process=True)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(SITE), "/mine"]
    assert environment["FLATOUT_FIRST"] == str(os.getpid())
    assert "FLATOUT_JOB" not in environment
    assert crash_environment(tmp_path / "info", replaces_process=False)["FLATOUT_FIRST"] == ""
