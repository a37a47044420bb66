"""Let the optimizer update all parameters in one fused kernel, or in a few multi-tensor ones.

What it does: sets "fused" (or "foreach", where there is no fused kernel) in the optimizer's parameter groups.
Why it is faster: the plain loop runs a dozen small operations a parameter from Python; fused, it is one pass over memory.
When it does not help: few large parameters on a CPU; optimizers that are not torch's own.
What it can change: rounding; the same formula, with other intermediate roundings.
Evidence: 124M GPT 1.03x (A100), small networks up to 1.8x on CPUs; measured on your program before it is kept.
Sources: torch.optim documentation, "Algorithms"; the `fused` argument.
"""

from __future__ import annotations

import inspect
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if not scene.optimizers:
        return Skip("the program updates its parameters without a torch.optim.Optimizer")
    ways = [_ways(scene.torch, optimizer) for optimizer in scene.optimizers]
    common = [way for way in ("fused", "foreach") if any(way in w for w in ways)]
    if not common:
        return Skip(_why_none(scene.torch, scene.optimizers[0]))
    return Options((common[0],))


def _ways(torch: Any, optimizer: Any) -> list[str]:
    """The forms this optimizer could be switched to."""
    if not _is_torchs(optimizer) or _chosen(optimizer) or any(not _is_plain(torch, p) for group in optimizer.param_groups for p in group["params"]):
        return []
    kind, ways = type(optimizer), []
    if "fused" in inspect.signature(kind.__init__).parameters:
        ways.append("fused")
    # On CUDA the multi-tensor form is the default already.
    if not any(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
        ways.append("foreach")
    return ways


def _is_torchs(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and "foreach" in inspect.signature(kind.__init__).parameters


def _chosen(optimizer: Any) -> str:
    """The argument with which the script has chosen a form, or one that rules them out. False was written by somebody as well; the default is None."""
    return next((f"{name}={group[name]}" for group in optimizer.param_groups for name in ("fused", "foreach", "differentiable", "capturable")
                 if group.get(name) is not None and (group[name] or name in ("fused", "foreach"))), "")


def _is_plain(torch: Any, p: Any) -> bool:
    return bool(p.is_floating_point() and p.layout == torch.strided)


def _why_none(torch: Any, optimizer: Any) -> str:
    """Why this optimizer has no such form; of several optimizers the first is named."""
    name = type(optimizer).__name__
    if _is_torchs(optimizer) and (chosen := _chosen(optimizer)):
        return f"the program has made its {name} with {chosen}"
    if _is_torchs(optimizer) and any(not _is_plain(torch, p) for group in optimizer.param_groups for p in group["params"]):
        return f"{name} updates complex or sparse parameters, which have no fused form"
    return f"{name} has no form that this lever could switch it to"


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    torch, done = scene.torch, 0
    for optimizer in scene.optimizers:
        ways = _ways(torch, optimizer)
        way = value if value in ways else (ways[0] if ways else None)
        if way is None:
            continue
        done += 1
        for group in optimizer.param_groups:
            ledger.set_item(group, "fused", way == "fused")
            ledger.set_item(group, "foreach", way == "foreach")
        if way == "fused":
            _move_step_counters(torch, optimizer, to_device=True)
            ledger.call("step counters", lambda optimizer=optimizer: _move_step_counters(torch, optimizer, to_device=False))
    if not done:
        raise LookupError(f"no optimizer here has a {value} form")
    return ledger.restore


def _move_step_counters(torch: Any, optimizer: Any, to_device: bool) -> None:
    """Fused CUDA kernels read the step count on the device. The plain loop reads it on the host: from the device it would wait for each parameter."""
    for p, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and p.is_cuda and step.is_cuda != to_device:
            state["step"] = step.to(p.device if to_device else "cpu")


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Doubles the learning rate."""
    for optimizer in scene.optimizers:
        for group in optimizer.param_groups:
            ledger.set_item(group, "lr", group["lr"] * 2)
    return ledger.restore


def code(value: Value) -> str:
    return f"optimizer = torch.optim.AdamW(model.parameters(), ..., {value}=True)"


LEVER = Lever("fused_optimizer", Moment.OPTIMIZER, Effect.ROUNDING, applies, code, apply=apply, live=True, known_bad=known_bad, page=__doc__)
