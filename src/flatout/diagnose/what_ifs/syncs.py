"""What if Python never waited for a tensor? item() and similar calls return their previous value.

A stale value is wrong but good enough for a bound. A stale value that controls a loop could keep it running
forever, so a place that reads very often within one step gets a real value again. The option "floats"
excludes integers, which are often lengths.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext

READ_METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy")
MAX_STALE_READS = 1000  # times within one step, at one place


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    return Options(("all", "floats"))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    previous: dict[Any, Any] = {}
    reads: Counter[Any] = Counter()
    step = [context.steps]

    def stale(original: Callable[..., Any]) -> Any:
        def read(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if (
                tensor.requires_grad and tensor.grad_fn is None
            ):  # a parameter: it is saved or averaged, not read
                return original(tensor, *args, **kwargs)
            if context.device_type != "cpu" and tensor.device.type == "cpu":
                return original(tensor, *args, **kwargs)
            if value == "floats" and not (tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
                return original(tensor, *args, **kwargs)
            if step[0] != context.steps:
                step[0] = context.steps
                reads.clear()
            caller = sys._getframe(1)
            key = (caller.f_code, caller.f_lasti, tuple(tensor.shape), tensor.dtype)
            reads[key] += 1
            if key not in previous or reads[key] > MAX_STALE_READS:
                previous[key] = original(tensor, *args, **kwargs)
            return list(previous[key]) if isinstance(previous[key], list) else previous[key]

        return read

    for name in READ_METHODS:
        ledger.set(torch.Tensor, name, stale(getattr(torch.Tensor, name)))
    if context.device_type == "cuda":
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            ledger.set(owner, "synchronize", lambda *args, **kwargs: None)
    return ledger.restore


def code(value: Value) -> str:
    return "total += loss.detach()  # instead of loss.item(); read it once at the end"


LEVER = Lever("syncs", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__)
