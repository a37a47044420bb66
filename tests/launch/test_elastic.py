"""Programs on several nodes: the options, the agent's command line, the rendezvous, and real agents with real
ranks on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from limits import hang_s

from flatout.launch.command import Command
from flatout.launch.elastic import (
    agent_command,
    asked_of_agent,
    for_ranks,
    job_name,
    own_address,
    torchrun_words,
)
from flatout.launch.environment import SITE
from flatout.launch.nodes import Endpoint, Nodes, endpoint, nodes_of
from flatout.launch.rendezvous import claimed
from flatout.schema.errors import UsageError

words = st.lists(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12), max_size=5
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": "2"}, "--rendezvous HOST:29400"),
        ({"nodes": "2", "rendezvous": "node1"}, "--rendezvous node1:29400"),
        ({"nodes": "2", "rendezvous": "node1:"}, "--rendezvous node1:29400"),
        ({"nodes": "2", "rendezvous": "node1:0"}, "from 1 to 65535"),
        ({"nodes": "2", "rendezvous": "node1:70000"}, "from 1 to 65535"),
        ({"nodes": "2", "rendezvous": "[fe80::1]"}, "--rendezvous [fe80::1]:29400"),
        ({"nodes": "4:1", "rendezvous": "a:1"}, "--nodes 1:4"),
        ({"nodes": "0"}, "--nodes 4"),
        ({"nodes": "two"}, "--nodes 4"),
        ({"nodes": "1:2:3"}, "--nodes 4"),
        ({"nodes": "2", "rendezvous": "a:1", "node_rank": 2}, "numbered from 0 to 1"),
        ({"nodes": "2", "rendezvous": "a:1", "node_rank": -1}, "numbered from 0 to 1"),
        ({"node_rank": 1}, "--nodes 2 --node-rank 1"),
        ({"rendezvous": "a:1"}, "--nodes 2 --rendezvous a:1"),
        ({"restarts": 3}, "--nodes 2 --restarts 3"),
        ({"nodes": "1", "restarts": -1}, "--restarts -1"),
        ({"nodes": "1", "procs": 2, "gpus": 2}, "Remove one of them"),
        ({"nodes": "1", "procs": 0}, "--procs 0"),
        ({"nodes": "1", "gpus": 0}, "--gpus 0"),
        ({"nodes": "2", "rendezvous": "a:1", "cluster": "--slurm"}, "--slurm knows the hosts itself"),
        ({"nodes": "2", "node_rank": 0, "cluster": "--k8s"}, "--k8s knows the hosts itself"),
    ],
)
def test_contradictory_options_are_rejected_with_the_next_command(options, said):
    with pytest.raises(UsageError) as refused:
        nodes_of(**options)
    assert said in str(refused.value)


def test_options():
    assert nodes_of(None, procs=4) is None
    assert nodes_of("1:4", 3, "10.0.0.1:29400", procs=2, restarts=5) == Nodes(
        1, 4, 2, Endpoint("10.0.0.1", 29400), 3, 5
    )
    assert nodes_of("2", None, "[fe80::1]:29400", gpus=8) == Nodes(
        2, 2, 8, Endpoint("fe80::1", 29400), None, 0, True
    )
    assert nodes_of("3", cluster="--slurm", gpus=8, restarts=2) == Nodes(
        3, 3, 8, Endpoint("localhost", 0), None, 2, True
    )
    assert str(endpoint("[fe80::1]:29400")) == "[fe80::1]:29400"


@given(words, st.booleans(), st.sampled_from([None, 0, 1]), st.booleans())
def test_the_agent_gets_the_options(arguments, gpus, node_rank, divided):
    nodes = Nodes(1, 2, 3, Endpoint("fe80::1", 29400), node_rank, 4, gpus)
    info = agent_command(nodes, Command((), ("python", *arguments)), divided)
    assert info[1:4] == ["-P", "-m", "flatout.launch.node_agent"]
    assert asked_of_agent(info[4:]) == (nodes, divided, ["python", *arguments])


@given(words)
@example(["$$", "${local_rank}", "--", "-m"])
def test_torchrun_hands_on_every_argument(arguments):
    run = pytest.importorskip("torch.distributed.run")
    from torch.distributed.elastic.utils.api import macros

    info = torchrun_words(
        Nodes(1, 4, 2, Endpoint("h", 1), None, 3), Endpoint("h", 29400), "10.0.0.1", ["python", *arguments]
    )
    config, entry, handed = run.config_from_args(run.parse_args(info))
    assert (entry, macros.substitute(handed, "1")) == ("python", arguments)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 4, 2, 3)
    assert (config.rdzv_endpoint, config.local_addr, config.run_id) == (
        "h:29400",
        "10.0.0.1",
        job_name(["python", *arguments]),
    )


def test_the_node_that_can_bind_the_address_serves():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            claimed(Endpoint("127.0.0.1", port), None, True) is None
        )  # another process on this machine serves already
        assert claimed(Endpoint("192.0.2.1", port), None, True) is None  # TEST-NET-1: no machine has it
        with pytest.raises(UsageError, match="node 0 cannot listen"):
            claimed(Endpoint("192.0.2.1", port), 0, True)
    assert claimed(Endpoint("127.0.0.1", port), 1, True) is None
    mine = claimed(Endpoint("127.0.0.1", port), None, True)
    assert mine is not None
    assert mine.getsockname() == ("127.0.0.1", port)
    mine.close()


def test_a_name_that_every_machine_resolves_to_itself_is_rejected(monkeypatch):
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))],
    )
    with pytest.raises(UsageError, match=r"node1 is 127\.0\.1\.1 on this machine"):
        claimed(Endpoint("node1", 29400), None, True)


def test_the_wildcard_address_is_no_rendezvous():
    with pytest.raises(UsageError, match="other nodes cannot connect to it"):
        claimed(Endpoint("0.0.0.0", 29400), None, True)


def test_an_unknown_host_is_named(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match=r"no-such-host\.invalid is not known"):
        claimed(Endpoint("no-such-host.invalid", 29400), None, True, wait=lambda _: None)


def test_ranks_get_the_interface_and_a_share_of_the_cores_unless_the_user_has_chosen():
    nodes = Nodes(2, 2, 2, Endpoint("127.0.0.1", 1))
    own = own_address(nodes.rendezvous)
    info = for_ranks(nodes, own, {})
    assert own == "127.0.0.1"
    assert info == {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
    }
    assert for_ranks(nodes, own, {"GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}) == {}


# Ranks need no torch: the program records its environment, and fails where it is told to.
PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path
seen = {k: v for k, v in os.environ.items() if k.startswith(("FLATOUT_", "TORCHELASTIC_", "SLURM_", "OMPI_"))
        or k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")}
if "FLATOUT_JOB" in seen:
    seen["FLATOUT_JOB"] = json.loads(Path(seen["FLATOUT_JOB"]).read_text())
here, rank = Path(sys.argv[1]), seen.get("FLATOUT_RANK", seen.get("RANK"))
tries = len(list(here.glob(f"rank{rank}.*")))
(here / f"new{rank}").write_text(json.dumps([seen, sys.argv[2:]]))
(here / f"new{rank}").rename(here / f"rank{rank}.{tries}")
print("I am", rank, flush=True)
if "--fail" in sys.argv and rank == "1" and tries < int(sys.argv[sys.argv.index("--fail") + 1]):
    while not any(seen["FLATOUT_RENDEZVOUS"] in path.read_text() for path in here.glob("rank0.*")):  # rank 0 of the same round has written, too
        time.sleep(0.05)
    raise RuntimeError("rank 1 cannot go on")
while "--stay" in sys.argv and not (here / "go").exists():
    time.sleep(0.05)
"""


