"""Closed standard streams: a program starts, and ends, as without flatout."""

import sys

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]


def closed(flatout, streams, *words):
    """Run ``words`` with these streams closed; python is the way to start flatout, or nothing."""
    return flatout("-c", f'exec "$@" {streams}', "sh", *words, python=["sh"])


FLATOUT = [sys.executable, "-m", "flatout"]


# A closed stream is None, and its number is none of a file of flatout: what writes to it changes nothing.
PROGRAM = """\
import os, sys, torch
found = [getattr(sys, name) is None for name in ("stdin", "stdout", "stderr")]
for number in (0, 1, 2):
    if found[number]:
        try:
            found.append(os.write(number, b"1" * 200))
        except OSError as error:
            found.append(error.errno)
network = torch.nn.Linear(2, 1)
for _ in range(3):
    network(torch.ones(2, 2)).sum().backward()
open(sys.argv[1], "w").write(str(found))
sys.exit(7)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("streams", ["<&- >&-", ">&- 2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("how", ["--supervise", "--rescue"])
def test_a_run_is_as_plain(flatout, script, streams, how):
    """test_uses.py has the other options."""
    script(PROGRAM)
    plain = closed(flatout, streams, sys.executable, "train.py", "plain.txt")
    under = closed(flatout, streams, *FLATOUT, "run", how, "python", "train.py", "under.txt")
    assert (under.code, under.out) == (plain.code, plain.out) == (7, "")
    assert "Traceback" not in under.err
    found = [(flatout.folder / name).read_text() for name in ("plain.txt", "under.txt")]
    assert found[0] == found[1]
    assert under.left == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("", 2),
        ("tunee", 2),
        ("levers", 0),
        ("check train.py", 0),
        ("tune python -I train.py", 3),
    ],
)
def test_a_command_ends_as_it_would(flatout, script, streams, words, code):
    script("print('hello')\n")
    done = closed(flatout, streams, *FLATOUT, *words.split())
    assert (done.code, done.left) == (code, [])
    assert "Traceback" not in done.err


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_doctor_ends(flatout, streams):
    done = closed(flatout, streams, *FLATOUT, "doctor")
    assert done.code in (0, 1)
    assert (done.out, "Traceback" in done.err) == ("", False)


def test_tune_ends(flatout, script, by_hand):
    script(by_hand)
    done = closed(
        flatout, "<&- >&- 2>&-", *FLATOUT, "tune", "--budget", "15s", "--levers", "gc_pause", "train.py"
    )
    assert done.code == 0
    assert (flatout.folder / "flatout.toml").is_file()
