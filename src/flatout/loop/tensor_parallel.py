"""Tensor parallelism with torch's own styles, by the names of modules.

Every rank gets the same batches and computes the whole model, but only its slice of the named layers. Ranks
communicate inside forward and backward, so none can leave a step that has begun: out of memory ends the
training with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.errors import LoopError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

ALIKE_STEPS = 8  # the first steps, which check that all ranks compute the same loss
START = "torchrun --standalone --nproc-per-node 2 train.py"


class TensorParallel:
    """A model whose layers are sharded over all ranks.

    ``styles``: module name -> ColwiseParallel(), RowwiseParallel(), ... of torch.distributed.tensor.parallel.
    ``*`` matches one part of a name.
    """

    def __init__(
        self,
        torch: ModuleType,
        model: Module,
        optimizer: Optimizer,
        styles: Mapping[str, Any],
        device: Device,
    ) -> None:
        """Shard the model and give the optimizer the new parameters.

        Raises LoopError, before anything has changed, if the model cannot be sharded.
        """
        self.torch, self.device = torch, device
        distributed = torch.distributed
        several_ranks(torch)
        self._check(model, optimizer, styles)
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import parallelize_module

        self.sharded = DTensor
        before = dict(model.named_parameters())
        with torch.no_grad():
            for tensor in (*before.values(), *model.buffers()):
                distributed.broadcast(tensor.data, src=0)
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
        try:
            parallelize_module(model, mesh, dict(styles))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise LoopError(
                f"torch cannot shard this model with the styles in parallel=: {first_line(error)}"
            ) from error
        after = dict(model.named_parameters())
        instead = {id(p): after[name] for name, p in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [instead.get(id(p), p) for p in group["params"]]
            if group.get("foreach") is None and "foreach" in group:
                group["foreach"] = False  # slices and whole parameters cannot be updated in one call

    @staticmethod
    def _check(model: Module, optimizer: Optimizer, styles: Mapping[str, Any]) -> None:
        if not isinstance(styles, Mapping) or not styles:
            raise LoopError(
                f"parallel={styles!r} is not a dict of module name -> style of torch.distributed.tensor.parallel, such as "
                '{"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}.'
            )
        names = [name for name, _ in model.named_modules()]
        for wanted, style in styles.items():
            if not any(_matches(wanted, name) for name in names):
                raise LoopError(
                    f"parallel= names {wanted!r}, but the model has no such module. It has {', '.join(name for name in names[:12] if name)}."
                )
            if not hasattr(style, "_apply"):
                raise LoopError(
                    f"parallel[{wanted!r}] is a {type(style).__name__}. Use a style of torch.distributed.tensor.parallel, like ColwiseParallel()."
                )
        if optimizer.state:
            raise LoopError(
                "the optimizer already has state, of whole parameters. Shard the model in a new Loop with a new optimizer."
            )
        if any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
            raise LoopError(
                "fused=True and foreach=True update all parameters in one call, which cannot mix slices and whole parameters. Remove them."
            )

    def clip(self, parameters: Iterable[Any], limit: float) -> Any:
        """Clip by the norm over all ranks, as torch does, and return the norm before clipping."""
        torch = self.torch
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        whole = [norm.full_tensor() if isinstance(norm, self.sharded) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        for gradient in gradients:
            self.local(gradient).mul_(factor)
        return total

    def local(self, tensor: Tensor) -> Any:
        """This rank's part of a tensor, to write to."""
        return tensor.to_local() if isinstance(tensor, self.sharded) else tensor

    def alike(self, index: int, loss: Tensor) -> None:
        """Raises LoopError if the losses of the ranks differ.

        They then have different batches or random numbers.
        """
        if index >= ALIKE_STEPS:
            return
        distributed = self.torch.distributed
        ends = self.torch.stack([loss, -loss]).double()
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        largest, smallest = float(ends[0]), -float(ends[1])
        if abs(largest - smallest) > 1e-3 * max(abs(largest), abs(smallest)):
            raise LoopError(
                f"with parallel=, every rank must train on the same batches, but the loss of step {index} is {smallest:.6g} on one rank and "
                f"{largest:.6g} on another. Seed all ranks equally before making the loader (flatout.seed(0)), and use no DistributedSampler."
            )


def several_ranks(torch: ModuleType) -> None:
    """Raises LoopError in a single process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        raise LoopError(
            f"parallel= splits a model over ranks, and this process is the only one. Start several that call "
            f"torch.distributed.init_process_group() first: {START}"
        )


def _matches(wanted: str, name: str) -> bool:
    """Match names as parallelize_module does: part by part, each of which may be a pattern."""
    from fnmatch import fnmatch

    parts, own = wanted.split("."), name.split(".")
    return len(parts) == len(own) and all(fnmatch(mine, part) for part, mine in zip(parts, own, strict=True))


def refused(**given: tuple[Any, Any]) -> None:
    """``name=(given value, supported values)``.

    Raises LoopError for the first argument that parallel= does not support.
    """
    for name, (value, goes) in given.items():
        if value not in goes:
            raise LoopError(
                f"{name}={value!r} does not work with parallel= yet: ranks communicate inside forward and backward, and this option would "
                "disturb that or is untested with it. Remove it."
            )
