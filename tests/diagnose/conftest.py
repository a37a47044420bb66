"""A process that observes programs, for the tests of one file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def observe(tmp_path_factory):
    """A function from the text of a program to what was observed of it."""
    folder = tmp_path_factory.mktemp("programs")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("observed.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    def observe(text, steps=0):
        """What was observed of a program, until its end or this many optimizer steps."""
        program = folder / f"program{len(list(folder.iterdir()))}.py"
        program.write_text(text)
        print(json.dumps([str(program), steps]), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield observe
    server.stdin.close()
    server.wait(30)
