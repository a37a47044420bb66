"""Programs of trials start as forks of the warm process, where that can be: ``with warm_programs(): Trial(...)``."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from warm import Warm, starts_warm

from flatout.launch import process

BECOME = str(Path(__file__).with_name("become.py"))


def start(argv, env, preexec_fn, start_new_session, **options):
    """What ProgramRun calls. A fork outlives this process, which it has not as its parent."""
    if starts_warm(argv, env):
        return Warm([sys.executable, BECOME, json.dumps(env), *argv], env={"PATH": env["PATH"]}, **options)
    return subprocess.Popen(
        argv, env=env, preexec_fn=preexec_fn, start_new_session=start_new_session, **options
    )


def warm_programs():
    warm = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    return mock.patch.object(process, "subprocess", warm)
