"""Whether gradients are disabled where an event happens: by a ``with`` block, a decorator, or around all calls."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.step_loops import ProgramEvent

PLACES = ("torch.", "torch.autograd.", "torch.autograd.grad_mode.")


def without_gradients(event: ProgramEvent) -> bool:
    """Return whether gradients are surely disabled. The innermost context that sets it decides."""
    for source, block in reversed(event.blocks):
        enabled = _enabled(source, block)
        if enabled is not None:
            return not enabled
    return False


def _enabled(source: SourceFile, block: ast.expr) -> bool | None:
    """Return what a context or a decorator sets, or None. ``@torch.no_grad`` needs no parentheses."""
    dotted = source.dotted(block.func if isinstance(block, ast.Call) else block)
    given = [*block.args, *(k.value for k in block.keywords)] if isinstance(block, ast.Call) else []
    value = given[0].value if given and isinstance(given[0], ast.Constant) else None
    name = next((dotted[len(place) :] for place in PLACES if dotted.startswith(place)), "")
    if name == "enable_grad":
        return True
    if name == "set_grad_enabled":
        return bool(value) if value is not None else None
    if name in ("no_grad", "inference_mode"):
        return False if not given or value is True else True if value is False else None
    return None
