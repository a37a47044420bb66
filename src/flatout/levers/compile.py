"""Compile the root modules with torch.compile.

What it does: replaces the forward of each root module by its compiled form, in place: names, types and
    state_dict stay. With fused_ops, the wide last layer and its callers stay uncompiled, and the largest
    other parts of the module are compiled. "default" fuses operations. "blocks" compiles repeated blocks only,
    and one block's code serves all. "reduce-overhead" records CUDA graphs, and the script gets copies of their
    outputs; the lever graphs can record the other values. "max-autotune-no-cudagraphs" tries more kernels: on
    a CPU none for training, whose weights change.
Why it is faster: fused element-wise operations touch memory once, and a step is launched without Python in
    between.
When it does not help: short runs (compiling takes seconds to minutes); shapes that change every step; double
    backward.
What it can change: rounding. Random draws match the plain program (fallback_random).
Evidence: 1.41x geometric mean over 180 models (A100, ASPLOS 2024); on 2 CPU cores 0.82x to 1.6x;
    measured on your program before it is kept, and kept only if the rest of the run repays the compilation.
Sources: torch.compile documentation; Ansel et al., PyTorch 2, ASPLOS 2024.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import COMPILED_ONCE, COMPILER_OFF, NO_ROOT, why_model_is_split
from flatout.levers.recompute import repeated
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.nn import Module

    from flatout.schema.program import Ledger, TrainingContext

MANY_BLOCKS = 6  # of one kind: from here on, compiling one of them saves much of the time


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if off := context.compiler_off():
        return Skip(COMPILER_OFF.format(off=off))
    if context.compiled_by_script:
        return Skip("the script compiles the model or a part of it")
    if context.create_graph_seen:
        return Skip(COMPILED_ONCE)
    if why := why_model_is_split(context):
        return Skip(why)
    if not context.roots:
        return Skip(NO_ROOT)
    if context.device_type == "cpu":
        # the compiler that torch._inductor.config.cpp.cxx asks for
        compiler = os.environ.get("CXX") or ("clang++" if facts.system == "Darwin" else "g++")
        if shutil.which(compiler.split()[0]) is None:
            return Skip(
                f"compiling for the CPU needs a C++ compiler, and {compiler} was not found; install it (`apt-get install g++`) or set CXX to another one"
            )
    if context.device_type == "cuda":
        if find_spec("triton") is None:
            return Skip("compiling for a GPU needs Triton, which is not installed; run `pip install triton`")
        # Triton builds the function that launches a kernel (triton.runtime.build)
        compiler = os.environ.get("CC") or "gcc"
        if shutil.which(compiler) is None and ("CC" in os.environ or shutil.which("clang") is None):
            return Skip(
                f"Triton needs a C compiler on the host, and {compiler} was not found; install it (`apt-get install gcc`) or set CC to another one"
            )
    blocks = [block for root in context.roots for block in repeated(context.torch, root)]
    kinds = Counter((type(block), *(p.shape for p in block.parameters())) for block in blocks)
    values: list[Value] = ["default", *["blocks"] * (max(kinds.values(), default=0) >= MANY_BLOCKS)]
    if context.device_type == "cuda":
        # Its graphs overwrite what a second forward pass before the backward pass would need
        single = len(context.roots) == 1 and context.backwards_in_last_step == 1
        values += [*["reduce-overhead"] * single, "max-autotune-no-cudagraphs"]
    return Options(tuple(values))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    from torch._inductor import config

    ledger.set(config, "fallback_random", True)
    if context.graph_passes:
        from flatout.kernels.graph_passes import GraphPasses

        ledger.set(config, "pre_grad_custom_pass", GraphPasses(context.graph_passes))
    distribution = torch.distributions.Distribution  # the first torch.compile disables its argument checks
    ledger.on_restore(
        "argument checks", partial(distribution.set_default_validate_args, distribution._validate_args)
    )
    mode = None if value in ("default", "blocks") else str(value)
    own_graphs = value in ("reduce-overhead", "max-autotune")
    tree_map_only = torch.utils._pytree.tree_map_only

    def wrapper(forward: Callable[..., Any]) -> Any:
        of_one_shape = torch.compile(forward, mode=mode, dynamic=False)
        of_any_shape = torch.compile(forward, mode=mode, dynamic=True)
        state: dict[str, Any] = {"broken": False}

        def compiled_or_plain(*args: object, **kwargs: object) -> Any:
            if state["broken"] or context.has_global_hooks:
                return forward(*args, **kwargs)
            shapes = _shapes(args, kwargs, torch)
            compiled = of_one_shape if state.setdefault("shapes", shapes) == shapes else of_any_shape
            try:
                output = compiled(*args, **kwargs)
                # the next replay overwrites the original
                return tree_map_only(torch.Tensor, torch.clone, output) if own_graphs else output
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                state["broken"] = True
                context.report(
                    "compile", f"compilation failed, so the plain module is used ({type(error).__name__})"
                )
                return forward(*args, **kwargs)

        compiled_or_plain.compiled = True  # type: ignore[attr-defined]  # a dispatch mode would make it recompile
        compiled_or_plain.own_graphs = own_graphs  # type: ignore[attr-defined]
        return compiled_or_plain

    excluded_ids = {id(module) for module in context.uncompiled}
    for root in map(context.unwrap_ddp, context.roots):
        wholes, parts = repeated(torch, root) if value == "blocks" else [root], [root]
        if wholes != parts or not excluded_ids.isdisjoint(map(id, root.modules())):
            parts = [p for whole in wholes for p in _parts(whole, excluded_ids, torch.nn.Module.forward)]
            # a number that each block has for itself compiles each of them
            limit = torch._dynamo.config.recompile_limit + len(parts)
            ledger.set_flag(torch._dynamo.config, "recompile_limit", limit)
        for part in parts:
            context.wrap_forward(part, wrapper, ledger)
        if parts != [root]:
            context.wrap_forward(root, _mark_compiled, ledger)
    return ledger.restore


def _parts(module: Module, excluded_ids: set[int], base_forward: object) -> list[Any]:
    """The largest parts of a module that contain no excluded module, each with more than one layer.

    A container that is never called has no forward.
    """
    if excluded_ids.isdisjoint(map(id, module.modules())) and type(module).forward is not base_forward:
        return [module] if any(True for _ in module.children()) else []
    return [part for child in module.children() for part in _parts(child, excluded_ids, base_forward)]


def _mark_compiled(forward: Callable[..., Any]) -> Any:
    marked: Any = partial(forward)
    marked.compiled = True
    return marked


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], torch: ModuleType) -> tuple[Any, ...]:
    """The shapes of the tensors of one call.

    The shapes of the first call keep their own graph. Otherwise a shorter last batch would replace it
    permanently by a graph for any shape.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


def code(value: Value) -> str:
    if value == "blocks":
        return "for block in model.blocks: block.compile()"
    return "model.compile()" if value == "default" else f'model.compile(mode="{value}")'


LEVER = Lever(
    "compile",
    Moment.MODEL,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    warms_up=True,
    replaces=("graphs",),
    after=("channels_last", "autocast", "attention", "fused_ops"),
    accepts=("default", "blocks", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    page=__doc__,
)
