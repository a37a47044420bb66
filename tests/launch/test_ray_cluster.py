"""A real Ray cluster of two nodes on this machine, where Ray is installed; otherwise the message that names
the next command.
"""

import importlib.util
import json
import os
import sys

import pytest

from flatout.launch import ray_cluster
from flatout.launch.ray_cluster import RayJob, connect, ray_job, run_ranks
from flatout.schema.errors import NodesUnreachable, ProgramFailed, ProgramNotFound, UsageError

there = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install flatout[ray]"
)

PROGRAM = """
import json, os, sys, time
from pathlib import Path
here = {k: v for k, v in os.environ.items() if k.startswith("FLATOUT_")}
print("I am", here["FLATOUT_RANK"], flush=True)
Path(sys.argv[1], here["FLATOUT_RANK"]).write_text(json.dumps(here))
if here["FLATOUT_RANK"] == sys.argv[2]:
    raise RuntimeError("this one cannot go on")
if sys.argv[2] != "-":
    time.sleep(600)
"""


def test_without_ray_the_next_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install flatout\[ray\]"):
        connect("auto")


def test_a_node_gets_the_differences_from_this_process(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text('{"plan": 1}')
    monkeypatch.setenv("HERE", "before")
    info = ray_job(
        ["python", "train.py"],
        {
            **os.environ,
            "HERE": "after",
            "NEW": "1",
            "FLATOUT_JOB": str(tmp_path / "job.json"),
            "PYTHONPATH": "/ours",
        },
    )
    assert info == RayJob(("python", "train.py"), os.getcwd(), {"HERE": "after", "NEW": "1"}, '{"plan": 1}')


@there
def test_ranks_on_two_nodes_know_their_rank_and_rank_0_prints(cluster, tmp_path):
    observed = []
    assert (
        run_ranks(
            cluster,
            RayJob((sys.executable, "-c", PROGRAM, str(tmp_path), "-"), str(tmp_path)),
            3,
            False,
            show=observed.append,
        )
        == 0
    )
    assert b"".join(observed) == b"I am 0\n"
    info = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [(each["FLATOUT_LOCAL_RANK"], each["FLATOUT_LOCAL_WORLD_SIZE"]) for each in info] in (
        [("0", "2"), ("1", "2"), ("0", "1")],
        [("0", "1"), ("0", "2"), ("1", "2")],
    )
    assert {each["FLATOUT_WORLD_SIZE"] for each in info} == {"3"}
    assert len({each["FLATOUT_RENDEZVOUS"] for each in info}) == 1


@there
def test_the_first_failure_ends_the_others(cluster, tmp_path):
    with pytest.raises(ProgramFailed, match=r"rank 1 on .* failed first, with exit code 1") as failed:
        run_ranks(
            cluster, RayJob((sys.executable, "-c", PROGRAM, str(tmp_path), "1"), str(tmp_path)), 3, False
        )
    assert "RuntimeError: this one cannot go on" in str(failed.value)


@there
def test_unsupported_requests_are_explained(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PLACEMENT_S", 2.0)
    with pytest.raises(NodesUnreachable, match="no room for 9 ranks of 1 CPU"):
        run_ranks(cluster, RayJob(("true",), str(tmp_path)), 9, False)
    with pytest.raises(NodesUnreachable, match="Put the program on a file system that all nodes share"):
        run_ranks(cluster, RayJob(("true",), str(tmp_path / "nowhere")), 1, False)
    with pytest.raises(ProgramNotFound, match="no-such-program cannot be started"):
        run_ranks(cluster, RayJob(("no-such-program",), str(tmp_path)), 1, False)
