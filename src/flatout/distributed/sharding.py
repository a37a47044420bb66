"""Shard weights, gradients and optimizer state over the ranks with torch's FSDP2, under an unmodified script.

At the first forward pass of a module that trains, its repeated blocks and then the module itself go through
``fully_shard``. The script made its optimizers earlier with the whole weights; the sharded ones replace them,
including their state. Any other reference to a whole weight (a list of the script, a tuple, a variable)
becomes a *stand-in*. It has no values of its own, and every operation on it acts on the sharded weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.dtensor_interop import DTensorInterop
from flatout.job.rank_environment import RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext


# Convert between sharded weights and the script's own formats: it saves and loads what one process would.
#
# model.state_dict(), optimizer.state_dict()     whole tensors on every rank (on the host for a GPU model)
# load_state_dict of both                        each rank takes its part
# torch.save(model), copy.deepcopy(model)        a plain module with whole weights
# model.to(...)                                  the sharded weights move
# clip_grad_norm_                                returns a plain number, over weights of both kinds

STATE_PREFIX = "__composable_api"  # prefix of fully_shard's attributes in a module
FSDP_ATTRIBUTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable")
SHARDING_MODULE = "flatout.distributed.sharding"


class Formats:
    """Patches the functions that depend on the format of a model.

    ``sharding`` knows which weights are sharded."""

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
        names = [n for n in attributes if not n.startswith(STATE_PREFIX) and n not in FSDP_ATTRIBUTES]
        state = {name: attributes[name] for name in names}
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


NODE, ALL = "node", "all"
MIN_NODE_RANKS = 2  # ranks on a machine, to shard weights inside it


class Sharding:
    """``over``: shard over the ranks of each machine, with replicas across machines, or over all ranks.

    ``blocks_of(module)`` returns its repeated blocks."""

    def __init__(
        self,
        torch: ModuleType,
        context: TrainingContext,
        env: RankEnvironment,
        over: str,
        blocks_of: Callable[[Module], list[Module]],
        ledger: Ledger,
    ) -> None:
        self.torch, self.context, self.env, self.over, self.blocks_of = torch, context, env, over, blocks_of
        self.ledger = ledger
        self.mesh: Any = None
        self.hooked: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose layers may be called separately
        self.open_calls: list[Any] = []  # modules being called in pieces
        self.interop = DTensorInterop(torch, env.world_size, ledger)
        self.formats = Formats(torch, self, ledger)
        self._hooks: list[Any] = []
        ledger.on_restore("hooks of pieces", self._remove_hooks)

    def holds(self, parameter: Parameter) -> bool:
        """Whether this weight is sharded."""
        return self.interop.is_sharded(parameter)

    def shard(self, root: Module) -> None:
        """Shard the weights of a module. Raises CannotParallelize.

        The other ranks are at the same point with equal weights."""
        if all(map(self.holds, root.parameters())):
            return
        self._reject(root)
        self.mesh = self.mesh or self._mesh(next(root.parameters()).device.type)
        for module in [*self._blocks(root), root]:
            if self._state(module) is None:
                self._shard_one(module)
        for module in root.modules():
            state = self._state(module)
            if state is not None:
                state._is_root = None  # the outermost module that runs first becomes the root
        self._hook_layers(root)

    # -- one module

    def _shard_one(self, module: Module) -> None:
        from torch.distributed.fsdp import fully_shard

        kind = type(module)
        weights = [
            (owner, name, p)
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None and not self.holds(p)
        ]
        for p in {id(p): p for _, _, p in weights}.values():
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=True,
            ignored_params=set(self._unshardable([p for _, _, p in weights])),
        )
        self.ledger.set(module, "__class__", kind)  # FSDP2 makes its own class; its methods are not used here
        for group in self._groups(module):
            group.force_sum_reduction_for_comms = True  # every backend can add
        # before FSDP2's own
        self._hooks.append(module.register_forward_hook(self._clone_views, prepend=True))
        pairs = {
            id(p): (p, owner._parameters[name])
            for owner, name, p in weights
            if owner._parameters[name] is not p
        }
        self._replace_in_optimizers(pairs)
        for whole, sharded in pairs.values():
            if whole.grad is not None:
                sharded.grad = self.interop.part_of(whole.grad, sharded)
                whole.grad = None
            for name, value in vars(whole).items():
                vars(sharded).setdefault(name, value)
            self.interop.stand_in(whole, sharded)

    def _unshardable(self, parameters: list[Any]) -> list[Any]:
        """Parameters that FSDP2 does not support: scalars, and all dtypes except the most frequent one."""
        counts: dict[Any, int] = {}
        for p in parameters:
            counts[p.dtype] = counts.get(p.dtype, 0) + (p.numel() if p.dim() and p.is_floating_point() else 0)
        largest = max(counts, key=lambda dtype: counts[dtype], default=None)
        return [p for p in parameters if not p.dim() or p.dtype != largest or not p.is_floating_point()]

    def _replace_in_optimizers(self, pairs: dict[int, tuple[Any, Any]]) -> None:
        for optimizer in self.context.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [pairs[id(p)][1] if id(p) in pairs else p for p in group["params"]]
                if len({self.holds(p) for p in group["params"]}) > 1 and group.get("fused"):
                    group["fused"] = False  # one kernel cannot take both kinds
            states = list(optimizer.state.items())
            optimizer.state.clear()  # keep the order
            for p, state in states:
                if id(p) in pairs:
                    sharded = pairs[id(p)][1]
                    optimizer.state[sharded] = self.part_of_state(state, sharded)
                else:
                    optimizer.state[p] = state

    def part_of_state(self, state: dict[str, Any], sharded: DTensor) -> dict[str, Any]:
        """The optimizer state of a weight, sharded like it; values of another shape stay whole."""

        def part(value: Any) -> Any:
            is_whole = isinstance(value, self.torch.Tensor) and value.dim() and value.shape == sharded.shape
            return self.interop.part_of(value, sharded) if is_whole and not self.holds(value) else value

        return {name: part(value) for name, value in state.items()}

    # -- what to shard, and over which ranks

    def _reject(self, root: Module) -> None:
        for name, p in root.named_parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise CannotParallelize(
                    f"the script has registered a hook on the gradient of {name}, which a sharded weight does not support"
                )
        if any(isinstance(module, self.torch.jit.ScriptModule) for module in root.modules()):
            raise CannotParallelize(
                "its model is a compiled script (torch.jit), whose weights cannot be sharded"
            )

    def _blocks(self, root: Module) -> list[Any]:
        """Blocks that share no weight with modules outside them; shared weights belong to the root."""
        holders: dict[int, set[int]] = {}
        for module in root.modules():
            for p in module._parameters.values():
                if p is not None:
                    holders.setdefault(id(p), set()).add(id(module))
        blocks = []
        for block in self.blocks_of(root):
            inside = {id(module) for module in block.modules()}
            if all(holders[id(p)] <= inside for p in block.parameters()):
                blocks.append(block)
        return blocks

    def _mesh(self, device_type: str) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        ranks, world, local = (
            self.torch.arange(self.env.world_size),
            self.env.world_size,
            self.env.local_world_size,
        )
        if self.over == ALL or not MIN_NODE_RANKS <= local < world or world % local:
            return DeviceMesh(device_type, ranks, mesh_dim_names=("shard",))
        return DeviceMesh(device_type, ranks.view(-1, local), mesh_dim_names=("replicate", "shard"))

    @staticmethod
    def _state(module: Module) -> Any:
        from torch.distributed._composable_state import _get_module_state

        return _get_module_state(module)

    def _groups(self, module: Module) -> list[Any]:
        """Groups of weights that are gathered together.

        The attribute is named differently if FSDP2 has one per module."""
        state = self._state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        group = getattr(state, "_fsdp_param_group", None)
        return list(groups or ([] if group is None else [group]))

    def groups_in(self, module: Module) -> Iterator[Any]:
        for part in module.modules():
            yield from self._groups(part)

    # -- a model that is called in pieces

    def _hook_layers(self, root: Module) -> None:
        for module in root.modules():
            groups = [] if module in self.hooked else self._groups(module)
            self.hooked.add(module)
            holders: Iterable[Any] = {
                id(owner): owner
                for group in groups
                for parameter in group.fsdp_params
                for owner in (parameter._module_info.module, *parameter._module_info.shared_modules)
            }.values()
            state = self._state(module)
            for owner in holders:
                if owner is not module:
                    before, after = self._before_layer(state, groups), self._after_layer(state)
                    self._hooks.append(owner.register_forward_pre_hook(before, with_kwargs=True))
                    self._hooks.append(owner.register_forward_hook(after, always_call=True))

    def _before_layer(self, state: Any, groups: list[Any]) -> Any:
        def pre_hook(module: Module, args: object, kwargs: object) -> Any:
            if not any(group.is_sharded for group in groups):
                return None
            self.open_calls.append(module)
            return state._pre_forward(module, args, kwargs)

        return pre_hook

    def _after_layer(self, state: Any) -> Any:
        def hook(module: Module, args: object, output: object) -> Any:
            if not self.open_calls or self.open_calls[-1] is not module:
                return None
            self.open_calls.pop()
            return state._post_forward(module, args, self._clone_views(module, args, output))

        return hook

    def _clone_views(self, module: Module, args: object, output: object) -> Any:
        """Clone output views. FSDP2 detects the backward pass by a hook on a module's output.

        A view loses the hook when a script changes it in place."""
        from torch.utils._pytree import tree_map_only

        return tree_map_only(
            self.torch.Tensor, lambda t: t.clone() if t.requires_grad and t._base is not None else t, output
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
