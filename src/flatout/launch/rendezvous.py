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
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from flatout.launch.elastic import BACKEND, JOIN_S, STORE_S
from flatout.launch.nodes import Endpoint
from flatout.plan.errors import NodesApart, UsageError

ANSWER_S = 5.0  # for a connection to the rendezvous
LOST_S = 30.0  # without one, after which a node gives up: six times the cut of five seconds that a training must survive


def claimed(where: Endpoint, node_rank: int | None, several: bool, wait: Callable[[float], Any] | None = None) -> socket.socket | None:
    """A socket that listens at ``where``, or None where that is another node's address or another process of this one serves already.

    Raises UsageError where node 0 cannot have the address, or the name leads back to each machine itself.
    """
    if node_rank:
        return None
    family, _, _, _, place = _resolved(where, wait or threading.Event().wait)
    if several and ipaddress.ip_address(place[0].partition("%")[0]).is_loopback and not _is_loopback(where.host):
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


def reachable(where: Endpoint) -> bool:
    try:
        socket.create_connection((where.host, where.port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def wait_for(where: Endpoint) -> None:
    """Until somebody serves at ``where``. Raises NodesApart where nobody does."""
    pause = threading.Event()
    for _ in range(JOIN_S):
        if reachable(where):
            return
        pause.wait(1.0)
    raise NodesApart(f"nobody serves the rendezvous at {where}. Start the node that has this address, with the same --rendezvous, and see that no firewall is "
                     f"between: nc -zv {where.host} {where.port}")


def watch(where: Endpoint, lost: Callable[[], None]) -> threading.Thread:
    """Call ``lost`` once the rendezvous has not answered for LOST_S. An agent that is cut off waits inside a store operation, where torch hears of nothing."""

    def look() -> None:
        pause, silent_s = threading.Event(), 0.0
        while silent_s < LOST_S:
            pause.wait(ANSWER_S)
            silent_s = 0.0 if reachable(where) else silent_s + 2 * ANSWER_S
        lost()

    thread = threading.Thread(target=look, name="flatout-rendezvous-watch", daemon=True)
    thread.start()
    return thread


class Rounds:
    """torch's rendezvous handler, whose rounds have a store each. ``address`` is where this node serves one when it is the first."""

    use_agent_store = True  # what the agent then tells its ranks: MASTER_ADDR and MASTER_PORT are a store that is served

    def __init__(self, torch: Any, inner: Any, address: str) -> None:
        self._torch, self._inner, self._address = torch, inner, address
        self._store: Any = None

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        before = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # read at this call, and by nothing else: torch then keeps no store of its own
        try:
            info = self._inner.next_rendezvous()
        finally:
            del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
            if before is not None:
                os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = before
        self._store = None  # of the last round, whose ranks this agent has ended
        if info.rank == 0:
            listening = claimed(Endpoint(self._address, 0), 0, several=False)
            assert listening is not None  # port 0 is never in use
            port = listening.getsockname()[1]
            self._store = served(self._torch, listening)
            info.store.set("flatout/meeting", f"{port} {self._address}")  # this store is the round's own, by torch's prefix
        port, address = info.store.get("flatout/meeting").decode().split(" ")
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def get_backend(self) -> str:
        return BACKEND

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def register(torch: Any, address: str) -> None:
    """Make torchrun know ``--rdzv-backend flatout``."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def made(parameters: Any) -> Rounds:
        backend, store = create_backend(parameters)
        return Rounds(torch, create_handler(store, backend, parameters), address)

    rendezvous_handler_registry.register(BACKEND, made)
