"""The machine, inspected without torch: found parts are named, and unknown ones keep their default."""

import json
import os
import subprocess
import sys

import pytest

from flatout.probe.machine import WATCHED, look
from flatout.schema.facts import Facts


def test_facts_of_this_machine():
    facts = look()
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_bytes > 2**26
    assert facts.cpu
    assert facts.system == os.uname().sysname
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.processes
def test_affinity_counts(monkeypatch):
    """A process tied to one core has one core."""
    one = {min(os.sched_getaffinity(0))}
    code = f"import os; os.sched_setaffinity(0, {one}); from flatout.probe.machine import look; print(look().cores)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize("name", WATCHED)
def test_variables_that_levers_care_about(monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert look().environment[name] == "3"
    monkeypatch.delenv(name)
    assert name not in look().environment


def test_nothing_else_of_the_environment_is_kept(monkeypatch):
    """Facts are written into reports; secrets of the environment must not get there."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "secret" not in json.dumps(look().to_json())


@pytest.mark.processes
def test_a_broken_torch_does_not_matter(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.99: cannot open shared object file')"
    )
    code = "from flatout.probe.machine import look; look(); print('looked')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout == "looked\n", done.stderr
