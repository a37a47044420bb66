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
    keeps its name, its type and ``module``. On a CPU it does so anyway.
    """
    kind = torch.nn.DataParallel
    init = kind.__init__

    @wraps(init)
    def init_on_one_device(
        self: object, module: Module, device_ids: Any = None, output_device: object = None, dim: int = 0
    ) -> None:
        if torch.cuda.is_available():
            named = [
                torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
                for one in device_ids or ()
            ]
            there = [one for one in named if (one.index or 0) < torch.cuda.device_count()]
            device_ids, output_device = [there[0] if there else torch.cuda.current_device()], None
        init(self, module, device_ids, output_device, dim)

    ledger.set(kind, "__init__", init_on_one_device)


def one_process(torch: ModuleType, ledger: Ledger) -> None:
    """From now on the script cannot create its own ranks: N ranks would each start N."""
    distributed = torch.distributed
    if not distributed.is_available():
        return
    really = distributed.init_process_group

    @wraps(really)
    def init_process_group(*args: object, **kwargs: object) -> Any:
        raise CannotParallelize(
            "the script parallelises itself (it calls torch.distributed.init_process_group): remove --procs"
        )

    init_process_group.flatout_really = really  # type: ignore[attr-defined]
    for owner in (distributed, distributed.distributed_c10d):
        ledger.set(owner, "init_process_group", init_process_group)


def for_ourselves(torch: ModuleType) -> Callable[..., Any]:
    """torch's own ``init_process_group``."""
    now = torch.distributed.init_process_group
    really: Callable[..., Any] = getattr(now, "flatout_really", now)
    return really


def must_be_the_rank(torch: ModuleType) -> None:
    """Raises CannotParallelize in a process that the script has started: every rank would start such processes."""
    if torch.multiprocessing.parent_process() is not None:
        raise CannotParallelize("the script trains in processes that it starts itself: remove --procs")
