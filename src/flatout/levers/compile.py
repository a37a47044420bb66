"""Compile the root modules with torch.compile.

What it does: replaces the forward of each root module by its compiled form, in place: names, types and
    state_dict stay. With fused_ops, the wide last layer and its callers stay uncompiled, and the largest
    other parts of the module are compiled. "default" fuses operations; "max-autotune-no-cudagraphs" tries
    more kernels. The lever graphs records compiled code as CUDA graphs.
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
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import COMPILED_ONCE, COMPILER_OFF, NO_ROOT, why_model_is_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.nn import Module

    from flatout.schema.program import Ledger, TrainingContext


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
        return Options(("default", "max-autotune-no-cudagraphs"))
    return Options(("default",))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    from torch._inductor import config

    ledger.set(config, "fallback_random", True)
    if context.graph_passes:
        ledger.set(config, "pre_grad_custom_pass", _combined_pass(context.graph_passes))
    distribution = torch.distributions.Distribution  # the first torch.compile disables its argument checks
    ledger.on_restore(
        "argument checks", partial(distribution.set_default_validate_args, distribution._validate_args)
    )
    mode = None if value == "default" else str(value)

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
                return compiled(*args, **kwargs)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                state["broken"] = True
                context.report(
                    "compile", f"compilation failed, so the plain module is used ({type(error).__name__})"
                )
                return forward(*args, **kwargs)

        compiled_or_plain.compiled = True  # type: ignore[attr-defined]  # a dispatch mode would make it recompile
        return compiled_or_plain

    excluded_ids = {id(module) for module in context.uncompiled}
    for root in map(context.unwrap_ddp, context.roots):
        if excluded_ids.isdisjoint(map(id, root.modules())):
            context.wrap_forward(root, wrapper, ledger)
            continue
        for part in _parts(root, excluded_ids, torch.nn.Module.forward):
            context.wrap_forward(part, wrapper, ledger)
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
    def marked(*args: object, **kwargs: object) -> Any:
        return forward(*args, **kwargs)

    marked.compiled = True  # type: ignore[attr-defined]
    return marked


def _combined_pass(passes: list[Any]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    graph_passes = tuple(passes)

    class Passes(CustomGraphPass):
        def __call__(self, graph: object) -> None:
            for graph_pass in graph_passes:
                graph_pass(graph)

        def uuid(self) -> Any:
            sources = {
                *(graph_pass.__module__ for graph_pass in graph_passes),
                *(
                    str(getattr(value, "__module__", ""))
                    for graph_pass in graph_passes
                    for value in graph_pass.__globals__.values()
                ),
            }
            return get_hash_for_files(
                tuple(
                    sorted(str(sys.modules[name].__file__) for name in sources if name.startswith("flatout."))
                )
            )

    return Passes()


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], torch: ModuleType) -> tuple[Any, ...]:
    """The shapes of the tensors of one call.

    The shapes of the first call keep their own graph. Otherwise a shorter last batch would replace it
    permanently by a graph for any shape.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


def code(value: Value) -> str:
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
    accepts=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    page=__doc__,
)
