"""The options for several machines: their number, the ranks on each, and the rendezvous."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flatout.schema.errors import UsageError


@dataclass(frozen=True)
class Endpoint:
    """A host (name or address) and a TCP port; the system chooses the port if it is 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Nodes:
    """From ``fewest`` to ``most`` machines with ``procs`` ranks each.

    ``gpus``: each rank has its own CUDA device. ``node_rank`` 0 serves the rendezvous. With None, the machine
    that has the address of the rendezvous serves it.
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
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``. Raises UsageError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+)):(\d+)", text.strip())
    if match is None:
        host = text[: text.index("]") + 1].strip() if "]" in text else text.strip().split(":")[0] or "HOST"
        raise UsageError(
            f"--rendezvous {text} is not HOST:PORT. Give a host that every node reaches and a free port on it: --rendezvous {host}:29400."
        )
    host, port = match.group(1) or match.group(2), int(match.group(3))
    if not 0 < port < 65536:
        raise UsageError(
            f"--rendezvous {text}: {port} is not a valid port. Give one from 1 to 65535 that is free on {host}."
        )
    return Endpoint(host, port)


def node_range(text: str) -> tuple[int, int]:
    """Parse ``4`` or ``1:4``. Raises UsageError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 0 < fewest <= most:
        raise UsageError(
            f"--nodes {text} is not a number of nodes. Give a number (--nodes 4), or a minimum and a maximum (--nodes 1:4)."
        )
    return fewest, most


def nodes_of(
    nodes: str | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    procs: int | None = None,
    gpus: int | None = None,
    restarts: int | None = None,
    cluster: str | None = None,
) -> Nodes | None:
    """Combine the options, or return None if none of them concerns several machines.

    ``cluster`` is ``--slurm``, ``--ray`` or ``--k8s``, which know the hosts. Raises UsageError for a
    contradiction.
    """
    for option, value in (("--node-rank", node_rank), ("--rendezvous", rendezvous)) if cluster else ():
        if value is not None:
            raise UsageError(
                f"{cluster} knows the hosts itself, so {option} {value} has no effect with it. Remove the option."
            )
    if nodes is None:
        for option, value, why in (
            ("--node-rank", node_rank, "is the number of one of several nodes"),
            ("--restarts", restarts, "is for agents of nodes"),
            ("--rendezvous", rendezvous, "is for several nodes"),
        ):
            if value is not None and not (cluster and option == "--restarts"):
                raise UsageError(
                    f"{option} {value} {why}, but --nodes is missing. Give the number of nodes: --nodes 2 {option} {value}."
                )
        if cluster is None:
            return None
    fewest, most = node_range(nodes or "1")
    if procs is not None and gpus is not None:
        raise UsageError(
            f"--procs {procs} and --gpus {gpus} both set the number of ranks of a node. Remove one of them."
        )
    ranks = gpus if gpus is not None else 1 if procs is None else procs
    if ranks < 1:
        raise UsageError(
            f"{'--gpus' if gpus is not None else '--procs'} {ranks} leaves a node without a rank. Give at least 1."
        )
    if restarts is not None and restarts < 0:
        raise UsageError(
            f"--restarts {restarts} is negative. Give 0 to stop at the first failure, or the number of restarts."
        )
    if rendezvous is None:
        if most > 1 and not cluster:
            raise UsageError(
                f"--nodes {nodes} needs a rendezvous. Give the same on every node: --rendezvous HOST:29400, with a port that is free on HOST."
            )
        where = Endpoint("localhost", 0)
    else:
        where = endpoint(rendezvous)
    if node_rank is not None and not 0 <= node_rank < most:
        raise UsageError(
            f"--node-rank {node_rank} is not one of {most} {'node' if most == 1 else 'nodes'}: they are numbered from 0 to {most - 1}."
        )
    return Nodes(fewest, most, ranks, where, node_rank, restarts or 0, gpus is not None)
