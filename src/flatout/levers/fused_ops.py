"""Fuse the last layer with its loss, and LayerNorm on a GPU.

What it does: does not compute the logits of a vocabulary-sized linear layer until something reads them. If
    they go straight into cross_entropy, it computes loss and gradients from chunks, and the whole tensor
    never exists. All other code that uses the logits finds them. On CUDA, LayerNorm layers run a kernel that
    reads each row once. If the vocabulary is not a multiple of 16 bytes (50,257), Tensor Cores
    multiply by a padded copy of the weight. Names, types and state_dict stay.
Why it is faster: at 50,000 classes, the logits, their log-probabilities and their gradients take most of a
    step's memory traffic and memory.
When it does not help: small vocabularies; programs that read their logits after the loss, which compute them
    again; models that the script compiles itself.
What it can change: rounding of sums. A hook registered on the logits after the loss is not called.
Evidence: peak memory of such a loss 22 times smaller at 50,000 classes (CPU, 1,024 rows of 32, float32, torch
    2.14.1); time is measured on your program before it is kept.
Sources: `flatout.kernels.chunked_loss` and `flatout.kernels.layer_norm`, with their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import modules_of, script_hooks
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from flatout.schema.program import Ledger, TrainingContext

MIN_VOCABULARY = 8192  # with this many classes, a layer is always an output over a vocabulary
REPORT_AFTER_STEPS = 3


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip("the script compiles the model or a part of it, and the compiler fuses operations itself")
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), and these kernels have no second derivative"
        )
    if not context.optimizers:
        return Skip(
            "the program has no torch.optim.Optimizer to show when the weights change; logits that are read late need the old weights"
        )
    if not _heads(context) and not _norms(context):
        custom = next((type(head).__name__ for head in _vocabulary_layers(context)), None)
        if custom is not None:
            return Skip(
                f"the vocabulary-sized {custom} layer is not a plain nn.Linear (custom class, hooks, forward or parameters)"
            )
        return Skip(
            f"no linear layer has at least {MIN_VOCABULARY} outputs, or as many as an Embedding has rows, "
            "and no layer on a CUDA device is a LayerNorm with weights"
        )
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    from flatout.kernels import deferred_logits

    torch, heads, norms = context.torch, _heads(context), _norms(context)
    for head in heads:
        context.wrap_forward(head, _defer_logits(torch, head, deferred_logits.linear), ledger)
        context.uncompiled.append(head)
        ledger.on_restore("left out of graphs", partial(context.uncompiled.remove, head))
    for norm in norms:
        context.wrap_forward(norm, _fused_norm(torch, norm), ledger)

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    counts = {"steps": 0, "losses": deferred_logits.FUSED_LOSSES[0]}

    def on_step(*_: object) -> None:
        deferred_logits.before_step()
        counts["steps"] += 1
        if (
            counts["steps"] == REPORT_AFTER_STEPS
            and heads
            and not norms
            and deferred_logits.FUSED_LOSSES[0] == counts["losses"]
        ):
            context.report(
                "fused_ops",
                "nothing was fused, because this program's logits do not go straight into cross_entropy",
            )

    ledger.on_restore("optimizer step hook", register_optimizer_step_pre_hook(on_step).remove)
    return ledger.restore


def _heads(context: TrainingContext) -> list[Any]:
    """Plain linear layers whose outputs are a vocabulary.

    Their width is the row count of an Embedding in the same root and occurs once, or it is very large.
    """
    return [
        head
        for head in _vocabulary_layers(context)
        if type(head) is context.torch.nn.Linear and _is_plain(context, head)
    ]


def _vocabulary_layers(context: TrainingContext) -> list[Any]:
    torch, layers = context.torch, {}
    for root in context.roots:
        modules = list(root.modules())
        embeddings, linears = (
            [m for m in modules if isinstance(m, kind)] for kind in (torch.nn.Embedding, torch.nn.Linear)
        )
        vocabularies, tied = {m.num_embeddings for m in embeddings}, {id(m.weight) for m in embeddings}
        widths = [m.out_features for m in linears]
        for module in linears:
            # A position Embedding may have as many rows as each layer has outputs.
            width = module.out_features
            if width >= MIN_VOCABULARY or (
                width in vocabularies and (id(module.weight) in tied or widths.count(width) == 1)
            ):
                layers[id(module)] = module
    return list(layers.values())


def _norms(context: TrainingContext) -> list[Any]:
    return [
        module
        for module in modules_of(context)
        if type(module) is context.torch.nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.weight.is_cuda
        and _is_plain(context, module)
    ]


def _is_plain(context: TrainingContext, module: Module) -> bool:
    torch, own_forward = context.torch, vars(module).get("forward")
    ordinary = all(
        type(p) is torch.nn.Parameter
        and p.is_floating_point()
        and p.layout is torch.strided
        and p.device.type in ("cpu", "cuda")
        for p in module.parameters(recurse=False)
    )
    return (
        ordinary
        and not script_hooks(context, module)
        and (own_forward is None or getattr(own_forward, "flatout", False))
    )


def _defer_logits(torch: ModuleType, head: Module, linear: Callable[..., Any]) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        def deferred_logits_or_plain(input: Tensor) -> Any:
            if (
                not torch.is_grad_enabled()
                or torch.compiler.is_compiling()
                or torch.jit.is_tracing()
                or type(input) is not torch.Tensor
                or input.dim() < 2
                or not input.numel()
                or not (input.requires_grad or head.weight.requires_grad)
                or (input.dtype is not head.weight.dtype and not torch.is_autocast_enabled(input.device.type))
            ):
                return forward(input)
            return linear(input, head.weight, head.bias)

        return deferred_logits_or_plain

    return wrapper


def _fused_norm(torch: ModuleType, norm: Module) -> Any:
    from flatout.kernels.layer_norm.op import layer_norm

    def wrapper(forward: Callable[..., Any]) -> Any:
        def in_one_pass(input: Tensor) -> Any:
            # Autocast converts inputs and outputs of normalisations to float32: leave that to torch.
            if (
                type(input) is not torch.Tensor
                or not input.is_cuda
                or input.dtype is not norm.weight.dtype
                or torch.is_autocast_enabled("cuda")
                or torch.compiler.is_compiling()
                or torch.jit.is_tracing()
                or input.shape[-1:] != tuple(norm.normalized_shape)
                or not input.numel()
            ):
                return forward(input)
            return layer_norm(input, norm.weight, norm.bias, norm.eps)

        return in_one_pass

    return wrapper


def code(value: Value) -> str:
    return (
        'loss = sum(torch.utils.checkpoint.checkpoint(lambda h, t: F.cross_entropy(model.head(h), t, reduction="sum"), h, t, use_reentrant=False)\n'
        "           for h, t in zip(hidden.flatten(0, 1).split(1024), targets.flatten().split(1024))) / targets.numel()"
    )


LEVER = Lever("fused_ops", Moment.MODEL, Effect.ROUNDING, applies, code, apply=apply, live=True, page=__doc__)
