"""The rendezvous of a job's agents, and of the ranks of each round.

This is torch's c10d rendezvous with three differences:

* It listens only on the given address. torch's TCPStore("10.0.0.1", ...) listens on every address of the
  machine. The agents' state is a pickle in that store (dynamic_rendezvous.py), so anyone who can reach it can
  run code: keep it inside a private network.
* The node that can bind the address serves it. torch compares names instead, and _matches_machine_hostname is
  wrong for second interfaces and CNAMEs.
* Each round gets its own store, bound to a free port before its address is published. torch keeps the store
  of the first round: a node that joins later waits for its address in vain, and the next round reads keys of
  a failed one (pytorch #135712, closed without a fix for this; #167302).
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.job.folder import read_json, write_json
from flatout.launch.elastic import BACKEND, JOIN_S, STORE_S, own_address
from flatout.launch.nodes import Endpoint
from flatout.schema.errors import NodesApart, UsageError

ANSWER_S = 5.0  # for a connection to the rendezvous


def claimed(
    where: Endpoint, node_rank: int | None, several: bool, wait: Callable[[float], Any] | None = None
) -> socket.socket | None:
    """Return a socket that listens at ``where``.

    Returns None if that is the address of another node, or another process of this node serves it already.
    Raises UsageError if node 0 cannot bind the address, or the name resolves to the loopback address.
    """
    if node_rank:
        return None
    family, _, _, _, place = _resolved(where, wait or threading.Event().wait)
    address = ipaddress.ip_address(place[0].partition("%")[0])
    if address.is_unspecified:
        raise UsageError(
            f"{where.host} stands for every address of a machine, so other nodes cannot connect to it. Give an address that they can reach: "
            f"--rendezvous 10.0.0.1:{where.port}."
        )
    if several and address.is_loopback and not _is_loopback(where.host):
        raise UsageError(
            f"{where.host} is {place[0]} on this machine (/etc/hosts), so no other node can reach it. "
            f"Give an address that the others can reach: --rendezvous 10.0.0.1:{where.port}."
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # a restarted job must not wait for TIME_WAIT
    try:
        listening.bind(place)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or (
            node_rank == 0 and error.errno == errno.EADDRNOTAVAIL
        ):
            raise UsageError(
                f"node 0 cannot listen at {where}: {error.strerror}. Give an address of this machine and a port that it may use."
            ) from None
        return None
    return listening


def _resolved(where: Endpoint, wait: Callable[[float], Any]) -> Any:
    for _ in range(60):  # the name of a pod resolves some seconds after the pod has started
        try:
            return socket.getaddrinfo(
                where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            said = error.strerror
            wait(1.0)
    raise UsageError(
        f"the host {where.host} is not known on this machine: {said}. Check --rendezvous, or give the address: "
        f"--rendezvous 10.0.0.1:{where.port}."
    )


def reached_from_elsewhere(host: str) -> str:
    """Return the host's name, or its address if the name is a loopback address (127.0.1.1 in /etc/hosts)."""
    place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    if not ipaddress.ip_address(str(place).partition("%")[0]).is_loopback or _is_loopback(host):
        return host
    return own_address(
        Endpoint("192.0.2.1", 9)
    )  # TEST-NET-1 has no hosts: this gives the address on the default route


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def served(torch: ModuleType, listening: socket.socket) -> Any:
    """Return a torch store that serves this socket for as long as it is referenced."""
    host, port = listening.getsockname()[:2]
    # No multi_tenant: the socket is ours alone. The server takes over the descriptor.
    return torch.distributed.TCPStore(
        host,
        port,
        is_master=True,
        timeout=_span(torch, STORE_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _span(torch: ModuleType, seconds: float) -> Any:
    span = type(
        torch.distributed.constants.default_pg_timeout
    )  # datetime.timedelta, without the clocks of its module
    return span(seconds=seconds)


def answer(where: Endpoint, timeout_s: float = ANSWER_S) -> str:
    """Probe a server.

    Returns ``yes``; ``no`` at once if nothing listens or there is no route; or ``silence`` after the
    timeout."""
    try:
        socket.create_connection((where.host, where.port), timeout=timeout_s).close()
    except TimeoutError:
        return "silence"
    except OSError:
        return "no"
    return "yes"


def wait_for(where: Endpoint) -> None:
    """Wait until a server answers at ``where``. Raises NodesApart if none does."""
    pause = threading.Event()
    for _ in range(JOIN_S // 2):
        if answer(where, 1.0) == "yes":
            return
        pause.wait(1.0)
    raise NodesApart(
        f"no node serves the rendezvous at {where}. Start the node with this address, with the same --rendezvous, and check that no firewall "
        f"blocks it: nc -zv {where.host} {where.port}"
    )


class RoundRendezvous:
    """torch's rendezvous handler with one store per round.

    ``address`` is the address at which this node serves a store if it is the first node. ``others`` are the
    other nodes of the current round, empty between rounds. ``number`` counts the rounds of this node.
    ``has_rank_0``: this node had rank 0 in the last round.
    """

    use_agent_store = (
        True  # the agent then tells its ranks that MASTER_ADDR and MASTER_PORT are already served
    )

    def __init__(self, torch: ModuleType, inner: Any, address: str) -> None:
        self._torch, self._inner, self._address = torch, inner, address
        self._store: Any = None
        self.name = f"{address} (process {os.getpid()})"
        self.others: list[str] = []
        self.number = 0
        self.has_rank_0 = True

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        self.others = []
        info = self._next()
        self.has_rank_0 = info.rank == 0
        self._store = None  # drop the store of the last round, whose ranks this agent has ended
        # The agents' store is empty at the start of a round: torch prefixes its keys with the round number.
        info.store.set(f"flatout/node/{info.rank}", self.name)
        if info.rank == 0:
            listening = claimed(Endpoint(self._address, 0), 0, several=False)
            assert listening is not None  # port 0 is never in use
            port = listening.getsockname()[1]
            self._store = served(self._torch, listening)
            info.store.set("flatout/rendezvous", f"{port} {self._address}")
        port, address = info.store.get("flatout/rendezvous").decode().split(" ")
        names = [info.store.get(f"flatout/node/{rank}").decode() for rank in range(info.world_size)]
        self._one_job(info)
        self.number += 1
        self.others = [name for name in names if name != self.name]
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def _one_job(self, info: Any) -> None:
        """Replace this node's job by that of rank 0's node, so that all ranks use the same plan and seed."""
        path = os.environ.get("FLATOUT_JOB")
        own = read_json(Path(path)) if path else None
        if info.rank == 0:
            info.store.set("flatout/job", json.dumps(own))
        theirs = json.loads(info.store.get("flatout/job").decode())
        if path and isinstance(theirs, dict) and theirs != own:
            write_json(Path(path), theirs | {"pid": own.get("pid") if isinstance(own, dict) else None})

    def _next(self) -> Any:
        """Start torch's next round without sharing the first round's store.

        Only this call reads the variable."""
        variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        before = os.environ.get(variable)
        os.environ[variable] = "1"
        try:
            return self._inner.next_rendezvous()
        finally:
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before

    def get_backend(self) -> str:
        return BACKEND

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def register(torch: ModuleType, address: str, made: Callable[[RoundRendezvous], None]) -> None:
    """Register ``--rdzv-backend flatout`` with torchrun. ``made`` gets the Rounds when the agent starts."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def make(parameters: Any) -> RoundRendezvous:
        backend, store = create_backend(parameters)
        rounds = RoundRendezvous(torch, create_handler(store, backend, parameters), address)
        made(rounds)
        return rounds

    rendezvous_handler_registry.register(BACKEND, make)


def client(torch: ModuleType, where: Endpoint) -> Any:
    """Return a separate connection to the store at ``where``."""
    return torch.distributed.TCPStore(
        where.host, where.port, is_master=False, timeout=_span(torch, STORE_S), wait_for_workers=False
    )
