"""A search on a real Ray cluster with two nodes on this machine; a worker is killed while it measures.

Skipped where Ray is not installed.
"""

import importlib.util
import os
import sys
import threading
from dataclasses import replace

import psutil
import pytest

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.schema.errors import UsageError
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
from flatout.schema.session import SessionRecord
from flatout.tune.candidates import Candidate
from flatout.tune.comparison import ProgramRequest, ProgramResult
from flatout.tune.explore import explore
from flatout.tune.goal import Goal
from flatout.tune.remote import RemoteNodes
from flatout.tune.tuning import Tuning

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install flatout[ray]"
    ),
    pytest.mark.timeout(400),
]


@pytest.fixture
def tuning(cluster, tmp_path, monkeypatch, tiny):
    (tmp_path / "train.py").write_text(tiny)
    monkeypatch.chdir(tmp_path)
    command, facts = parse_command([sys.executable, "train.py"]), look()
    found = Tuning(
        command,
        JobFolder(tmp_path / "job").make(),
        facts,
        SessionRecord([], str(tmp_path), {}),
        Goal(240.0),
        remote=RemoteNodes(cluster, command, facts),
    )
    found.interleaver.tick_ms, found.start_cost_s = 1.0, 5.0
    yield found
    found.remote.close()


def kill_a_worker_that_measures(killed):
    """Kill the first Ray worker that has started a program; ``killed`` are the processes that must end with it."""
    for _ in range(1200):
        for program in psutil.process_iter(["cmdline", "cwd"]):
            if program.info["cwd"] == os.getcwd() and "train.py" in (program.info["cmdline"] or ()):
                worker = program.parent()
                killed += worker.children(recursive=True)
                worker.kill()
                return
        threading.Event().wait(0.05)


def test_a_killed_workers_pair_is_measured_on_the_other_node(tuning):
    remote, killed = tuning.remote, []
    assert len(set(remote.hosts)) == 2
    assert remote.excluded == []
    killer = threading.Thread(target=kill_a_worker_that_measures, args=(killed,))
    killer.start()
    sides = [
        ProgramRequest(plan, (None,) * 3, 3, "record") for plan in (Plan(), Plan((Choice("gc_pause", True),)))
    ]
    (held,) = remote.run_orders([tuning.remote_order(sides, 60.0)], 300.0)
    killer.join()
    assert held.host == remote.hosts[1]
    plain, tuned = (ProgramResult.from_json(each) for each in held.answer["results"])
    assert [len(seen.blocks) for seen in (plain, tuned)] == [3, 3]
    assert all(block.ms > 0 for seen in (plain, tuned) for block in seen.blocks)
    assert (plain.record.seed, tuned.record.seed) == (3, 3)
    assert plain.record.losses == tuned.record.losses != []
    assert [choice["name"] for choice in tuned.record.applied] == ["gc_pause"]
    assert killed
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in killed)


def test_a_wave_is_spread_over_the_nodes(tuning):
    levers = {lever.name: lever for lever in TABLE}
    tuning.goal = Goal(60.0)
    tuning.candidates = {"malloc": Candidate(levers["malloc"], ("glibc",), Effect.EXACT)}
    explore(tuning)
    assert isinstance(tuning.candidates["malloc"].ratio, Ratio)
    assert {block.host for block in tuning.blocks} == set(tuning.remote.hosts)
    assert {block.active for block in tuning.blocks} == {frozenset(), frozenset({"malloc=glibc"})}
    assert tuning.interleaver.running == []  # nothing was started here


def test_nodes_that_differ_or_do_not_answer_are_left_out(tuning, cluster):
    with pytest.raises(
        UsageError, match=r"no node of the cluster matches this machine.*another machine \('.* cores"
    ):
        RemoteNodes(cluster, tuning.command, replace(tuning.facts, cores=99))
    remote, order = tuning.remote, tuning.remote_order([ProgramRequest(Plan(), (None,))], 60.0)
    hosts = remote.hosts
    assert [held.answer for held in remote.run_orders([order], 0.2)] == [None]
    assert remote.hosts == []
    assert [sentence.partition(": ")[0] for sentence in remote.excluded] == hosts
    assert [held.why for held in remote.run_orders([order], 0.2)] == ["no node is left to measure it"]
