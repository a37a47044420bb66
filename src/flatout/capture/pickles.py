"""Our hooks and wrappers live in the instances of root modules; a script that pickles or copies its model gets it without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.capture.ledger import Ledger

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
BESIDES = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def keep_out_of_pickles(torch: Any, ledger: Ledger, owner: type) -> None:
    """Filter the state that modules are pickled with: hooks bound to an ``owner`` and forwards marked ``flatout`` are left out.

    ``__reduce_ex__`` and not ``__getstate__``, which many classes define for themselves.
    """
    usual = torch.nn.Module.__reduce_ex__

    def reduce_without_ours(module: Any, protocol: Any) -> Any:
        answer = usual(module, protocol)
        if not isinstance(answer, tuple) or len(answer) < 3:
            return answer
        return (*answer[:2], _without_ours(answer[2], owner), *answer[3:])

    ledger.set(torch.nn.Module, "__reduce_ex__", reduce_without_ours, new=True)


def _without_ours(held: Any, owner: type) -> Any:
    if not isinstance(held, dict):
        return held  # a class with __slots__ has a state of another form, and none of our hooks in it
    state = dict(held)
    if getattr(state.get("forward"), "flatout", False):
        del state["forward"]
    return without_hooks(state, lambda hook: isinstance(getattr(hook, "__self__", None), owner))


def without_hooks(held: dict[str, Any], is_ours: Callable[[Any], bool]) -> dict[str, Any]:
    """The state of a module without the hooks that are ours."""
    state = dict(held)
    ours: set[int] = set()
    for name in HOOKS:
        hooks = state.get(name) or {}
        mine = {key for key, hook in hooks.items() if is_ours(hook)}
        if mine:
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in mine)
            ours |= mine
    for name in BESIDES if ours else ():
        if name in state:
            state[name] = type(state[name])((key, value) for key, value in state[name].items() if key not in ours)
    return state
