"""The rendezvous of the ranks: a store that the launcher has named."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flatout.distributed.single_process import for_ourselves
from flatout.job.rank_environment import RENDEZVOUS, RankEnvironment

if TYPE_CHECKING:
    from torch import device as Device
    from torch.distributed import Store

    from flatout.schema.program import Ledger

TIMEOUT_S = 1800.0  # torch's default: a rank may evaluate for long before it arrives


def join(torch: ModuleType, here: RankEnvironment, device: Device, ledger: Ledger) -> None:
    """Create the process group for tensors on the model's ``device``.

    Hide it from the script: a script that asks whether there are ranks would start to parallelise itself.
    """
    distributed, place = torch.distributed, store(torch, here, TIMEOUT_S)
    backend = "gloo" if device.type != "cuda" else _backend_of_cuda(torch, here, place, device)
    for_ourselves(torch)(backend, store=place, rank=here.rank, world_size=here.world_size)
    ledger.call("process group", distributed.destroy_process_group)
    ledger.set(distributed, "is_initialized", lambda: False)


def _backend_of_cuda(torch: ModuleType, here: RankEnvironment, place: Store, device: Device) -> str:
    """NCCL needs one device per rank; ranks that share a device use gloo."""
    if not torch.distributed.is_nccl_available():
        return "gloo"
    place.set(f"device {here.rank}", f"{os.uname().nodename} {torch.cuda.get_device_properties(device).uuid}")
    devices = {place.get(f"device {rank}") for rank in range(here.world_size)}
    return "cpu:gloo,cuda:nccl" if len(devices) == here.world_size else "gloo"


def store(torch: ModuleType, where: RankEnvironment, timeout_s: float) -> Any:
    """The torch store for the rendezvous of ``where``.

    Raises DistError if it is unreachable within the timeout.

    Raises ValueError if the address is invalid.
    """
    timeout = type(torch.distributed.constants.default_pg_timeout)(
        seconds=timeout_s
    )  # a datetime.timedelta, without the clocks of its module
    place = urlsplit(where.rendezvous)
    if place.scheme == "file":
        found = torch.distributed.FileStore(place.path, where.world_size)
        found.set_timeout(timeout)
        return found
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise ValueError(
            f"{RENDEZVOUS}={where.rendezvous} is not a valid rendezvous. Use file:///path or tcp://host:port/round"
        )
    found = torch.distributed.TCPStore(
        place.hostname, place.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return torch.distributed.PrefixStore(f"flatout{place.path}", found)


def of_rank_0(torch: ModuleType, here: RankEnvironment, text: str) -> str:
    """Return the ``text`` of rank 0. On one machine all ranks have the same."""
    if here.rendezvous.startswith("file:"):
        return text
    place = store(torch, here, TIMEOUT_S)
    if here.rank == 0:
        place.set("text", text)
    return str(place.get("text").decode())
