"""Recompute activations in the backward pass instead of storing them.

What it does: blocks=1.0 stores only the input of each repeated block and runs the block again; blocks=0.5 does
    so for every second block.
Why it is faster: it is not; it saves memory. It can pay off if a model then fits, or a larger micro-batch.
When it does not help: parameters and optimizer state fill the memory; a model without repeated blocks.
What it can change: nothing, bit for bit: dropout draws the same numbers, running statistics update once.
    Blocks that change their input or keep state between calls stay as they are.
Evidence: saved bytes of a small GPT 0.54 and 0.08 of the plain program's with half of the blocks and with all
    (CPU, float32, torch 2.14.1).
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; torch.utils.checkpoint documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import COMPILER_CHOOSES, HOOK_TABLES, NO_ROOT, why_model_is_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Table, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

if TYPE_CHECKING:
    from torch.nn import Module


# Repeated blocks of a model, found by structure, and the recomputation of a block in the backward pass.
#
# A block is one of several sibling modules of the same class, each made of further modules: the layers of a
# transformer, the residual blocks of a ResNet. Blocks in a ModuleList or Sequential come first. Without any,
# siblings of the same class in any module count.

MIN_SIBLINGS = 2


def repeated(torch: ModuleType, root: Module) -> list[Any]:
    """The outermost repeated blocks of a module, in module order; no block is inside another."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    return _repeated_in(root, lambda module: isinstance(module, lists), set()) or _repeated_in(
        root, lambda module: True, set()
    )


def _repeated_in(module: Module, is_container: Callable[[Any], bool], visited: set[int]) -> list[Any]:
    blocks: list[Any] = []
    children = [child for child in module.children() if id(child) not in visited]
    visited.update(map(id, children))
    kinds = [type(child) for child in children if _is_block(child)]
    for child in children:
        if is_container(module) and _is_block(child) and kinds.count(type(child)) >= MIN_SIBLINGS:
            blocks.append(child)
        else:
            blocks += _repeated_in(child, is_container, visited)
    return blocks


def _is_block(module: Module) -> bool:
    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    return len(leaves) >= 2 and any(p.requires_grad for p in module.parameters())


def spread(blocks: list[Any], share: float) -> list[Any]:
    """This share of the blocks, evenly distributed, at least one."""
    return [
        block for i, block in enumerate(blocks) if int((i + 1) * share + 1e-9) > int(i * share + 1e-9)
    ] or blocks[:1]


