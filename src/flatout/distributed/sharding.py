"""Shard weights, gradients and optimizer state over the ranks with torch's FSDP2, under an unmodified script.

At the first forward pass of a module that trains, its repeated blocks and then the module itself go through
``fully_shard``. The script made its optimizers earlier with the whole weights; the sharded ones replace them,
including their state. Any other reference to a whole weight (a list of the script, a tuple, a variable)
becomes a *stand-in*. It has no values of its own, and every operation on it acts on the sharded weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.dtensor_interop import DTensorInterop
from flatout.distributed.formats import Formats
from flatout.job.rank_environment import RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn import Module, Parameter

    from flatout.schema.program import Ledger, TrainingContext

NODE, ALL = "node", "all"
MIN_NODE_RANKS = 2  # ranks on a machine, to shard weights inside it


class Sharding:
    """``over``: shard over the ranks of each machine, with replicas across machines, or over all ranks.

    ``blocks_of(module)`` returns its repeated blocks.
    """

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

        The other ranks are at the same point with equal weights.
        """
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
                sharded = pairs[id(p)][1] if id(p) in pairs else None
                optimizer.state[p if sharded is None else sharded] = (
                    state if sharded is None else self.part_of_state(state, sharded)
                )

    def part_of_state(self, state: dict[str, Any], sharded: DTensor) -> dict[str, Any]:
        """The optimizer state of a weight, sharded like it; values of another shape stay whole."""
        tensor = self.torch.Tensor
        return {
            name: self.interop.part_of(value, sharded)
            if isinstance(value, tensor)
            and value.dim()
            and value.shape == sharded.shape
            and not self.holds(value)
            else value
            for name, value in state.items()
        }

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

        env, ranks = self.env, self.torch.arange(self.env.world_size)
        if (
            self.over == ALL
            or env.local_world_size >= env.world_size
            or env.local_world_size < MIN_NODE_RANKS
            or env.world_size % env.local_world_size
        ):
            return DeviceMesh(device_type, ranks, mesh_dim_names=("shard",))
        return DeviceMesh(
            device_type, ranks.view(-1, env.local_world_size), mesh_dim_names=("replicate", "shard")
        )

    @staticmethod
    def _state(module: Module) -> Any:
        from torch.distributed._composable_state import _get_module_state

        return _get_module_state(module)

    def _groups(self, module: Module) -> list[Any]:
        """Groups of weights that are gathered together.

        The attribute is named differently if FSDP2 has one per module.
        """
        state = self._state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        return (
            list(groups)
            if groups is not None
            else [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]
        )

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
            for owner in holders:
                if owner is not module:
                    self._hooks.append(
                        owner.register_forward_pre_hook(
                            self._before_layer(self._state(module), groups), with_kwargs=True
                        )
                    )
                    self._hooks.append(
                        owner.register_forward_hook(self._after_layer(self._state(module)), always_call=True)
                    )

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

        A view loses the hook when a script changes it in place.
        """
        from torch.utils._pytree import tree_map_only

        return tree_map_only(
            self.torch.Tensor, lambda t: t.clone() if t.requires_grad and t._base is not None else t, output
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
