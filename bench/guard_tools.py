"""Tools of the guard's test bed: conditions for applying a lever, and building blocks of its levers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import SRC  # noqa: F401  puts src on the path

from flatout.schema.enums import Effect, Moment
from flatout.schema.lever import Lever, Options, Skip, Undo

EXACT, ROUNDING, PRECISION, RESAMPLED = Effect.EXACT, Effect.ROUNDING, Effect.PRECISION, Effect.RESAMPLED
LOSSES = (  # of torch.nn.functional
    *("cross_entropy", "nll_loss", "mse_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
When = Callable[[Any], str]  # the reason why a lever does not apply to a training context, or nothing


# -- where a lever applies -----------------------------------------------------------------------------------


def anywhere(context: Any) -> str:
    return ""


def with_optimizer(context: Any) -> str:
    return "" if context.optimizers else "no optimizer object"


def with_group(*keys: str) -> When:
    """Applies if some optimizer has one of these settings enabled."""
    return lambda context: (
        ""
        if any(g.get(k) for o in context.optimizers for g in o.param_groups for k in keys)
        else f"no optimizer with {keys[0]}"
    )


def with_layer(*names: str) -> When:
    return lambda context: "" if context.has_layer(*names) else f"no layer {names[0]}"


def with_out_of_place(context: Any) -> str:
    """Applies if some ReLU could be in place and is not."""
    found = any(
        type(m) is context.torch.nn.ReLU and not m.inplace for root in context.roots for m in root.modules()
    )
    return "" if found else "no ReLU layer, or all are in place already"


def with_weights(count: int) -> When:
    return lambda context: (
        "" if sum(p.numel() for p in context.parameters) > count else f"at most {count} parameters"
    )


def without_tokens(context: Any) -> str:
    """Skips losses that are a mean over hundreds of tokens: one token changes them by 0.1 to 0.3 per cent."""
    return "the loss is a mean over hundreds of tokens" if context.has_layer("Embedding") else ""


def with_transform(*names: str) -> When:
    """Applies if the first loaded data set has one of these transforms; unknown before there is a loader."""

    def when(context: Any) -> str:
        seen = context._loaders._dataset
        held = getattr(getattr(seen() if seen else None, "transform", None), "transforms", ())
        return (
            ""
            if not context.steps or any(type(t).__name__.startswith(names) for t in held)
            else f"no transform {names[0]}"
        )

    return when


def both(*conditions: When) -> When:
    return lambda context: next(filter(None, (when(context) for when in conditions)), "")


def in_script(*words: str) -> When:
    """Applies if the program's own file contains one of these words."""

    def when(context: Any) -> str:
        text = Path(getattr(sys.modules["__main__"], "__file__", "") or sys.argv[0]).read_text(
            encoding="utf-8"
        )
        return (
            "" if any(re.search(rf"\b{word}\b", text) for word in words) else f"the program has no {words[0]}"
        )

    return when


def in_root(*words: str) -> When:
    """Applies if the class of some root module contains one of these words."""

    def when(context: Any) -> str:
        texts = [inspect.getsource(type(root)) for root in context.roots]
        return (
            "" if any(word in text for text in texts for word in words) else f"no root module with {words[0]}"
        )

    return when


def with_images(context: Any) -> str:
    return with_layer("Conv2d")(context) if context.steps else ""


# -- tools ---------------------------------------------------------------------------------------------------


def hook_gradients(
    context: Any, ledger: Any, change: Callable[[Any], Any], only: slice = slice(None)
) -> Undo:
    for p in context.parameters[only]:
        ledger.on_restore("gradient hook", p.register_hook(change).remove)
    return ledger.restore


def around_roots(context: Any, wrapper: Callable[[Any], Any], ledger: Any) -> Undo:
    """Wraps the forward pass of each root module."""
    for root in context.roots:
        context.wrap_forward(root, wrapper, ledger)
    return ledger.restore


def around_step(context: Any, ledger: Any, make: Callable[[Any, Callable], Callable]) -> Undo:
    for optimizer in context.optimizers:
        ledger.set(optimizer, "step", make(optimizer, optimizer.step), new=True)
    return ledger.restore


def around_transforms(context: Any, ledger: Any, change: Callable[[list[Any]], list[Any]]) -> Undo:
    """Changes the list of transforms of every data set that a loader uses."""

    def rule(dataset: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        transform = getattr(dataset, "transform", None)
        if hasattr(transform, "transforms"):
            transform.transforms = change(list(transform.transforms))
        return arguments

    context.change_loaders(rule, ledger)
    return ledger.restore


def modules(context: Any, *names: str) -> list[Any]:
    return [m for root in context.roots for m in root.modules() if type(m).__name__.startswith(names)]


def lever_of(
    name: str, effect: Effect, apply: Any, when: When = anywhere, moment: Moment = Moment.STEP
) -> Lever:
    def applies(facts: Any, context: Any) -> Options | Skip:
        reason = when(context)
        return Skip(reason) if reason else Options((True,))

    return Lever(
        name,
        moment,
        effect,
        applies,
        lambda value: "",
        apply=apply,
        live=moment is not Moment.LOADER,
        page=(apply.__doc__ or "").strip(),
    )