def why_not(torch: ModuleType, block: Module) -> str:
    """Why this block cannot be recomputed, judged without running it; an empty string if it can."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in block.modules()):
        return "it is a compiled script (torch.jit)"
    for part in block.modules():
        hooks = (hook for table in HOOK_TABLES for hook in getattr(part, table).values())
        if part is not block and any(map(_is_scripts, hooks)):
            return f"the script has a hook on a {type(part).__name__} inside it, which would run twice"
        if type(part).__name__ == "SyncBatchNorm":
            return "its SyncBatchNorm would communicate with the other ranks twice"
    return ""


def _is_scripts(hook: object) -> bool:
    """Whether a hook belongs to the script. Modules that the script calls as roots have hooks of flatout."""
    return not type(getattr(hook, "__self__", None)).__module__.startswith("flatout.")


class RecomputedBlock:
    """A block under ``forward``.

    The first call runs plainly under observation; later calls recompute in the backward pass. After the first
    call, ``why`` says what state the block keeps between calls, so that running it twice would differ.
    ``report`` receives this reason.
    """

    def __init__(self, torch: ModuleType, block: Module, report: Callable[[str], None]) -> None:
        self.torch, self.block, self.report = torch, block, report
        self.observed, self.why = False, ""
        self._norms = [
            part
            for part in block.modules()
            if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats
        ]

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch = self.torch
        if self.why or not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return forward(*args, **kwargs)
        if not self.observed:
            self.observed = True
            return self._observe(forward, args, kwargs)
        from torch.utils.checkpoint import checkpoint

        contexts = (
            {"context_fn": lambda: (nullcontext(), self._temporary_statistics())} if self._norms else {}
        )
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    def _observe(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, self.torch.Tensor)]
        versions, before = [t._version for t in inputs], self._state()
        output = forward(*args, **kwargs)
        if [t._version for t in inputs] != versions:
            self.why = "it changes its own input in place"
        elif self._state() != before:
            changed = next(
                (
                    type(part).__name__
                    for part, old, now in zip(self.block.modules(), before, self._state(), strict=True)
                    if old != now
                ),
                "module",
            )
            self.why = f"its {changed} keeps state between calls, which recomputation would change"
        if self.why:
            self.report(self.why)
        return output

    def _state(self) -> list[Any]:
        statistics = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        return [
            (
                tuple(
                    (name, id(value), len(value) if isinstance(value, (list, dict)) else 0)
                    for name, value in vars(part).items()
                ),
                tuple(
                    (name, id(buffer), buffer._version)
                    for name, buffer in part.named_buffers(recurse=False)
                    if id(buffer) not in statistics
                ),
            )
            for part in self.block.modules()
        ]

    @contextmanager
    def _temporary_statistics(self) -> Iterator[None]:
        """Update copies of running statistics while recomputing.

        The real ones have been updated already. In training, a normalisation computes with the batch's own
        statistics.
        """
        originals = [(norm._buffers, dict(norm._buffers)) for norm in self._norms if norm.training]
        try:
            for buffers, saved in originals:
                buffers.update(
                    {name: None if buffer is None else buffer.clone() for name, buffer in saved.items()}
                )
            yield
        finally:
            for buffers, saved in originals:
                buffers.update(saved)


NO_BLOCKS = "the model has no two blocks of the same class with at least two layers each"
BLOCKS: tuple[Value, ...] = ({"blocks": 0.5}, {"blocks": 1.0})


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip(COMPILER_CHOOSES)
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), which recomputed activations do not support"
        )
    if why := why_model_is_split(context):
        return Skip(why)
    if not context.roots:
        return Skip(NO_ROOT)
    if any(isinstance(root, context.torch.jit.ScriptModule) for root in context.roots):
        return Skip(
            "the model or a part of it is compiled by torch.jit, which does not call the forward of its layers"
        )
    blocks, reason = _blocks(context)
    return Options(BLOCKS) if blocks else Skip(f"there is no block to recompute: {reason}")


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)
    blocks, reason = _blocks(context)
    if not blocks:
        raise LookupError(f"there is no block to recompute: {reason}")
    chosen = spread(blocks, value["blocks"])
    reasons: list[str] = []

    def report(why: str) -> None:
        reasons.append(why)
        if len(reasons) == len(chosen):
            context.report("recompute", f"no block of this program can be recomputed: {why}")

    for module in chosen:
        context.wrap_forward(module, _recomputing(RecomputedBlock(context.torch, module, report)), ledger)
    return ledger.restore


def _recomputing(block: RecomputedBlock) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        return lambda *args, **kwargs: block.forward(forward, args, kwargs)

    return wrapper


def _blocks(context: TrainingContext) -> tuple[list[Any], str]:
    blocks = [block for root in context.roots for block in repeated(context.torch, context.unwrap_ddp(root))]
    reasons = [why_not(context.torch, block) for block in blocks]
    return [block for block, reason in zip(blocks, reasons, strict=True) if not reason], next(
        filter(None, reasons), NO_BLOCKS
    )


def code(value: Value) -> str:
    share = value["blocks"] if isinstance(value, dict) else 1
    comment = "" if share == 1 else f"  # {share:.0%} of the blocks".replace("%", " %")
    return f"x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False){comment}"


LEVER = Lever(
    "recompute",
    Moment.MODEL,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    live=True,
    after=("autocast", "channels_last"),
    excludes=("compile",),
    saves_memory=True,
    accepts=(Table({"blocks": (Number(0.01, 1, integer=False),)}, ("blocks",)),),
    page=__doc__,
)
