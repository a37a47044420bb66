"""Deterministic kernels of a card, for steps whose bits are compared. Timed steps run without them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from flatout.schema.program import TrainingContext

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # torch's default on compute capability 9.0


@contextmanager
def deterministic_kernels(context: TrainingContext) -> Iterator[None]:
    """Enter it before the first forward pass, after the script has set its own flags.

    Operators without a deterministic kernel run as usual, without torch's warning. At the end the flags are the
    script's again, or what it set meanwhile. `context.kernel_flags` returns the script's at any time.
    """
    torch, ledger = context.torch, Ledger()
    context.flags_of_script = context.kernel_flags()
    warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
    ignored = warnings.filters[0]
    ledger.on_restore("warning", lambda: ignored in warnings.filters and warnings.filters.remove(ignored))  # type: ignore[attr-defined]
    if WORKSPACE[0] not in os.environ:
        ledger.set_item(os.environ, *WORKSPACE)
    for owner, name, value in (
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ):
        _set_flag(ledger, owner, name, value)
    if not torch.get_deterministic_debug_mode():
        # torch.use_deterministic_algorithms would import the compiler
        torch.set_deterministic_debug_mode("warn")
        ledger.on_restore("deterministic algorithms", lambda: _allow_others(torch))
    try:
        yield
    finally:
        ledger.restore()
        context.flags_of_script = {}


def _set_flag(ledger: Ledger, owner: object, name: str, value: bool) -> None:
    flag = Ledger()
    flag.set_flag(owner, name, value)
    ledger.on_restore(name, lambda: flag.restore() if getattr(owner, name) == value else None)


def _allow_others(torch: ModuleType) -> None:
    if torch.get_deterministic_debug_mode() == 1:
        torch.set_deterministic_debug_mode("default")
