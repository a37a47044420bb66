"""Let activations overwrite their input where nobody needs it any more.

What it does: sets ``inplace`` of ReLU, ReLU6, Hardtanh and LeakyReLU layers, whose gradient follows from their output. Which of them may is tried
    out on a copy of the model in the first step: where outputs or gradients differ in one bit, or autograd objects, the layer stays as it is.
Why it is faster: seldom; one tensor less is written. It is smaller where the input would have lived on.
When it does not help: models without such layers, or that have done it; GELU and SiLU need their input for the gradient, ELU for its last bit.
What it can change: nothing, bit for bit, on what was tried. A layer is tried with one batch.
Evidence: measured on your program before it is kept: peak memory and time.
Sources: torch.nn.ReLU documentation; tools/autograd/derivatives.yaml of PyTorch ("result" in the place of "self").
"""

from __future__ import annotations

import copy
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Comparison, Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment

FROM_THEIR_OUTPUT = ("ReLU", "ReLU6", "Hardtanh", "LeakyReLU")


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if scene.compiled_by_script:
        return Skip("the script compiles the model, or a part of it, itself, and the compiler decides where results go")
    if not _activations(scene, scene.roots):
        if any(isinstance(module, scene.torch.jit.ScriptModule) for root in scene.roots for module in root.modules()):
            return Skip("the model, or a part of it, is compiled by torch.jit, which does not read the inplace attribute of its layers")
        return Skip("the model has no nn.ReLU, nn.ReLU6, nn.Hardtanh or nn.LeakyReLU layer that is not in place already")
    return Options((True,))


def _activations(scene: Any, roots: list[Any]) -> list[Any]:
    nn = scene.torch.nn
    kinds = tuple(getattr(nn, name) for name in FROM_THEIR_OUTPUT)
    found = {id(m): m for root in roots for m in root.modules() if type(m) in kinds and not m.inplace and getattr(m, "negative_slope", 1) > 0}
    return list(found.values())


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    activations = {id(m) for m in _activations(scene, scene.roots)}
    for root in map(scene.without_ranks, scene.roots):
        scene.wrap_forward(root, _trying_first(scene, root, activations, ledger), ledger)
    return ledger.restore


def _trying_first(scene: Any, root: Any, activations: set[int], ledger: Any) -> Any:
    """A wrapper whose first training call finds out, on a copy, which of the root's activations may be in place, and makes them so."""
    mine = [at for at, module in enumerate(root.modules()) if id(module) in activations]
    state = {"tried": False}

    def wrapper(forward: Any) -> Any:
        def in_place(*args: Any, **kwargs: Any) -> Any:
            if not state["tried"] and root.training and scene.torch.is_grad_enabled():
                state["tried"] = True
                modules = list(root.modules())
                for at in _sound(scene, root, mine, args, kwargs):
                    ledger.set(modules[at], "inplace", True)
            return forward(*args, **kwargs)
        return in_place
    return wrapper


def _sound(scene: Any, root: Any, places: list[int], args: Any, kwargs: Any) -> list[int]:
    """Which activations, by their place among the modules, leave every output and gradient as it was. Halves what fails until it is found."""
    plain = _played(scene, root, [], args, kwargs)
    if plain is None or not _same(scene.torch, plain, _played(scene, root, [], args, kwargs)):  # a model that does not repeat itself proves nothing
        return []
    kept: list[int] = []

    def add(some: list[int]) -> None:
        if not some:
            return
        if _same(scene.torch, plain, _played(scene, root, [*kept, *some], args, kwargs)):
            kept.extend(some)
        elif len(some) > 1:
            add(some[: len(some) // 2])
            add(some[len(some) // 2 :])

    add(places)
    return kept


def _played(scene: Any, root: Any, places: list[int], args: Any, kwargs: Any) -> list[Any] | None:
    """Outputs, what the modules hold, inputs and gradients of a copy with these activations in place; None where autograd objects.

    The program's random numbers stay where they are.
    """
    torch, asleep = scene.torch, scene.asleep
    tree = torch.utils._pytree
    devices = [scene.parameters[0].device] if scene.device_type == "cuda" else []
    scene.asleep = True
    try:
        with torch.random.fork_rng(devices):
            twin = copy.deepcopy(root)
            modules = list(twin.modules())
            for at in places:
                modules[at].inplace = True
            given = tree.tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            outputs = _tensors(torch, twin(*given[0], **given[1]))
            wanted = [out for out in outputs if out.requires_grad]
            torch.autograd.backward(wanted, [out.detach().clone() for out in wanted])
        inputs = _tensors(torch, given)
        held = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)]  # a loss may look at them
        return [*(tensor.detach() for tensor in (*outputs, *held, *inputs)), *(x.grad for x in (*inputs, *twin.parameters()))]
    except Exception:  # a version error, a model that cannot be copied: both mean that it stays as it is
        return None
    finally:
        scene.asleep = asleep


def _tensors(torch: Any, nest: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _same(torch: Any, plain: list[Any], other: list[Any] | None) -> bool:
    return other is not None and len(plain) == len(other) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(plain, other, strict=True))


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """What the gradient needs is overwritten: it passes where the activation had cut it off."""
    def wrapper(forward: Any) -> Any:
        return lambda input: input + (forward(input.detach()) - input.detach())

    for activation in _activations(scene, scene.roots):
        scene.wrap_forward(activation, wrapper, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return "nn.ReLU(inplace=True)  # where neither the layer before it nor anybody else needs its input"


LEVER = Lever("inplace", Moment.MODEL, Effect.EXACT, applies, code, apply=apply, live=True, guard=Comparison.BITWISE, known_bad=known_bad, saves_memory=True,
              excludes=("compile",), page=__doc__)
