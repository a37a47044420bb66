"""The rendezvous of the ranks: a store that the launcher has named."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flatout.distributed.single_process import original_init_process_group
from flatout.job.rank_environment import RENDEZVOUS, RankEnvironment

if TYPE_CHECKING:
    from torch import device as Device
    from torch.distributed import Store

    from flatout.schema.program import Ledger

TIMEOUT_S = 1800.0  # torch's default: a rank may evaluate for long before it arrives


def join(torch: ModuleType, env: RankEnvironment, device: Device, ledger: Ledger) -> None:
    """Create the process group for tensors on the model's ``device``.

    Hide it from the script: a script that asks whether there are ranks would start to parallelise itself."""
    distributed, store_ = torch.distributed, store(torch, env, TIMEOUT_S)
    backend = "gloo" if device.type != "cuda" else _backend_of_cuda(torch, env, store_, device)
    original_init_process_group(torch)(backend, store=store_, rank=env.rank, world_size=env.world_size)
    ledger.on_restore("process group", distributed.destroy_process_group)
    ledger.set(distributed, "is_initialized", lambda: False)


def _backend_of_cuda(torch: ModuleType, env: RankEnvironment, store_: Store, device: Device) -> str:
    """NCCL needs one device per rank; ranks that share a device use gloo."""
    if not torch.distributed.is_nccl_available():
        return "gloo"
    store_.set(f"device {env.rank}", f"{os.uname().nodename} {torch.cuda.get_device_properties(device).uuid}")
    devices = {store_.get(f"device {rank}") for rank in range(env.world_size)}
    return "cpu:gloo,cuda:nccl" if len(devices) == env.world_size else "gloo"


def store(torch: ModuleType, env: RankEnvironment, timeout_s: float) -> Any:
    """The torch store for the rendezvous of ``env``.

    Raises DistError if it is unreachable within the timeout.

    Raises ValueError if the address is invalid."""
    # a datetime.timedelta, without the clocks of its module
    timeout = type(torch.distributed.constants.default_pg_timeout)(seconds=timeout_s)
    address = urlsplit(env.rendezvous)
    if address.scheme == "file":
        store_ = torch.distributed.FileStore(address.path, env.world_size)
        store_.set_timeout(timeout)
        return store_
    if address.scheme != "tcp" or not address.hostname or not address.port:
        raise ValueError(
            f"{RENDEZVOUS}={env.rendezvous} is not a valid rendezvous. Use file:///path or tcp://host:port/round"
        )
    store_ = torch.distributed.TCPStore(
        address.hostname, address.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return torch.distributed.PrefixStore(f"flatout{address.path}", store_)


def broadcast_text(torch: ModuleType, env: RankEnvironment, text: str) -> str:
    """The ``text`` of rank 0. On one machine all ranks have the same."""
    if env.rendezvous.startswith("file:"):
        return text
    store_ = store(torch, env, TIMEOUT_S)
    if env.rank == 0:
        store_.set("text", text)
    return str(store_.get("text").decode())
