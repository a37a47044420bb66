"""What if every batch were on the device already? Cached device tensors replace copies from the host.

One cached tensor replaces every copy of its shape, dtype and place in the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext

MAX_CACHED_COPIES = 256  # different copies; further ones, for example moved parameters, are real copies


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.device_type == "cpu":
        return Skip("the program trains on the CPU, so no batch is copied to a device")
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    tensor_class = context.torch.Tensor
    cache: dict[tuple[Any, ...], Any] = {}

    def cached(original: Callable[..., Any]) -> Any:
        def move(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if tensor.device.type != "cpu" or tensor.requires_grad or not context.torch.is_grad_enabled():
                return original(tensor, *args, **kwargs)
            caller = sys._getframe(1)
            key = (
                caller.f_code,
                caller.f_lasti,
                tuple(tensor.shape),
                tensor.dtype,
                repr(args),
                repr(sorted(kwargs.items(), key=lambda item: item[0])),
            )
            if key in cache:
                return cache[key].detach()
            moved = original(tensor, *args, **kwargs)
            if moved.device.type != "cpu" and len(cache) < MAX_CACHED_COPIES:
                cache[key] = moved
            return moved

        return move

    ledger.set(tensor_class, "to", cached(tensor_class.to))
    ledger.set(tensor_class, "cuda", cached(tensor_class.cuda))
    return ledger.restore


def code(value: Value) -> str:
    return "images, labels = images.to(device), labels.to(device)  # once before the loop, to see the step time without copies"


LEVER = Lever("copies", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__)
