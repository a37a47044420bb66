"""Keep data in host memory while the device does not need it.

What it does: "activations" copies the tensors of a mebibyte and more that autograd saves on a CUDA device to
    pinned host memory on a side stream. It copies them back when the backward pass needs them. "optimizer"
    keeps the optimizer state there, and on the device only during its step.
Why it is faster: it is not; it saves memory on the device.
When it does not help: on a CPU, which has no other memory; if the bus is slower than recomputation (lever
    recompute).
What it can change: nothing, bit for bit. Host memory must hold what the device does not.
Evidence: measured on your program before it is kept: peak memory and time.
Sources: torch.autograd.graph.saved_tensors_hooks documentation; Ren et al., ZeRO-Offload, 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import COMPILER_CHOOSES, NO_CUDA, in_pieces
from flatout.levers.saved_tensors.host import OffloadHooks
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext

LEAST_NUMBERS = 4096  # smaller state tensors are not worth a copy


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.device_type != "cuda":
        return Skip(NO_CUDA)
    if why := in_pieces(context):
        return Skip(why)
    if context.compiled_by_script:
        return Skip(COMPILER_CHOOSES)
    return Options(("activations", "optimizer") if context.optimizers else ("activations",))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    if context.device_type == "cuda":
        ledger.call("pinned memory", lambda: _give_back(context.torch, context.device))  # undone last
    if value == "activations":
        torch = context.torch
        hooks = OffloadHooks(torch, context.device_type)
        for root in context.roots:
            context.wrap_forward(context.without_ranks(root), _offloading(torch, hooks), ledger)
    else:
        for optimizer in context.optimizers:
            _state_away(context.torch, optimizer, ledger)
    return ledger.restore


def _offloading(torch: ModuleType, hooks: OffloadHooks) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        def on_the_host(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                return forward(*args, **kwargs)

        return on_the_host

    return wrapper


def _state_away(torch: ModuleType, optimizer: Optimizer, ledger: Ledger) -> None:
    """Move the state to the parameters' device for each step and back afterwards.

    It is pinned, so that the copies do not wait for each other.
    """
    really = optimizer.step

    def move(away: bool) -> None:
        devices = set()
        for p, state in optimizer.state.items():
            for key, held in state.items() if p.device.type == "cuda" else ():
                if isinstance(held, torch.Tensor) and held.numel() >= LEAST_NUMBERS and held.is_cuda == away:
                    state[key] = _pinned(torch, held) if away else held.to(p.device, non_blocking=True)
                    devices.add(p.device)
        for device in devices if away else ():
            torch.cuda.current_stream(device).synchronize()  # the copies are complete for the next host read

    @wraps(really)
    def step(*args: object, **kwargs: object) -> Any:
        move(away=False)
        try:
            return really(*args, **kwargs)
        finally:
            move(away=True)

    ledger.call("optimizer state", lambda: move(away=False))
    ledger.set(optimizer, "step", step, new=True)
    move(away=True)


def _pinned(torch: ModuleType, held: Tensor) -> Any:
    there = torch.empty_strided(
        held.shape, held.stride(), dtype=held.dtype, device="cpu", pin_memory=True
    )  # ignores the script's default device
    return there.copy_(held, non_blocking=True)


def _give_back(torch: ModuleType, device: Device) -> None:
    """Free torch's cached pinned blocks.

    torch keeps them for the next pinned tensor, and meanwhile the machine lacks that memory.
    """
    torch.cuda.synchronize(device)  # a block is free once the last copy from it has ended
    torch._C._host_emptyCache()


def code(value: Value) -> str:
    if value == "optimizer":
        return "state = {key: held.to(device) for key, held in state.items()}  # before optimizer.step(); and to pinned host memory after it"
    return "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = ..."


LEVER = Lever(
    "offload",
    Moment.MODEL,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    live=True,
    after=("recompute",),
    excludes=("compile",),
    saves_memory=True,
    accepts=("activations", "optimizer"),
    page=__doc__,
)
