"""Where the agents of a job meet, and where the ranks of each round do.

Torch's own c10d rendezvous, with three differences:

* It listens on the address that it is told. torch's TCPStore("10.0.0.1", ...) listens on every address of the machine. The agents' state is a pickle in
  that store (dynamic_rendezvous.py), so whoever reaches it can run code: it belongs into a private network.
* Who serves is decided by who can bind the address, not by comparing names (_matches_machine_hostname errs for second interfaces and CNAMEs).
* Each round gets a store of its own, bound to a free port before anybody is told of it. torch keeps the store of the first round: a node that joins later
  waits for its address in vain, and keys of a failed round are read by the next one (pytorch #135712, closed without that; #167302).
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
from typing import Any

from flatout.launch.elastic import BACKEND, JOIN_S, STORE_S, own_address
from flatout.launch.nodes import Endpoint
from flatout.plan.errors import NodesApart, UsageError
from flatout.plan.folder import read_json, write_json

ANSWER_S = 5.0  # for a connection to the rendezvous


def claimed(where: Endpoint, node_rank: int | None, several: bool, wait: Callable[[float], Any] | None = None) -> socket.socket | None:
    """A socket that listens at ``where``, or None where that is another node's address or another process of this one serves already.

    Raises UsageError where node 0 cannot have the address, or the name leads back to each machine itself.
    """
    if node_rank:
        return None
    family, _, _, _, place = _resolved(where, wait or threading.Event().wait)
    address = ipaddress.ip_address(place[0].partition("%")[0])
    if address.is_unspecified:
        raise UsageError(f"{where.host} is every address of a machine, and none at which others could meet. Give the one that they reach: "
                         f"--rendezvous 10.0.0.1:{where.port}.")
    if several and address.is_loopback and not _is_loopback(where.host):
        raise UsageError(f"{where.host} is {place[0]} on this machine (/etc/hosts), where no other node can reach it. "
                         f"Give the address that the others know: --rendezvous 10.0.0.1:{where.port}.")
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a job that begins again must not wait for TIME_WAIT
    try:
        listening.bind(place)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or (node_rank == 0 and error.errno == errno.EADDRNOTAVAIL):
            raise UsageError(f"node 0 cannot listen at {where}: {error.strerror}. Give an address of this machine and a port that it may use.") from None
        return None
    return listening


def _resolved(where: Endpoint, wait: Callable[[float], Any]) -> Any:
    for _ in range(60):  # the name of a pod is known some seconds after the pod has begun
        try:
            return socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except socket.gaierror as error:
            said = error.strerror
            wait(1.0)
    raise UsageError(f"the host {where.host} is not known on this machine: {said}. Check --rendezvous, or give the address: "
                     f"--rendezvous 10.0.0.1:{where.port}.")


def reached_from_elsewhere(host: str) -> str:
    """This host's name, or its address where the name leads back to the machine itself (127.0.1.1 in /etc/hosts)."""
    place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    if not ipaddress.ip_address(str(place).partition("%")[0]).is_loopback or _is_loopback(host):
        return host
    return own_address(Endpoint("192.0.2.1", 9))  # TEST-NET-1 is nowhere: the address of the way to everywhere else


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def served(torch: Any, listening: socket.socket) -> Any:
    """The torch store that answers at this socket, for as long as it is kept."""
    host, port = listening.getsockname()[:2]
    # multi_tenant is left away: the socket is ours alone. The server takes the descriptor over.
    return torch.distributed.TCPStore(host, port, is_master=True, timeout=_span(torch, STORE_S), wait_for_workers=False,
                                      master_listen_fd=listening.detach())


def _span(torch: Any, seconds: float) -> Any:
    span = type(torch.distributed.constants.default_pg_timeout)  # datetime.timedelta, without the clocks of its module
    return span(seconds=seconds)


def answer(where: Endpoint, patience_s: float = ANSWER_S) -> str:
    """``yes``; ``no``, at once, where nobody listens or nothing leads there; or ``silence``, after the patience."""
    try:
        socket.create_connection((where.host, where.port), timeout=patience_s).close()
    except TimeoutError:
        return "silence"
    except OSError:
        return "no"
    return "yes"


def wait_for(where: Endpoint) -> None:
    """Until somebody serves at ``where``. Raises NodesApart where nobody does."""
    pause = threading.Event()
    for _ in range(JOIN_S // 2):
        if answer(where, 1.0) == "yes":
            return
        pause.wait(1.0)
    raise NodesApart(f"nobody serves the rendezvous at {where}. Start the node that has this address, with the same --rendezvous, and see that no firewall is "
                     f"between: nc -zv {where.host} {where.port}")


class Rounds:
    """torch's rendezvous handler, whose rounds have a store each. ``address`` is where this node serves one when it is the first.

    ``others`` are the other nodes of the round that runs, none between rounds; ``number`` counts the rounds of this node; ``has_rank_0`` in the last of them.
    """

    use_agent_store = True  # what the agent then tells its ranks: MASTER_ADDR and MASTER_PORT are a store that is served

    def __init__(self, torch: Any, inner: Any, address: str) -> None:
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
        self._store = None  # of the last round, whose ranks this agent has ended
        # The agents' store of a round is empty at first: torch puts the number of the round before its keys.
        info.store.set(f"flatout/node/{info.rank}", self.name)
        if info.rank == 0:
            listening = claimed(Endpoint(self._address, 0), 0, several=False)
            assert listening is not None  # port 0 is never in use
            port = listening.getsockname()[1]
            self._store = served(self._torch, listening)
            info.store.set("flatout/meeting", f"{port} {self._address}")
        port, address = info.store.get("flatout/meeting").decode().split(" ")
        names = [info.store.get(f"flatout/node/{rank}").decode() for rank in range(info.world_size)]
        self._one_job(info)
        self.number += 1
        self.others = [name for name in names if name != self.name]
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def _one_job(self, info: Any) -> None:
        """All nodes run under the plan and the seed of the node of rank 0: each has made a job of its own, and ranks that differ would train apart."""
        path = os.environ.get("FLATOUT_JOB")
        own = read_json(Path(path)) if path else None
        if info.rank == 0:
            info.store.set("flatout/job", json.dumps(own))
        theirs = json.loads(info.store.get("flatout/job").decode())
        if path and isinstance(theirs, dict) and theirs != own:
            write_json(Path(path), theirs | {"pid": own.get("pid") if isinstance(own, dict) else None})

    def _next(self) -> Any:
        """torch's own next round, without the store that it would keep from the first one: the variable is read at this call, and by nothing else."""
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


def register(torch: Any, address: str, made: Callable[[Rounds], None]) -> None:
    """Make torchrun know ``--rdzv-backend flatout``; ``made`` is given the rounds when the agent begins."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def make(parameters: Any) -> Rounds:
        backend, store = create_backend(parameters)
        rounds = Rounds(torch, create_handler(store, backend, parameters), address)
        made(rounds)
        return rounds

    rendezvous_handler_registry.register(BACKEND, make)


def client(torch: Any, where: Endpoint) -> Any:
    """A connection of its own to the store at ``where``."""
    return torch.distributed.TCPStore(where.host, where.port, is_master=False, timeout=_span(torch, STORE_S), wait_for_workers=False)
