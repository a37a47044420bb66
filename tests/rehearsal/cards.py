"""Programs on simulated cards: the stand-in of bench/gpu, or the reason why it is unavailable here."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
sys.path.insert(0, str(GPU))

import stand_in  # noqa: E402

PROGRAMS = GPU / "rehearsal"
EXAMPLES = GPU / "programs"
SIZES = "--context 32 --vocabulary 101 --width 32 --heads 2 --layers 2 --tokens 4000"
SMALL_GPT = [str(EXAMPLES / "gpt.py"), *SIZES.split()]
LIMIT_S = 120


def surroundings(cards=2, mib=stand_in.MIB, waits=None, kernel_us=0, **more):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLATOUT_", "PYTEST_", "CUDA_"))
    }
    return stand_in.environment(
        {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}, cards, mib, waits, kernel_us
    )


def on_cards(
    folder,
    *command,
    cards=2,
    mib=stand_in.MIB,
    waits=None,
    kernel_us=0,
    **more,
):
    """Runs ``command`` in ``folder``; ``python`` and ``flatout`` are this environment's."""
    env = surroundings(cards, mib, waits, kernel_us, **more)
    whole = {"python": [sys.executable], "flatout": [sys.executable, "-m", "flatout"]}.get(
        command[0], [command[0]]
    )
    return subprocess.run(
        [*whole, *command[1:]],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=hang_s(LIMIT_S),
        check=False,
    )


def printed_by(folder, programs, **options):
    """The output of each of several programs, which run in one process."""
    argv = [part for program in programs for part in ("+", *program)][1:]
    done = on_cards(folder, "python", str(Path(__file__).with_name("several.py")), *argv, **options)
    assert done.returncode == 0, done.stderr
    return re.split(r"^== \d+\n", done.stdout, flags=re.M)[1:]


def info(text):
    return [line for line in text.splitlines() if re.match(r"(epoch|step) \d", line)]


def interrupted(folder, after, *command):
    """Runs flatout's ``command``, ends it with SIGTERM after that many lines, and returns everything that it
    printed.
    """
    first = subprocess.Popen(
        [sys.executable, "-m", "flatout", *command],
        cwd=folder,
        env=surroundings(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    for line in first.stdout:
        said.append(line.rstrip("\n"))
        if len(said) == after:
            first.send_signal(signal.SIGTERM)
    why = first.stderr.read()
    assert first.wait(LIMIT_S) == -signal.SIGTERM, why
    return said


def needed():
    why = stand_in.missing()
    return pytest.mark.skipif(why is not None, reason=f"not run: {why}")
