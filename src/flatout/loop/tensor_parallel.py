"""One model on several devices, layer by layer: torch's own tensor parallelism, by the names of modules.

Every rank is given the same batches and computes all of the model, but of the layers that are named only its slice. Ranks exchange inside forward and
backward, so nobody can leave a step that has begun: what a Loop otherwise mends (out of memory) ends the training here, in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flatout.plan.errors import LoopError

ALIKE_STEPS = 8  # the first ones, in which it is seen that all ranks compute the same loss
START = "torchrun --standalone --nproc-per-node 2 train.py"


class TensorParallel:
    """``styles``: module name -> ColwiseParallel(), RowwiseParallel(), ... of torch.distributed.tensor.parallel; ``*`` stands for one part of a name."""

    def __init__(self, torch: Any, model: Any, optimizer: Any, styles: Mapping[str, Any], device: Any) -> None:
        """Divides the model and gives the optimizer the new parameters. Raises LoopError, before anything has changed, for what cannot be divided."""
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
                distributed.broadcast(tensor.data, src=0)  # what rank 0 has, every rank has
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
        try:
            parallelize_module(model, mesh, dict(styles))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise LoopError(f"torch cannot divide this model as parallel= says: {_first_line(error)}") from error
        after = dict(model.named_parameters())
        instead = {id(p): after[name] for name, p in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [instead.get(id(p), p) for p in group["params"]]
            if group.get("foreach") is None and "foreach" in group:
                group["foreach"] = False  # slices and whole parameters cannot be updated in one call

    @staticmethod
    def _check(model: Any, optimizer: Any, styles: Mapping[str, Any]) -> None:
        if not isinstance(styles, Mapping) or not styles:
            raise LoopError(f"parallel={styles!r}: a table is needed, module name -> style of torch.distributed.tensor.parallel, as in "
                            '{"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}.')
        names = [name for name, _ in model.named_modules()]
        for wanted, style in styles.items():
            if not any(_matches(wanted, name) for name in names):
                raise LoopError(f"parallel= names {wanted!r}, and the model has no such module. It has {', '.join(name for name in names[:12] if name)}.")
            if not hasattr(style, "_apply"):
                raise LoopError(f"parallel[{wanted!r}] is a {type(style).__name__}; give a style of torch.distributed.tensor.parallel, as ColwiseParallel().")
        if optimizer.state:
            raise LoopError("the optimizer has begun already, and its state is of whole parameters. Divide the model in a new Loop with a new optimizer.")
        if any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
            raise LoopError("fused=True and foreach=True update all parameters in one call, which slices and whole parameters do not share. Leave it out.")

    def clip(self, parameters: Iterable[Any], limit: float) -> Any:
        """torch's clipping by the norm over all ranks; the norm before it."""
        torch = self.torch
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        whole = [norm.full_tensor() if isinstance(norm, self.sharded) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        for gradient in gradients:
            self.local(gradient).mul_(factor)
        return total

    def local(self, tensor: Any) -> Any:
        """What this rank has of a tensor, to be written to."""
        return tensor.to_local() if isinstance(tensor, self.sharded) else tensor

    def alike(self, index: int, loss: Any) -> None:
        """Raises LoopError where the ranks have computed different losses: they were given different batches, or drew different random numbers."""
        if index >= ALIKE_STEPS:
            return
        distributed = self.torch.distributed
        ends = self.torch.stack([loss, -loss]).double()
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        largest, smallest = float(ends[0]), -float(ends[1])
        if abs(largest - smallest) > 1e-3 * max(abs(largest), abs(smallest)):
            raise LoopError(f"with parallel= every rank is to train on the same batches, and the loss of step {index} is {smallest:.6g} on one rank and "
                            f"{largest:.6g} on another. Seed all ranks alike before the loader is made (flatout.seed(0)), without a DistributedSampler.")


def several_ranks(torch: Any) -> None:
    """Raises LoopError in a process that is alone."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        raise LoopError(f"parallel= divides a model over ranks, and this process is the only one. Start several, each of which calls "
                        f"torch.distributed.init_process_group() first: {START}")


def _matches(wanted: str, name: str) -> bool:
    """As parallelize_module does: part by part, each of which may be a pattern."""
    from fnmatch import fnmatch

    parts, own = wanted.split("."), name.split(".")
    return len(parts) == len(own) and all(fnmatch(mine, part) for part, mine in zip(parts, own, strict=True))


def refused(**given: tuple[Any, Any]) -> None:
    """``name=(what was given, what goes)``. Raises LoopError for the first argument of a Loop that does not go with parallel=."""
    for name, (value, goes) in given.items():
        if value not in goes:
            raise LoopError(f"{name}={value!r} does not go with parallel= yet: ranks that share layers exchange inside forward and backward, which it would "
                            "disturb, or which nobody has shown it to be right with. Leave it out.")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
