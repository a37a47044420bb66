"""Convert between sharded weights and the script's own formats: it saves and loads what one process would.

model.state_dict(), optimizer.state_dict()     whole tensors on every rank (on the host for a GPU model)
load_state_dict of both                        each rank takes its part
torch.save(model), copy.deepcopy(model)        a plain module with whole weights
model.to(...)                                  the sharded weights move
clip_grad_norm_                                returns a plain number, over weights of both kinds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger

STATE_PREFIX = "__composable_api"  # prefix of fully_shard's attributes in a module
FSDP_ATTRIBUTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable")
SHARDING_MODULE = "flatout.distributed.sharding"


class Formats:
    """Patches the functions that depend on the format of a model.

    ``sharding`` knows which weights are sharded.
    """

    def __init__(self, torch: ModuleType, sharding: Any, ledger: Ledger) -> None:
        self.torch, self.sharding, self.interop = torch, sharding, sharding.interop
        self.depth = 0  # of recursive calls through submodules
        module, optimizer, clip = torch.nn.Module, torch.optim.Optimizer, torch.nn.utils.clip_grad
        ledger.set(module, "state_dict", self._state_dict(module.state_dict))
        ledger.set(module, "load_state_dict", self._load_module(module.load_state_dict))
        ledger.set(module, "_apply", self._apply(module._apply))
        ledger.set(module, "__reduce_ex__", self._reduce(module.__reduce_ex__), new=True)
        ledger.set(optimizer, "state_dict", self._state_dict(optimizer.state_dict))
        ledger.set(optimizer, "load_state_dict", self._load_optimizer(optimizer.load_state_dict))
        clip_whole = self._wrap_clip(clip.clip_grad_norm_)
        ledger.set(clip, "clip_grad_norm_", clip_whole)
        ledger.set(torch.nn.utils, "clip_grad_norm_", clip_whole)

    def _state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def state_dict(owner: object, *args: object, **kwargs: object) -> Any:
            formats.depth += 1
            try:
                state = original(owner, *args, **kwargs)
            finally:
                formats.depth -= 1
            if not formats.depth:
                formats._make_whole(state)
            return state

        return state_dict

    def _make_whole(self, container: Any) -> None:
        """Replace every sharded tensor in a state by a whole one, one at a time to limit GPU memory."""
        entries = container.items() if isinstance(container, dict) else enumerate(container)
        whole_tensors: dict[int, Any] = {}
        for name, value in list(entries):
            if self.sharding.holds(value):
                if id(value._local_tensor) not in whole_tensors:  # tied weights are one tensor
                    with self.torch.no_grad():
                        whole_tensors[id(value._local_tensor)] = self.interop.whole(value).detach().cpu()
                container[name] = whole_tensors[id(value._local_tensor)]
            elif isinstance(value, (dict, list)):
                self._make_whole(value)

    def _load_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def load_state_dict(
            module: Module, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            is_sharded = any(map(formats.sharding.holds, module.parameters()))
            # a sharded weight takes the values and stays the same object
            return original(module, state_dict, strict, assign and not is_sharded)

        return load_state_dict

    def _load_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def load_state_dict(optimizer: Optimizer, state_dict: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            if len(parameters) != len(numbers) or not any(map(formats.sharding.holds, parameters)):
                return original(optimizer, state_dict)
            state = dict(state_dict["state"])
            for number, p in zip(numbers, parameters, strict=True):
                if formats.sharding.holds(p) and isinstance(state.get(number), Mapping):
                    state[number] = formats.sharding.part_of_state(state[number], p)
            return original(optimizer, {**state_dict, "state": state})

        return load_state_dict

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def apply(module: Module, *args: object, **kwargs: object) -> Any:
            formats.depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                formats.depth -= 1
            if not formats.depth:
                with formats.torch.no_grad():
                    for group in formats.sharding.groups_in(module):
                        for parameter in group.fsdp_params:
                            parameter.reset_sharded_param()
            return result

        return apply

    def _reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def reduce_without_ranks(module: Module, protocol: object) -> Any:
            reduced = original(module, protocol)
            if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
                return reduced
            return (*reduced[:2], formats._without_ranks(reduced[2]), *reduced[3:])

        return reduce_without_ranks

    def _without_ranks(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """The state for pickling or copying a module, without the additions of FSDP2 and flatout."""
        state = {
            name: value
            for name, value in attributes.items()
            if not name.startswith(STATE_PREFIX) and name not in FSDP_ATTRIBUTES
        }
        found: dict[str, Any] = self.sharding.context.without_hooks(state, _is_flatouts)
        return found

    def _wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        formats = self

        @wraps(original)
        def clip(*args: object, **kwargs: object) -> Any:
            norm = original(*args, **kwargs)
            return formats.interop.whole(norm) if formats.sharding.holds(norm) else norm

        return clip


def _is_flatouts(hook: object) -> bool:
    function = getattr(hook, "hook", hook)
    module = getattr(function, "__module__", None) or ""
    return module.startswith(FSDP_MODULES) or module == SHARDING_MODULE
