"""Runs programs of this folder as two ranks."""

import json
import os
import subprocess
import sys

import pytest
from limits import hang_s


@pytest.fixture(scope="session")
def as_two_ranks(tmp_path_factory):
    """The output of each rank of a program, which gets a folder and writes ``<rank>.json`` into it."""

    def run(program):
        folder = tmp_path_factory.mktemp(program.stem)
        words = [
            sys.executable,
            "-m",
            "flatout.launch.local_launcher",
            "--procs",
            "2",
            "--",
            sys.executable,
            str(program),
            str(folder),
        ]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=hang_s(140),
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    return run
