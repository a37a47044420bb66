"""The objects that a Loop trains with, shared by the parts that make a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.precision import Precision

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Training:
    """``local_model``: the model as one rank may call it without the others. ``parameters``: the optimizer's."""

    torch: ModuleType
    model: Module
    local_model: Module
    optimizer: Optimizer
    loss_fn: Callable[[Any, Any], Any]
    parameters: list[Any]
    device: Device
    precision: Precision
    ranks: int  # that train together
