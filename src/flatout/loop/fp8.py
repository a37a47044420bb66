"""Linear layers that multiply in 8 bits (torchao): forward and both products of backward, scaled per tensor.

The weights keep their dtype.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module

MULTIPLE = 16  # of both sides of a product; the hardware instruction requires it
CAPABILITY = (8, 9)  # Ada and Hopper introduced the instruction


def multiply_in_8_bits(
    torch: ModuleType, model: Module, device: Device, ledger: Ledger, emulate: bool = False
) -> list[str]:
    """Replace the Linear layers of ``model`` whose sizes allow it and return their names.

    The parameters stay the same objects. The ledger restores the layers. ``emulate`` computes the same result
    slowly on any device. Raises LoopError if torchao, the hardware or a suitable layer is missing.
    """
    if not emulate:
        _refuse_other_hardware(torch, device)
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise LoopError(
            f'precision="fp8" needs torchao, which cannot be imported ({error}). Run: pip install torchao'
        ) from None
    config = Float8LinearConfig(emulate=emulate)
    found = [
        (owner, short, child, f"{name}.{short}" if name else short)
        for name, owner in model.named_modules()
        for short, child in owner.named_children()
        if type(child) is torch.nn.Linear
        and not child.in_features % MULTIPLE
        and not child.out_features % MULTIPLE
    ]
    if not found:
        raise LoopError(
            f'precision="fp8" needs Linear layers whose sizes are multiples of {MULTIPLE}, and this model has none. '
            'precision="bf16" works for every model.'
        )
    made: dict[int, Any] = {}  # a layer used in two places stays shared
    for owner, short, child, _ in found:
        if id(child) not in made:
            made[id(child)] = Float8Linear.from_float(child, config)
            made[id(child)].train(child.training)
        ledger.set_item(owner._modules, short, made[id(child)])
    return [name for *_, name in found]


def _refuse_other_hardware(torch: ModuleType, device: Device) -> None:
    if device.type != "cuda":
        raise LoopError(
            f'precision="fp8" needs a GPU that multiplies in 8 bits, and this model is on {device}. Use precision="bf16".'
        )
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise LoopError(
            f'precision="fp8" needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Ada, Hopper or later), and '
            f'{torch.cuda.get_device_name(device)} has {major}.{minor}. Use precision="bf16".'
        )
