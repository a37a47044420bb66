"""Keeps flatout's hooks and wrappers, which live in root modules, out of a script's pickles and copies."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.nn import Module

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def keep_out_of_pickles(torch: ModuleType, ledger: Ledger, owner: type) -> None:
    """Filter the pickled state of modules: drop hooks bound to an ``owner``, and forwards marked ``flatout``.

    It patches ``__reduce_ex__`` instead of ``__getstate__``, which many classes define themselves.
    """
    original = torch.nn.Module.__reduce_ex__

    def reduce_without_hooks(module: Module, protocol: object) -> Any:
        reduced = original(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], _filtered_state(reduced[2], owner), *reduced[3:])

    ledger.set(torch.nn.Module, "__reduce_ex__", reduce_without_hooks, new=True)


def _filtered_state(module_state: object, owner: type) -> Any:
    if not isinstance(module_state, dict):
        return module_state  # the state of a class with __slots__ has another form, without flatout's hooks
    state = dict(module_state)
    if getattr(state.get("forward"), "flatout", False):
        del state["forward"]
    return without_hooks(state, lambda hook: isinstance(getattr(hook, "__self__", None), owner))


def without_hooks(module_state: dict[str, Any], is_ours: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the state of a module without flatout's hooks."""
    state = dict(module_state)
    removed: set[int] = set()
    for name in HOOKS:
        hooks = state.get(name) or {}
        matching = {key for key, hook in hooks.items() if is_ours(hook)}
        if matching:
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in matching)
            removed |= matching
    for name in HOOK_FLAGS if removed else ():
        if name in state:
            state[name] = type(state[name])(
                (key, value) for key, value in state[name].items() if key not in removed
            )
    return state
