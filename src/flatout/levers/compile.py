"""Compile the root modules with torch.compile.

What it does: replaces the forward of each root module by its compiled form, in place: names, types and state_dict stay.
    "default" fuses operations; "reduce-overhead" also records CUDA graphs of the steps that train; "max-autotune-no-cudagraphs" tries more kernels.
Why it is faster: fused element-wise operations touch memory once, and a step is launched without Python in between.
When it does not help: short runs (compiling takes seconds to minutes), shapes that change every step, double backward.
What it can change: rounding. Random draws stay those of the plain program (fallback_random).
Evidence: 1.41x geometric mean over 180 models (A100, ASPLOS 2024); on 2 CPU cores 0.82x to 1.6x; measured on your program
    before it is kept, and kept only if the rest of the run repays the compilation.
Sources: torch.compile documentation; Ansel et al., PyTorch 2, ASPLOS 2024.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if off := scene.compiler_off():
        return Skip(f"torch.compile is switched off in this process ({off})")
    if scene.compiled_by_script:
        return Skip("the script compiles the model, or a part of it, itself")
    if scene.create_graph_seen:
        return Skip("the script differentiates twice (create_graph=True), and compiled functions have no second derivative")
    if scene.in_pieces:
        return Skip(f"the script calls {len(scene.roots)} modules by themselves, and no module that holds them all")
    if not scene.roots:
        return Skip("no nn.Module with parameters to train was called, as in `model(x)`")
    compiler = os.environ.get("CXX", "clang++" if facts.system == "Darwin" else "g++")  # as torch._inductor.config.cpp.cxx
    if scene.device_type == "cpu" and shutil.which(compiler.split()[0] if compiler.split() else "g++") is None:
        return Skip(f"compiling for the CPU needs a C++ compiler, and {compiler} was not found; install it (`apt-get install g++`) or name another one in CXX")
    if scene.device_type == "cuda":
        return Options(("default", "reduce-overhead", "max-autotune-no-cudagraphs"))
    return Options(("default",))


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    torch = scene.torch
    from torch._inductor import config

    ledger.set(config, "fallback_random", True)
    distribution = torch.distributions.Distribution  # the first torch.compile of a process switches its argument checks off
    ledger.call("argument checks", lambda checks=distribution._validate_args: distribution.set_default_validate_args(checks))
    mode = None if value == "default" else str(value)

    def wrapper(forward: Any) -> Any:
        of_one_shape = torch.compile(forward, mode=mode, dynamic=False)
        of_any_shape = torch.compile(forward, mode=mode, dynamic=True)
        state: dict[str, Any] = {"broken": False}

        def compiled_or_plain(*args: Any, **kwargs: Any) -> Any:
            if state["broken"] or scene.looks_for_roots:
                return forward(*args, **kwargs)
            if mode == "reduce-overhead" and not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shapes = _shapes(args, kwargs, torch)
            compiled = of_one_shape if state.setdefault("shapes", shapes) == shapes else of_any_shape
            try:
                found = compiled(*args, **kwargs)
                return _cloned(found, torch) if mode == "reduce-overhead" else found
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                state["broken"] = True
                scene.report("compile", f"it failed and the plain module is used ({type(error).__name__})")
                return forward(*args, **kwargs)
        return compiled_or_plain

    for root in scene.roots:
        scene.wrap_forward(scene.without_ranks(root), wrapper, ledger)
    return ledger.restore


def _cloned(found: Any, torch: Any) -> Any:
    """What the script may keep: a CUDA graph writes its outputs into the same memory again."""
    if isinstance(found, torch.Tensor):
        return found.clone()
    if isinstance(found, dict):
        for name, each in found.items():  # in place: an output of transformers is a dictionary of its own class
            found[name] = _cloned(each, torch)
        return found
    if isinstance(found, (list, tuple)):
        parts = [_cloned(each, torch) for each in found]
        return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)
    return found


def _shapes(args: Any, kwargs: Any, torch: Any) -> tuple[Any, ...]:
    """Of one call's tensors. The first call's shapes keep a graph of their own: a shorter last batch would else replace it, for good, by one for any shape."""
    return tuple(tensor.shape for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor))


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """A "compiled" graph that has frozen its batch statistics."""
    def wrapper(forward: Any) -> Any:
        def frozen(*args: Any, **kwargs: Any) -> Any:
            changed = [m for root in scene.roots for m in root.modules() if m.training]
            for m in changed:
                m.training = False
            try:
                return forward(*args, **kwargs)
            finally:
                for m in changed:
                    m.training = True
        return frozen

    for root in scene.roots:
        scene.wrap_forward(root, wrapper, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return "model.compile()" if value == "default" else f'model.compile(mode="{value}")'


LEVER = Lever("compile", Moment.MODEL, Effect.ROUNDING, applies, code, apply=apply, live=True, warms_up=True, known_bad=known_bad,
              after=("channels_last", "autocast"), page=__doc__)
