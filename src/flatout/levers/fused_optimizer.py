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
        return Skip("the script updates its parameters without an optimizer object")
    ways = [_ways(scene.torch, optimizer) for optimizer in scene.optimizers]
    common = [way for way in ("fused", "foreach") if any(way in w for w in ways)]
    if not common:
        names = ", ".join(sorted({type(o).__name__ for o in scene.optimizers}))
        return Skip(f"{names} has no fused form, or the script has chosen one itself")
    return Options((common[0],))


def _ways(torch: Any, optimizer: Any) -> list[str]:
    """The forms this optimizer could be switched to."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or "foreach" not in inspect.signature(kind.__init__).parameters:
        return []
    ways = []
    for group in optimizer.param_groups:
        # False was written by somebody as well; the default is None.
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable") or group.get("capturable"):
            return []
        if any(p.is_complex() or p.layout != torch.strided or not p.is_floating_point() for p in group["params"]):
            return []
    if "fused" in inspect.signature(kind.__init__).parameters:
        ways.append("fused")
    # On CUDA the multi-tensor form is the default already.
    if not any(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
        ways.append("foreach")
    return ways


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
            _move_step_counters(torch, optimizer)
    if not done:
        raise LookupError(f"no optimizer here has a {value} form")
    return ledger.restore


def _move_step_counters(torch: Any, optimizer: Any) -> None:
    """Fused CUDA kernels read the step count on the device; the plain loop keeps it on the host."""
    for p, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and p.is_cuda and not step.is_cuda:
            state["step"] = step.to(p.device)


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Doubles the learning rate."""
    for optimizer in scene.optimizers:
        for group in optimizer.param_groups:
            ledger.set_item(group, "lr", group["lr"] * 2)
    return ledger.restore


def code(value: Value) -> str:
    return f"optimizer = torch.optim.AdamW(model.parameters(), ..., {value}=True)"


LEVER = Lever("fused_optimizer", Moment.OPTIMIZER, Effect.ROUNDING, applies, code, apply=apply, live=True, known_bad=known_bad, page=__doc__)
