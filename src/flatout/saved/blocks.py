"""Repeated blocks of a model, found by structure, and one of them run so that the backward pass computes it again.

A block is one of several modules of the same class beside each other, each made of further modules: the layers of a transformer, the residual
blocks of a ResNet. Those in a ModuleList or Sequential come first; where there are none, equal siblings of any module count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

FEWEST = 2


def repeated(torch: Any, root: Any) -> list[Any]:
    """The outermost repeated blocks of a module, in the order of its modules; no block inside another."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    return _groups(root, lambda module: isinstance(module, lists), set()) or _groups(root, lambda module: True, set())


def _groups(module: Any, holds: Callable[[Any], bool], met: set[int]) -> list[Any]:
    """Depth first: the children that repeat, and what repeats inside those that do not."""
    found: list[Any] = []
    children = [child for child in module.children() if id(child) not in met]
    met.update(map(id, children))
    kinds = [type(child) for child in children if _is_block(child)]
    for child in children:
        if holds(module) and _is_block(child) and kinds.count(type(child)) >= FEWEST:
            found.append(child)
        else:
            found += _groups(child, holds, met)
    return found


def _is_block(module: Any) -> bool:
    """Made of at least two modules that compute, with something to train."""
    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    return len(leaves) >= 2 and any(p.requires_grad for p in module.parameters())


def spread(blocks: list[Any], share: float) -> list[Any]:
    """This share of the blocks, evenly over all of them, at least one."""
    return [block for at, block in enumerate(blocks) if int((at + 1) * share + 1e-9) > int(at * share + 1e-9)] or blocks[:1]


def why_not(torch: Any, block: Any) -> str:
    """What speaks against computing this block twice, seen without running it; empty where nothing does."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in block.modules()):
        return "it is a compiled script (torch.jit)"
    for part in block.modules():
        if part is not block and any(map(_is_scripts, (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *part._backward_hooks.values(),
                                                       *part._backward_pre_hooks.values()))):
            return f"the script has put a hook on a {type(part).__name__} inside it, which would be called twice"
        if type(part).__name__ == "SyncBatchNorm":
            return "its SyncBatchNorm would talk to the other ranks twice"
    return ""


def _is_scripts(hook: Any) -> bool:
    """Modules that the script also calls by themselves have hooks of flatout's."""
    return not type(getattr(hook, "__self__", None)).__module__.startswith("flatout.")


class Block:
    """A block under ``forward``: the first call is the plain one and is watched; from the second on the backward pass computes it again.

    ``why`` says, once it was watched, what the block keeps from call to call, so that running it twice would not be the same; ``report`` is told.
    """

    def __init__(self, torch: Any, block: Any, report: Callable[[str], None]) -> None:
        self.torch, self.block, self.report = torch, block, report
        self.watched, self.why = False, ""
        self._norms = [part for part in block.modules() if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats]

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch = self.torch
        if self.why or not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return forward(*args, **kwargs)
        if not self.watched:
            self.watched = True
            return self._watch(forward, args, kwargs)
        from torch.utils.checkpoint import checkpoint

        contexts = {"context_fn": lambda: (nullcontext(), self._statistics_at_rest())} if self._norms else {}
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    def _watch(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, self.torch.Tensor)]
        versions, kept = [t._version for t in inputs], self._kept()
        output = forward(*args, **kwargs)
        if [t._version for t in inputs] != versions:
            self.why = "it changes its own input in place"
        elif self._kept() != kept:
            changed = next((type(part).__name__ for part, before, now in zip(self.block.modules(), kept, self._kept(), strict=True) if before != now), "module")
            self.why = f"its {changed} keeps something from call to call, which computing it twice would change"
        if self.why:
            self.report(self.why)
        return output

    def _kept(self) -> list[Any]:
        """What each module holds beside parameters, modules and the statistics of normalisations, so that a change shows."""
        counted = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        return [(tuple((name, id(value), len(value) if isinstance(value, (list, dict)) else 0) for name, value in vars(part).items()),
                 tuple((name, id(buffer), buffer._version) for name, buffer in part.named_buffers(recurse=False) if id(buffer) not in counted))
                for part in self.block.modules()]

    @contextmanager
    def _statistics_at_rest(self) -> Iterator[None]:
        """In training a normalisation computes with the batch's own statistics; the running ones have moved already, so copies of them move now."""
        moving = [(norm._buffers, dict(norm._buffers)) for norm in self._norms if norm.training]
        try:
            for buffers, kept in moving:
                buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in kept.items()})
            yield
        finally:
            for buffers, kept in moving:
                buffers.update(kept)