def records(folder: Path) -> dict[str, list]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank*.*"))}


class Agents:
    """Several agents on this machine, as if on several nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, []
        (folder / "program.py").write_text(PROGRAM)
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{SITE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(folder),
        }

    def start(self, nodes: Nodes, *arguments: str, divided: bool = True) -> subprocess.Popen:
        job = self.folder / f"job{len(self.running)}.json"  # each node has made its own
        job.write_text(
            json.dumps({"entry": "builtins:repr", "seed": len(self.running), "pid": 1000 + len(self.running)})
        )
        self.environment["FLATOUT_JOB"] = str(job)
        argv = agent_command(
            nodes, Command((), (sys.executable, "program.py", str(self.folder), *arguments)), divided
        )
        self.running.append(
            subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.running[-1]

    def left(self) -> list[int]:
        """Living processes of these programs."""
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if str(self.folder).encode() in _read(path)
        ]

    def end(self) -> None:
        for agent in self.running:
            agent.kill()
        for number in self.left():  # an orphan would hold the pipes open
            os.kill(number, signal.SIGKILL)
        for agent in self.running:
            agent.communicate()


@pytest.fixture
def agents(tmp_path):
    found = Agents(tmp_path)
    yield found
    found.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def until(true, seconds: float = 60) -> None:
    deadline = time.monotonic() + hang_s(seconds)
    while not true():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.processes
def test_a_node_that_joins_later_and_a_failure_that_is_retried(agents, tmp_path):
    """Three rounds: one rank, two, two again. Each rank sees a single process, each round uses its own store,
    and rank 0's output appears once.

    At torch's own store, that of the first round, a node that joins later waits in vain.
    """
    nodes = Nodes(1, 2, 1, Endpoint("127.0.0.1", free_port()), None, 1, True)
    agents.environment |= {
        "CUDA_VISIBLE_DEVICES": "5,7",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "SLURM_JOB_ID": "7",
    }
    odd = ["a b", "$$", "${local_rank}", "--", "'\"", "--fail", "1", "--stay"]
    started = [agents.start(nodes, *odd)]
    until(lambda: "rank0.0" in records(tmp_path))
    started.append(agents.start(nodes, *odd))
    until(lambda: {"rank0.2", "rank1.1"} <= set(records(tmp_path)))
    (tmp_path / "go").touch()
    done = [(agent.communicate(timeout=hang_s(60)), agent.returncode) for agent in started]
    assert [code for _, code in done] == [0, 0], done
    seen = records(tmp_path)
    assert sorted(seen) == ["rank0.0", "rank0.1", "rank0.2", "rank1.0", "rank1.1"]
    for name, (environment, arguments) in seen.items():
        assert arguments == odd
        assert not [key for key in environment if not key.startswith(("FLATOUT_", "CUDA_", "SLURM_JOB_"))], (
            environment
        )
        numbers = [
            environment[f"FLATOUT_{key}"] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        ]
        assert numbers == [name[4], "0", "1" if name == "rank0.0" else "2", "1"]
        assert environment["CUDA_VISIBLE_DEVICES"] == "5"
    meetings = {name: environment["FLATOUT_RENDEZVOUS"] for name, (environment, _) in seen.items()}
    assert meetings["rank0.1"] == meetings["rank1.0"]
    assert meetings["rank0.2"] == meetings["rank1.1"]
    assert len(set(meetings.values())) == 3
    assert all(meeting.startswith("tcp://127.0.0.1:") for meeting in meetings.values())
    jobs = [environment["FLATOUT_JOB"] for environment, _ in seen.values()]
    assert len({job["seed"] for job in jobs}) == 1  # one plan and one seed, those of rank 0's node
    assert {job["pid"] for job in jobs} == {1000, 1001}
    said = "".join(out for (out, _), _ in done)
    assert said.count("I am 0") == 3
    assert "I am 1" not in said
    assert sum("serves the rendezvous" in err for (_, err), _ in done) == 1
    assert all("no authentication" in err for (_, err), _ in done)


@pytest.mark.processes
def test_a_failure_names_its_rank_and_exits_with_its_code(agents):
    agent = agents.start(Nodes(1, 1, 2, Endpoint("localhost", 0)), "--fail", "9", "--stay")
    _, err = agent.communicate(timeout=hang_s(90))
    assert agent.returncode == 1
    assert "rank 1 (" in err
    assert "failed first on this node, with exit code 1" in err
    assert "RuntimeError: rank 1 cannot go on" in err  # rank 1 writes into a file: its last output is shown
    assert "Traceback" not in err.split("The end of its output")[0]


@pytest.mark.processes
def test_a_script_that_is_distributed_itself_keeps_what_torchrun_sets_and_ends_by_a_signal(agents, tmp_path):
    agent = agents.start(Nodes(1, 1, 2, Endpoint("localhost", 0)), "--stay", divided=False)
    until(lambda: len(records(tmp_path)) == 2)
    assert {environment["RANK"] for environment, _ in records(tmp_path).values()} == {"0", "1"}
    assert all(
        "FLATOUT_RANK" not in environment and environment["MASTER_PORT"] != "0"
        for environment, _ in records(tmp_path).values()
    )
    agent.send_signal(signal.SIGTERM)
    out, err = agent.communicate(timeout=hang_s(60))
    assert agent.returncode == 128 + signal.SIGTERM, err
    assert "ended by SIGTERM" in err
    assert "I am 1" in out


@pytest.mark.processes
def test_no_rank_outlives_an_agent_that_was_killed(agents, tmp_path):
    agent = agents.start(Nodes(1, 1, 2, Endpoint("localhost", 0)), "--stay")
    until(lambda: len(records(tmp_path)) == 2)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    until(lambda: not agents.left(), 3)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
