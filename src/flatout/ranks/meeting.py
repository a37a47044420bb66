"""How the ranks of a program find each other: at a store that whoever started them has named."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from flatout.plan.standing import MEETING, Standing

PATIENCE_S = 1800.0  # torch's own: a rank may evaluate for long before it comes


def join(torch: Any, here: Standing, device_type: str, ledger: Any) -> None:
    """Meet the others. The script must not see it: what asks whether there are ranks would begin to divide by itself."""
    distributed = torch.distributed
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" and distributed.is_nccl_available() else "gloo"
    distributed.init_process_group(backend, store=store(torch, here, PATIENCE_S), rank=here.rank, world_size=here.world_size)
    ledger.call("process group", distributed.destroy_process_group)
    ledger.set(distributed, "is_initialized", lambda: False)


def store(torch: Any, where: Standing, timeout_s: float) -> Any:
    """The torch store at which the ranks of ``where`` meet. Raises torch's DistError where it cannot be reached within the timeout, ValueError for no place."""
    timeout = type(torch.distributed.constants.default_pg_timeout)(seconds=timeout_s)  # a datetime.timedelta, without the clocks of its module
    place = urlsplit(where.meeting)
    if place.scheme == "file":
        found = torch.distributed.FileStore(place.path, where.world_size)
        found.set_timeout(timeout)
        return found
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise ValueError(f"{MEETING}={where.meeting} is no place that ranks can meet at: file:///path or tcp://host:port")
    return torch.distributed.TCPStore(place.hostname, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
