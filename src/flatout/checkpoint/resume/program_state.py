"""The state of a script besides its weights, for a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from flatout.checkpoint.random_states import state_of
from flatout.checkpoint.resume.initial_tensors import InitialTensors
from flatout.checkpoint.resume.reachable_state import ReachableState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# unchanged tensors: up to these they are saved, others get a digest
MAX_SAVED_TENSOR_BYTES, MAX_SAVED_TOTAL_BYTES = 1 << 16, 1 << 22
MAX_READ_BYTES = 1 << 25  # compared in full each time, to detect writes that bypass torch
MAX_OTHER_BYTES = 1 << 30  # of tensors outside modules
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def program_state(reachable: ReachableState, initial: InitialTensors) -> tuple[dict[str, Any], list[str]]:
    """Return the state for `flatout.checkpoint.values.pack`, and the reasons against an exact resume."""
    tensors, grads, digests, left_out, tensor_infos = {}, {}, {}, [], {}
    unchanged_bytes = other_bytes = read_bytes = 0
    sparse = False
    for path, tensor in reachable.tensors.items():
        if tensor.is_leaf and tensor.grad is not None:
            grads[path] = tensor.grad
            sparse |= tensor.grad.layout is not torch.strided
        if (
            type(tensor) not in TENSOR_TYPES
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_meta
            or tensor.is_inference()
        ):
            left_out.append(path)
            continue
        size = tensor.numel() * tensor.element_size()
        if path not in reachable.of_modules and initial.unchanged(tensor):
            unchanged_bytes += size
            if size > MAX_SAVED_TENSOR_BYTES or unchanged_bytes > MAX_SAVED_TOTAL_BYTES:
                read_bytes += size
                digests[path] = initial.digest(tensor, from_scratch=read_bytes <= MAX_READ_BYTES)
                continue
        elif path not in reachable.of_modules:
            other_bytes += size
            if other_bytes > MAX_OTHER_BYTES:
                left_out.append(path)
                continue
        tensors[path] = tensor
        tensor_infos[path] = [
            str(tensor.device),
            bool(tensor.requires_grad),
            tensor.grad_fn is not None,
            list(_storage_of(tensor)),
        ]
    reasons = [] if reachable.complete else ["it holds more objects than can be inspected"]
    reasons += ["its gradients are sparse"] * sparse
    return {
        "tensors": tensors,
        "grads": grads,
        "digests": digests,
        "left_out": left_out,
        "tensor_infos": tensor_infos,
        "python_values": dict(reachable.python_values),
        "optimizers": {
            path: _state_of_optimizer(optimizer) for path, optimizer in reachable.optimizers.items()
        },
        "generators": {path: state_of(generator) for path, generator in reachable.generators.items()},
        "memory_files": {
            path: [file.getvalue(), file.tell()]
            for path, file in reachable.memory_files.items()
            if not file.closed
        },
    }, reasons


def _storage_of(tensor: Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes() // tensor.element_size(), tensor.storage_offset()


def weights_of(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    numbers = {id(p): number for number, p in enumerate(weights_of(optimizer))}
    state = {
        numbers.get(id(key), key): value
        for key, value in optimizer.state.items()
        if id(key) in numbers or type(key) in (str, int)
    }
    return {
        "state": state,
        "devices": [str(leaf.device) for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)],
    }
