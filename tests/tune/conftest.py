"""Searches over small programs."""

import sys

import pytest

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.probe.machine import look
from flatout.schema.session import SessionRecord
from flatout.tune.goal import Goal
from flatout.tune.tuning import Tuning


@pytest.fixture
def new_tuning(tmp_path, monkeypatch):
    """``new_tuning(source)`` is a search over train.py with this text, in an empty folder; its programs end with the
    test.
    """
    monkeypatch.chdir(tmp_path)
    made = []

    def one(source="", goal=None, facts=None, **options):
        (tmp_path / "train.py").write_text(source)
        goal = goal or Goal(60.0)
        session = SessionRecord(["python", "train.py"], str(tmp_path), {}, budget_s=goal.budget_s)
        job = JobFolder(tmp_path / "job").make()
        command = parse_command((sys.executable, "train.py"))
        made.append(Tuning(command, job, facts or look(), session, goal, **options))
        return made[-1]

    yield one
    for tuning in made:
        tuning.interleaver.close()
