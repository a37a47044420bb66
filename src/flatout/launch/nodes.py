"""What a person asked of several machines: how many, how many ranks on each, and where they find each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flatout.plan.errors import UsageError


@dataclass(frozen=True)
class Endpoint:
    """A host (a name or an address) and a TCP port; port 0 is one that the system chooses."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Nodes:
    """From ``fewest`` to ``most`` machines with ``procs`` ranks each. ``gpus``: each rank has a CUDA device of its own.

    ``node_rank`` 0 serves the rendezvous, others do not; None lets the machine with the rendezvous's address serve it.
    """

    fewest: int
    most: int
    procs: int
    rendezvous: Endpoint
    node_rank: int | None = None
    restarts: int = 0
    gpus: bool = False

    @property
    def range(self) -> str:
        return f"{self.fewest}:{self.most}"


def endpoint(text: str) -> Endpoint:
    """``HOST:PORT`` or ``[IPv6]:PORT``. Raises UsageError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+)):(\d+)", text.strip())
    if match is None:
        host = text[: text.index("]") + 1].strip() if "]" in text else text.strip().split(":")[0] or "HOST"
        raise UsageError(f"--rendezvous {text} is not HOST:PORT. Give a host that every node reaches and a free port on it: --rendezvous {host}:29400.")
    host, port = match.group(1) or match.group(2), int(match.group(3))
    if not 0 < port < 65536:
        raise UsageError(f"--rendezvous {text}: there is no port {port} that nodes could agree on. Give one from 1 to 65535 that is free on {host}.")
    return Endpoint(host, port)


def node_range(text: str) -> tuple[int, int]:
    """``4`` or ``1:4``. Raises UsageError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 0 < fewest <= most:
        raise UsageError(f"--nodes {text} is no number of nodes. Give one (--nodes 4), or the fewest and the most (--nodes 1:4).")
    return fewest, most


def nodes_of(nodes: str | None = None, node_rank: int | None = None, rendezvous: str | None = None, procs: int | None = None, gpus: int | None = None,
             restarts: int | None = None, cluster: str | None = None) -> Nodes | None:
    """What the options say together, or None where none of them concerns several machines. Raises UsageError where they contradict each other.

    ``cluster`` is ``--slurm``, ``--ray`` or ``--k8s``, which name the hosts themselves.
    """
    for option, value in (("--node-rank", node_rank), ("--rendezvous", rendezvous)) if cluster else ():
        if value is not None:
            raise UsageError(f"{cluster} knows the hosts itself, so {option} {value} has no meaning with it. Leave it away.")
    if nodes is None:
        for option, value, why in (("--node-rank", node_rank, "says which of several nodes this is"), ("--restarts", restarts, "is what agents of nodes do"),
                                   ("--rendezvous", rendezvous, "is where several nodes meet")):
            if value is not None and not (cluster and option == "--restarts"):
                raise UsageError(f"{option} {value} {why}, and --nodes is missing. Say how many there are: --nodes 2 {option} {value}.")
        if cluster is None:
            return None
    fewest, most = node_range(nodes or "1")
    if procs is not None and gpus is not None:
        raise UsageError(f"--procs {procs} and --gpus {gpus} both say how many ranks a node has. Leave one of them away.")
    ranks = gpus if gpus is not None else 1 if procs is None else procs
    if ranks < 1:
        raise UsageError(f"{'--gpus' if gpus is not None else '--procs'} {ranks} leaves a node without a rank. Give at least 1.")
    if restarts is not None and restarts < 0:
        raise UsageError(f"--restarts {restarts} is less than none. Give 0 to end at the first failure, or how often to begin again.")
    if rendezvous is None:
        if most > 1 and not cluster:
            raise UsageError(f"--nodes {nodes} need a place to meet. Give the same on every node: --rendezvous HOST:29400, a port that is free on HOST.")
        where = Endpoint("localhost", 0)
    else:
        where = endpoint(rendezvous)
    if node_rank is not None and not 0 <= node_rank < most:
        raise UsageError(f"--node-rank {node_rank} is not one of {most} {'node' if most == 1 else 'nodes'}: they are numbered from 0 to {most - 1}.")
    return Nodes(fewest, most, ranks, where, node_rank, restarts or 0, gpus is not None)
