"""Handle a script's own use of several devices or processes inside a rank.

There it has one device and one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
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
