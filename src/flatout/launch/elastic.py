"""A program on several machines: the agent that each of them runs, in torchrun's own words.

`python -m flatout.cli.agent` takes `python -m torch.distributed.run`'s place. Both run torch's elastic agent with the same options; what ours does
beside it stands in launch/rendezvous.py. The person's command is executed as it was typed (--no-python), so scripts, modules and any other
program are the same to it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

import psutil

from flatout.launch.command import Command
from flatout.launch.identity import FAMILIES, OF_RANKS
from flatout.launch.nodes import Endpoint, Nodes, endpoint, node_range
from flatout.launch.process import die_with_flatout

AGENT = "flatout.cli.agent"
BACKEND = "flatout"
JOIN_S = 600  # for all nodes to come, at the start and after a failure: torch's own figure
LAST_CALL_S = 10  # for more nodes than the fewest; torch waits 30 s, which a job that has lost a node idles away
STORE_S = 30  # for one answer of the rendezvous; torch waits 60 s
CLOSE_S = 10


def agent_command(nodes: Nodes, command: Command, divided: bool) -> list[str]:
    """What every node executes. ``divided``: flatout makes ranks of a program that knows of none; else the program finds what torchrun sets."""
    # -P: the folder that one is in may have a torch.py or click.py of the person's.
    words = [sys.executable, "-P", "-m", AGENT, "--nodes", nodes.range, "--procs", str(nodes.procs), "--restarts", str(nodes.restarts)]
    words += ["--rendezvous", str(nodes.rendezvous)] if nodes.rendezvous.port else []
    words += ["--node-rank", str(nodes.node_rank)] if nodes.node_rank is not None else []
    words += [*(["--gpus"] if nodes.gpus else []), *(["--divided"] if divided else [])]
    return [*words, "--", *command.argv]


def asked_of_agent(words: Sequence[str]) -> tuple[Nodes, bool, list[str]]:
    """The other way round: what `agent_command` said. Raises ValueError or UsageError for what it cannot have said."""
    at = list(words).index("--")
    ours, command = list(words[:at]), list(words[at + 1:])
    flags = {flag for flag in ("--gpus", "--divided") if flag in ours}
    rest = [word for word in ours if word not in flags]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    fewest, most = node_range(given["--nodes"])
    where = endpoint(given["--rendezvous"]) if "--rendezvous" in given else Endpoint("localhost", 0)
    rank = int(given["--node-rank"]) if "--node-rank" in given else None
    return Nodes(fewest, most, int(given["--procs"]), where, rank, int(given["--restarts"]), "--gpus" in flags), "--divided" in flags, command


def torchrun_words(nodes: Nodes, at: Endpoint, own_address: str, argv: Sequence[str]) -> list[str]:
    """The options of torch.distributed.run for this node, and the command. ``at`` is where the rendezvous is served."""
    timeouts = {"join_timeout": JOIN_S, "last_call_timeout": LAST_CALL_S, "close_timeout": CLOSE_S, "read_timeout": STORE_S, "is_host": 0}
    return ["--nnodes", nodes.range, "--nproc-per-node", str(nodes.procs), "--max-restarts", str(nodes.restarts),
            "--rdzv-backend", BACKEND, "--rdzv-endpoint", str(at), "--rdzv-id", job_name(argv),
            "--rdzv-conf", ",".join(f"{key}={value}" for key, value in timeouts.items()),
            "--local-addr", own_address, "--no-python", argv[0], *map(_unexpanded, argv[1:])]


def _unexpanded(word: str) -> str:
    """torchrun puts the local rank in the place of ``${local_rank}`` (string.Template), and would halve every ``$$``."""
    return word.replace("$", "$$")


def job_name(argv: Sequence[str]) -> str:
    """The same on every node that was given the same command: nodes of two jobs never meet at one port."""
    return f"flatout-{hashlib.sha256(chr(0).join(argv[1:]).encode()).hexdigest()[:12]}"


def own_address(towards: Endpoint) -> str:
    """The address of this machine from which ``towards`` is reached. Raises OSError where the name is unknown or nothing leads there."""
    family, _, _, _, place = socket.getaddrinfo(towards.host, towards.port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:  # connecting a datagram socket sends nothing
        asking.connect(place)
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    for name, known in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in known):
            return name
    return None


def for_ranks(nodes: Nodes, own: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What the ranks of this node need in their environment, where the person has not chosen otherwise."""
    found: dict[str, str] = {}
    # gloo listens on the address of the host's name, which /etc/hosts often makes 127.0.1.1: ranks of two machines then never reach each other.
    interface = interface_of(own)
    if interface and "GLOO_SOCKET_IFNAME" not in environment:
        found["GLOO_SOCKET_IFNAME"] = interface
    if nodes.procs > 1 and "OMP_NUM_THREADS" not in environment:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found["OMP_NUM_THREADS"] = str(max(1, cores // nodes.procs))
    return found


def of_other_launchers(environment: Mapping[str, str]) -> list[str]:
    """The names of what would tell a program that believes to be alone of other ranks."""
    return [name for name in environment if name in OF_RANKS or name.startswith(FAMILIES)]


def end_descendants(grace_s: float) -> None:
    """SIGTERM to every process that this one has started, directly or not, and SIGKILL to what is left of them after the grace."""
    ranks = psutil.Process().children(recursive=True)  # looked up once: what begins meanwhile belongs to the next round
    for rank in ranks:
        _signal(rank, signal.SIGTERM)
    # Not psutil.wait_procs: it would take the exit codes, and torch's agent then believes that its ranks ended well.
    pause = threading.Event()
    for _ in range(round(grace_s / 0.1)):
        if not any(map(_runs, ranks)):
            return
        pause.wait(0.1)
    for rank in filter(_runs, ranks):
        _signal(rank, signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass


def end_with_parent() -> None:
    """SIGTERM for this process when the one that has started it ends."""
    die_with_flatout(signal.SIGTERM)
