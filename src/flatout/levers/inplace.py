"""Let activations overwrite their input if nothing needs it any more.

What it does: sets ``inplace`` of ReLU, ReLU6, Hardtanh and LeakyReLU layers, whose gradient follows from
    their output. In the first step, it tries each layer on a copy of the model. If outputs or gradients
    differ in one bit, or autograd raises an error, the layer stays as it is.
Why it is faster: it rarely is; one tensor less is written. It saves memory if the input would otherwise stay
    alive.
When it does not help: models without such layers, or with in-place layers already. GELU and SiLU need their
    input for the gradient, ELU for its last bit.
What it can change: nothing, bit for bit, for the tested batch. Each layer is tested with one batch.
Evidence: measured on your program before it is kept: peak memory and time.
Sources: torch.nn.ReLU documentation; tools/autograd/derivatives.yaml of PyTorch ("result" instead of "self").
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import modules_of
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.nn import Module

    from flatout.schema.program import Ledger, TrainingContext

OUTPUT_ONLY_GRADIENT = ("ReLU", "ReLU6", "Hardtanh", "LeakyReLU")


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip("the script compiles the model or a part of it, and the compiler places results itself")
    if not _activations(context):
        if any(isinstance(module, context.torch.jit.ScriptModule) for module in modules_of(context)):
            return Skip(
                "the model or a part of it is compiled by torch.jit, which does not read the inplace attribute of its layers"
            )
        return Skip(
            "the model has no nn.ReLU, nn.ReLU6, nn.Hardtanh or nn.LeakyReLU layer without inplace=True"
        )
    return Options((True,))


def _activations(context: TrainingContext) -> list[Any]:
    kinds = tuple(getattr(context.torch.nn, name) for name in OUTPUT_ONLY_GRADIENT)
    return [
        m
        for m in modules_of(context)
        if type(m) in kinds and not m.inplace and getattr(m, "negative_slope", 1) > 0
    ]


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    activations = {id(m) for m in _activations(context)}
    for root in map(context.unwrap_ddp, context.roots):
        context.wrap_forward(root, _test_then_set(context, root, activations, ledger), ledger)
    return ledger.restore


def _test_then_set(context: TrainingContext, root: Module, activations: set[int], ledger: Ledger) -> Any:
    """A wrapper whose first training call tests the activations on a copy of the model.

    It sets ``inplace`` where it is sound.
    """
    positions = [position for position, module in enumerate(root.modules()) if id(module) in activations]
    status = {"tried": False}

    def wrapper(forward: Callable[..., Any]) -> Any:
        def in_place(*args: object, **kwargs: object) -> Any:
            if not status["tried"] and root.training and context.torch.is_grad_enabled():
                status["tried"] = True
                modules = list(root.modules())
                for position in _exact_positions(context, root, positions, args, kwargs):
                    ledger.set(modules[position], "inplace", True)
            return forward(*args, **kwargs)

        return in_place

    return wrapper


def _exact_positions(
    context: TrainingContext, root: Module, positions: list[int], args: object, kwargs: object
) -> list[int]:
    """The activations, by module position, that leave every output and gradient unchanged.

    A failing set is halved until the failing activations are found.
    """
    plain = _run_copy(context, root, [], args, kwargs)
    if plain is None or not _same(
        context.torch, plain, _run_copy(context, root, [], args, kwargs)
    ):  # a nondeterministic model proves nothing
        return []
    exact: list[int] = []

    def add(group: list[int]) -> None:
        if not group:
            return
        if _same(context.torch, plain, _run_copy(context, root, [*exact, *group], args, kwargs)):
            exact.extend(group)
        elif len(group) > 1:
            add(group[: len(group) // 2])
            add(group[len(group) // 2 :])

    add(positions)
    return exact


def _run_copy(
    context: TrainingContext, root: Module, positions: list[int], args: object, kwargs: object
) -> list[Any] | None:
    """The results of a copy of the model with these activations in place; None if autograd raises.

    They are outputs, tensors that the modules hold, inputs and gradients. The program's random state does not
    change.
    """
    from flatout.kernels.graph_recording import tensors_of

    torch, paused = context.torch, context.paused
    devices = [context.parameters[0].device] if context.device_type == "cuda" else []
    context.paused = True
    try:
        with torch.random.fork_rng(devices):
            device_copy = copy.deepcopy(root)
            modules = list(device_copy.modules())
            for position in positions:
                modules[position].inplace = True
            copied_inputs = torch.utils._pytree.tree_map(
                lambda x: (
                    x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                ),
                (args, kwargs),
            )
            outputs = tensors_of(device_copy(*copied_inputs[0], **copied_inputs[1]))
            differentiable = [out for out in outputs if out.requires_grad]
            torch.autograd.backward(differentiable, [out.detach().clone() for out in differentiable])
        inputs = tensors_of(copied_inputs)
        attributes = [
            value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)
        ]  # a loss may read them
        return [
            *(tensor.detach() for tensor in (*outputs, *attributes, *inputs)),
            *(x.grad for x in (*inputs, *device_copy.parameters())),
        ]
    except Exception:  # a version error or a model that cannot be copied: leave the layer as it is
        return None
    finally:
        context.paused = paused


def _same(torch: ModuleType, plain: list[Any], other: list[Any] | None) -> bool:
    return (
        other is not None
        and len(plain) == len(other)
        and all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(plain, other, strict=True)
        )
    )


def code(value: Value) -> str:
    return "nn.ReLU(inplace=True)  # if neither the previous layer nor other code needs its input"


LEVER = Lever(
    "inplace",
    Moment.MODEL,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    live=True,
    saves_memory=True,
    excludes=("compile",),
    page=__doc__,
)
