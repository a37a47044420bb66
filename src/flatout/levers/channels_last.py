"""Store convolution weights and images with channels last (NHWC).

What it does: converts the 4-D parameters, their gradients and optimizer state in place, and each image as it
    enters a root module. Outputs of the module have the default layout again. Dropout draws its mask in the
    default layout: torch draws it in memory order, so another layout would drop other values.
Why it is faster: convolution kernels read the channels of one pixel together; the default layout makes them
    reorder first.
When it does not help: models without 2-D convolutions; few channels; some GANs, whose images pass from module
    to module.
What it can change: rounding of sums.
Evidence: ResNet-50 1.47x, ViT-B 1.005x (RTX 3090, timm, torch 1.12, AMP); measured on your program before it
    is kept.
Sources: PyTorch tutorial "Channels Last Memory Format"; timm benchmark tables.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flatout.levers.reasons import why_model_is_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.has_layer("Conv2d", "ConvTranspose2d"):
        return Skip("no module of the model is an nn.Conv2d or nn.ConvTranspose2d")
    if why := why_model_is_split(context):
        return Skip(why)
    if context.closure_steps and any(type(o).__name__ == "LBFGS" for o in context.optimizers):
        return Skip("LBFGS flattens the gradients, which requires their default layout")
    layouts = [
        (p.is_contiguous(), p.is_contiguous(memory_format=context.torch.channels_last))
        for p in context.parameters
        if p.dim() == 4
    ]
    # 1 x 1 kernels match both layouts.
    converted, default = layouts.count((False, True)), layouts.count((True, False))
    if converted:
        return Skip(
            f"{converted} of {converted + default} convolution weights are already stored as channels_last"
        )
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    _convert_state(context, torch.channels_last)
    ledger.on_restore("memory format", lambda: _convert_state(context, torch.contiguous_format))

    def wrapper(forward: Callable[..., Any]) -> Any:
        def on_channels_last(*args: object, **kwargs: object) -> Any:
            args = tuple(_to_layout(torch, a, torch.channels_last) for a in args)
            kwargs = {key: _to_layout(torch, a, torch.channels_last) for key, a in kwargs.items()}
            return _to_default(torch, forward(*args, **kwargs))

        return on_channels_last

    for root in context.roots:
        context.wrap_forward(root, wrapper, ledger)
    functional = torch.nn.functional
    ledger.set(functional, "dropout", _in_default_layout(torch, functional.dropout))
    return ledger.restore


def _in_default_layout(torch: ModuleType, dropout: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        # A subclass may stand for a value that is computed later
        if (
            inplace
            or not training
            or type(input) is not torch.Tensor
            or input.dim() != 4
            or input.is_contiguous()
        ):
            return dropout(input, p, training, inplace)
        return _to_layout(torch, dropout(input.contiguous(), p), torch.channels_last)

    return drawn


def _convert_state(context: TrainingContext, layout: object) -> None:
    """Convert parameters, gradients and optimizer state together.

    A fused optimizer walks all of them in memory order.
    """
    torch = context.torch
    with torch.no_grad():
        for p in {id(p): p for root in context.roots for p in root.parameters() if p.dim() == 4}.values():
            p.data = p.data.contiguous(memory_format=layout)
            if p.grad is not None:
                p.grad = p.grad.contiguous(memory_format=layout)
            for optimizer in context.optimizers:
                state = optimizer.state.get(p, {})
                for key, tensor in state.items():
                    if isinstance(tensor, torch.Tensor) and tensor.shape == p.shape:
                        state[key] = tensor.contiguous(memory_format=layout)


def _to_layout(torch: ModuleType, value: object, layout: object) -> Any:
    return (
        value.contiguous(memory_format=layout)
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()
        else value
    )


def _to_default(torch: ModuleType, output: Any) -> Any:
    """Convert outputs to the default layout: the script may call ``.view`` on them."""
    if isinstance(output, torch.Tensor):
        return output.contiguous() if output.dim() == 4 else output
    if type(output) is dict:
        return {key: _to_default(torch, value) for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(_to_default(torch, value) for value in output)
    return output


def code(value: Value) -> str:
    return "model.to(memory_format=torch.channels_last)  # and images.contiguous(memory_format=torch.channels_last)"


LEVER = Lever(
    "channels_last", Moment.MODEL, Effect.ROUNDING, applies, code, apply=apply, live=True, page=__doc__
)
