"""Handle a script's own use of several devices or processes inside a rank.

There it has one device and one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flatout.job.rank_environment import RENDEZVOUS, RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch import device as Device
    from torch.distributed import Store
    from torch.nn import Module

    from flatout.schema.program import Ledger


def one_device(torch: ModuleType, ledger: Ledger) -> None:
    """From now on ``nn.DataParallel`` computes on one device.

    That is the first visible device of those that the script names. It then passes its input through, and
    keeps its name, its type and ``module``. On a CPU it does so anyway."""
    kind = torch.nn.DataParallel
    init = kind.__init__

    @wraps(init)
    def init_on_one_device(
        self: object, module: Module, device_ids: Any = None, output_device: object = None, dim: int = 0
    ) -> None:
        if torch.cuda.is_available():
            devices = [
                torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
                for device in device_ids or ()
            ]
            visible = [device for device in devices if (device.index or 0) < torch.cuda.device_count()]
            device_ids, output_device = [visible[0] if visible else torch.cuda.current_device()], None
        init(self, module, device_ids, output_device, dim)

    ledger.set(kind, "__init__", init_on_one_device)


def one_process(torch: ModuleType, ledger: Ledger) -> None:
    """From now on the script cannot create its own ranks: N ranks would each start N."""
    distributed = torch.distributed
    if not distributed.is_available():
        return
    original = distributed.init_process_group

    @wraps(original)
    def init_process_group(*args: object, **kwargs: object) -> Any:
        raise CannotParallelize(
            "the script parallelises itself (it calls torch.distributed.init_process_group): remove --procs"
        )

    init_process_group.flatout_original = original  # type: ignore[attr-defined]
    for owner in (distributed, distributed.distributed_c10d):
        ledger.set(owner, "init_process_group", init_process_group)


def original_init_process_group(torch: ModuleType) -> Callable[..., Any]:
    """torch's own ``init_process_group``."""
    current = torch.distributed.init_process_group
    original: Callable[..., Any] = getattr(current, "flatout_original", current)
    return original


def reject_child_process(torch: ModuleType) -> None:
    """Raises CannotParallelize in a process that the script has started: every rank would start such processes."""
    if torch.multiprocessing.parent_process() is not None:
        raise CannotParallelize("the script trains in processes that it starts itself: remove --procs")


# The rendezvous of the ranks: a store that the launcher has named.

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
