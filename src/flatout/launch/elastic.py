"""Options of the agent that runs on each machine, in terms of torchrun.

`python -m flatout.launch.node_agent` replaces `python -m torch.distributed.run`. Both run torch's elastic agent with
the same options; launch/rendezvous.py has what ours adds. The user's command runs as typed (--no-python), so
scripts, modules and other programs all work.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

import psutil

from flatout.launch.command import Command
from flatout.launch.nodes import Endpoint, Nodes, endpoint, node_range
from flatout.launch.rank_variables import share_of_cores

AGENT = "flatout.launch.node_agent"
BACKEND = "flatout"
JOIN_S = 600  # for all nodes to join, at the start and after a failure: torch's default
LAST_CALL_S = 10  # for nodes beyond the minimum; torch waits 30 s, which a job that lost a node spends idle
STORE_S = 30  # for one answer of the rendezvous; torch waits 60 s
CLOSE_S = 10


def agent_command(nodes: Nodes, command: Command, divided: bool) -> list[str]:
    """Return the command that every node runs.

    ``divided``: flatout splits a single-process program into ranks; otherwise the program gets torchrun's
    variables."""
    # -P: the current folder may contain a torch.py or click.py of the user.
    words = [
        sys.executable,
        "-P",
        "-m",
        AGENT,
        "--nodes",
        nodes.range,
        "--procs",
        str(nodes.procs),
        "--restarts",
        str(nodes.restarts),
    ]
    words += ["--rendezvous", str(nodes.rendezvous)] if nodes.rendezvous.port else []
    words += ["--node-rank", str(nodes.node_rank)] if nodes.node_rank is not None else []
    words += [*(["--gpus"] if nodes.gpus else []), *(["--divided"] if divided else [])]
    return [*words, "--", *command.argv]


def asked_of_agent(words: Sequence[str]) -> tuple[Nodes, bool, list[str]]:
    """Parse the arguments that `agent_command` makes. Raises ValueError or UsageError for other arguments."""
    at = list(words).index("--")
    ours, command = list(words[:at]), list(words[at + 1 :])
    flags = {flag for flag in ("--gpus", "--divided") if flag in ours}
    rest = [word for word in ours if word not in flags]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    fewest, most = node_range(given["--nodes"])
    where = endpoint(given["--rendezvous"]) if "--rendezvous" in given else Endpoint("localhost", 0)
    rank = int(given["--node-rank"]) if "--node-rank" in given else None
    return (
        Nodes(fewest, most, int(given["--procs"]), where, rank, int(given["--restarts"]), "--gpus" in flags),
        "--divided" in flags,
        command,
    )


def torchrun_words(nodes: Nodes, at: Endpoint, own_address: str, argv: Sequence[str]) -> list[str]:
    """Return the options of torch.distributed.run for this node, and the command.

    ``at`` is the rendezvous."""
    timeouts = {
        "join_timeout": JOIN_S,
        "last_call_timeout": LAST_CALL_S,
        "close_timeout": CLOSE_S,
        "read_timeout": STORE_S,
        "is_host": 0,
    }
    return [
        "--nnodes",
        nodes.range,
        "--nproc-per-node",
        str(nodes.procs),
        "--max-restarts",
        str(nodes.restarts),
        "--rdzv-backend",
        BACKEND,
        "--rdzv-endpoint",
        str(at),
        "--rdzv-id",
        job_name(argv),
        "--rdzv-conf",
        ",".join(f"{key}={value}" for key, value in timeouts.items()),
        "--local-addr",
        own_address,
        "--no-python",
        argv[0],
        *map(_unexpanded, argv[1:]),
    ]


def _unexpanded(word: str) -> str:
    """Escape ``$``: torchrun expands ``${local_rank}`` with string.Template, which also halves ``$$``."""
    return word.replace("$", "$$")


def job_name(argv: Sequence[str]) -> str:
    """Return a name that depends on the command only, so that nodes of two jobs never join at one port."""
    return f"flatout-{hashlib.sha256(chr(0).join(argv[1:]).encode()).hexdigest()[:12]}"


def own_address(towards: Endpoint) -> str:
    """Return the address of this machine on the route to ``towards``.

    Raises OSError if the name is unknown or there is no route."""
    family, _, _, _, place = socket.getaddrinfo(towards.host, towards.port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:  # connecting a datagram socket sends nothing
        asking.connect(place)
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address."""
    for name, known in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in known):
            return str(name)
    return None


def for_ranks(nodes: Nodes, own: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks of this node need, unless the user has set them."""
    # gloo listens on the address of the host name. /etc/hosts often maps that to 127.0.1.1, so ranks of two
    # machines would never reach each other.
    interface = interface_of(own)
    found = {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in environment else {}
    return found | (share_of_cores(environment, nodes.procs) if nodes.procs > 1 else {})


def end_descendants(grace_s: float) -> None:
    """Send SIGTERM to all descendants, and SIGKILL to those still running after the grace period."""
    ranks = psutil.Process().children(
        recursive=True
    )  # looked up once: later processes belong to the next round
    for rank in ranks:
        _signal(rank, signal.SIGTERM)
    # Not psutil.wait_procs: it would reap the exit codes, and torch's agent would assume success.
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
