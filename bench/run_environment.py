"""The environment in which `flatout run` starts a program, for benchmarks that start it themselves."""

from __future__ import annotations

import os

from provenance import SRC  # noqa: F401  puts src on the path

from flatout.cli.run import ENTRY, _environment
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.run_request import RunRequest


def run_environment(plan: Plan, facts: Facts) -> dict[str, str]:
    """Writes the request of a run under a plan, and returns the environment that names it."""
    return _environment(RunRequest(ENTRY, plan, facts, os.getpid()))
