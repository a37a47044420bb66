"""Saves the state of a script besides its weights, and restores it at the resume point.

For each tensor that the script can reach, a checkpoint holds one of three things:

    its values          weights, buffers, and tensors made or written to since training began
    its digest          tensors made before training and not written to since: they exist again and are compared
    nothing             tensors that are too large or of an unusual kind: they get no values, and reading one stops the script

Plain Python values are never restored. The replay computes them again, and they are compared: a difference
shows that some input of the script was not recorded.
"""

from __future__ import annotations

import gc
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from flatout.checkpoint.random_states import random_states, set_state_of, state_of
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.gradient_sources import ReplayTensor, spec_of
from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.resume.replayed_loaders import LOADED_ATTRIBUTE
from flatout.checkpoint.tensors import memory_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class InitialTensors:
    """The tensors that existed when training began."""

    def __init__(self, reachable: ReachableState, everything: bool) -> None:
        """``everything``: include tensors that no variable leads to."""
        tensors = {
            id(tensor): tensor
            for tensor in (*reachable.tensors.values(), *(living_tensors() if everything else ()))
        }
        lazy = torch.nn.parameter.is_lazy
        self._versions = {
            key: (tensor, tensor._version)
            for key, tensor in tensors.items()
            if not lazy(tensor) and not tensor.is_inference()
        }
        self._digests: dict[tuple[int, int], int] = {}

    def drop_unused(self) -> None:
        """Drop tensors that nothing else holds any more."""
        for key in list(self._versions):
            if sys.getrefcount(self._versions[key][0]) <= 2:  # the tuple and the call
                del self._versions[key]

    def untrack(self, tensor: Tensor) -> None:
        """Stop tracking a tensor: it has been replaced."""
        self._versions.pop(id(tensor), None)

    def unchanged(self, tensor: Tensor) -> bool:
        entry = self._versions.get(id(tensor))
        return (
            entry is not None
            and entry[0] is tensor
            and not tensor.is_inference()
            and tensor._version == entry[1]
        )

    def digest(self, tensor: Tensor, from_scratch: bool) -> int:
        """Return a digest of the bytes. Without ``from_scratch``, it is the cached digest and a sample of the bytes."""
        key = id(tensor), tensor._version
        digest = self._digests.get(key)
        if digest is None or from_scratch:
            digest = self._digests[key] = digest_of(tensor)
        return zlib.crc32(sample_bytes(tensor), digest)


def living_tensors() -> list[Any]:
    """Return all tensors known to Python's garbage collector."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def digest_of(tensor: Tensor) -> int:
    host = tensor.detach().cpu().contiguous()
    return zlib.crc32(memory_of(host))


def bytes_of(tensor: Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    return bytes(memory_of(host))


def sample_bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    return bytes_of(flat[:: max(1, flat.numel() // 1024)])


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


MAX_SHOWN = 4


class ResumePoint:
    """Restores a saved state. ``refuse`` gets a reason and does not return."""

    def __init__(
        self,
        state: dict[str, Any],
        fake_operators: FakeOperators,
        initial: InitialTensors,
        refuse: Callable[[str], NoReturn],
    ) -> None:
        self.state, self.fake_operators, self.initial, self.refuse = state, fake_operators, initial, refuse

    def compare(self, reachable: ReachableState, prefetched: list[Any]) -> None:
        """Reject a script that differs from its saved state. ``prefetched``: tensors that are valid already."""
        before, now = self.state["python_values"], reachable.python_values
        differ = [
            _describe_difference(name, value, now[name], reachable.value_sentences[name])
            for name, value in before.items()
            if name in now and now[name] != value
        ]
        differ += [f"`{name}` is missing" for name in before if name not in now] + [
            f"`{name}` is new" for name in now if name not in before
        ]
        if differ:
            self.refuse(
                f"at the resume point, these variables differ from the first run: {_listed(differ, '; ')}"
            )
        paths = [*self.state["tensors"], *self.state["digests"], *self.state["left_out"]]
        self._check_unreachable(reachable, prefetched)
        mismatched = sorted(set(paths) ^ set(reachable.tensors))
        if mismatched:
            names = _listed([f"`{path}`" for path in mismatched])
            self.refuse(f"at the resume point, these tensors are missing or new: {names}")
        if list(self.state["optimizers"]) != list(reachable.optimizers):
            self.refuse("at the resume point, the optimizers differ from the first run")
        changed = [
            f"`{path}`"
            for path, digest in self.state["digests"].items()
            if type(tensor := reachable.tensors[path]) is ReplayTensor
            or zlib.crc32(sample_bytes(tensor), digest_of(tensor)) != digest
        ]
        if changed:
            self.refuse(
                f"at the start of training, {_listed(changed)} had other values than in the first run"
            )

    def _check_unreachable(self, reachable: ReachableState, prefetched: list[Any]) -> None:
        """Check tensors that no variable leads to.

        A fake one stops the code that reads it. One that seems to have values cannot be restored, so it is
        rejected. A batch that the replay has loaded again becomes a fake one: `enumerate` holds such a batch
        without using it."""
        gc.collect()
        self.initial.drop_unused()
        optimizer_states = [dict(optimizer.state) for optimizer in reachable.optimizers.values()]
        known = {id(tensor) for tensor in (*reachable.tensors.values(), *prefetched)}
        known |= {id(leaf) for leaf in pytree.tree_leaves((self.state, optimizer_states))}
        real = {path: t for path, t in reachable.tensors.items() if type(t) is not ReplayTensor}
        known |= {id(tensor.grad) for tensor in real.values() if tensor.is_leaf}
        known |= {id(tensor._base) for tensor in real.values()}  # the base of a view
        restored = {id(tensor) for path, tensor in real.items() if path not in self.state["left_out"]}
        others = [
            tensor
            for tensor in living_tensors()
            if id(tensor) not in known
            and type(tensor) is not ReplayTensor
            and (not self.initial.unchanged(tensor) or self._was_written_to(tensor))
            # a view's base is restored with it: rows of a variable that a loop iterates over
            and id(tensor._base) not in restored
        ]
        for tensor in [tensor for tensor in others if hasattr(tensor, LOADED_ATTRIBUTE)]:
            others = [other for other in others if other is not tensor]
            torch.utils.swap_tensors(tensor, ReplayTensor(spec_of(tensor)))
        if others:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in others[:MAX_SHOWN])
            self.refuse(
                f"no variable leads to {len(others)} tensors (of shape {shapes}{_more(others)}), so the checkpoint does not hold their values"
            )

    def _was_written_to(self, tensor: Tensor) -> bool:
        if type(tensor) not in TENSOR_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        try:
            return tensor.untyped_storage().data_ptr() in self.fake_operators.written_storages
        except NotImplementedError:  # a functorch wrapper
            return False

    def restore(self, reachable: ReachableState) -> None:
        state = self.state
        storages: dict[int, Any] = {}
        separated = self._separated_storages(reachable)
        for path, values in state["tensors"].items():
            target = reachable.tensors[path]
            device, requires_grad, has_graph, storage = state["tensor_infos"][path]
            if storage[0] in separated and type(target) is not ReplayTensor:
                target.data = _with_storage(values, device, storage, storages)
            elif type(target) is ReplayTensor:
                restored = _with_storage(values, device, storage, storages)
                if requires_grad:
                    restored.requires_grad_()
                    if has_graph:
                        restored.register_hook(self._reject_backward(path))
                torch.utils.swap_tensors(target, restored)
                self.initial.untrack(target)
            elif target.size() == values.size() and target.dtype == values.dtype:
                # keep unchanged tensors: an unfinished graph may hold them in their present version
                if target.requires_grad or not _same_bits(target, values):
                    with torch.no_grad():
                        target.detach().copy_(values)
            else:
                target.data = values.to(device)
        for path, tensor in reachable.tensors.items():
            if type(tensor) is not ReplayTensor and tensor.is_leaf:
                grad = state["grads"].get(path)
                # a copy: what was read is a view, which cannot be detached in place
                tensor.grad = grad.to(tensor.device, copy=True) if grad is not None else None
        for path, optimizer in reachable.optimizers.items():
            self._restore_optimizer(optimizer, state["optimizers"][path])
        for path, (content, offset) in state["memory_files"].items():
            if path in reachable.memory_files:
                file = reachable.memory_files[path]
                file.seek(0)
                file.truncate()
                file.write(content)
                file.seek(offset)
        for path, generator in reachable.generators.items():
            if path not in state["generators"] or not set_state_of(
                torch, generator, state["generators"][path]
            ):
                self.refuse(f"`{path}` was another type of random generator in the first run")

    def _separated_storages(self, reachable: ReachableState) -> set[int]:
        """Return memory that tensors shared at the checkpoint and do not share now.

        Cause: a weight got the memory of another tensor, which has no values during a replay."""
        current: dict[int, set[int]] = {}
        for path in self.state["tensors"]:
            target, (address, *_) = reachable.tensors[path], self.state["tensor_infos"][path][3]
            current.setdefault(address, set()).add(
                0 if type(target) is ReplayTensor else target.untyped_storage().data_ptr()
            )
        return {address for address, addresses in current.items() if len(addresses) > 1}

    def _restore_optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        weights, devices = weights_of(optimizer), iter(saved["devices"])
        state = pytree.tree_map(
            lambda leaf: leaf.to(next(devices)) if isinstance(leaf, torch.Tensor) else leaf, saved["state"]
        )
        before = dict(optimizer.state)
        optimizer.state.clear()
        for key, value in state.items():
            weight = weights[key] if type(key) is int else key
            current = before.get(weight)
            # others may share its state, e.g. a state_dict in a variable
            if type(value) is dict and isinstance(current, dict):
                value = {name: _restored_in_place(current.get(name), part) for name, part in value.items()}
            optimizer.state[weight] = value

    def _reject_backward(self, path: str) -> Callable[[Any], Any]:
        def reject(grad: Tensor) -> Any:
            self.refuse(
                f"a backward pass goes through `{path}` to operations before the checkpoint, whose graph is not saved"
            )

        return reject


def _restored_in_place(current: object, value: object) -> Any:
    if (
        not isinstance(current, torch.Tensor)
        or not isinstance(value, torch.Tensor)
        or current.size() != value.size()
        or current.dtype != value.dtype
    ):
        return value
    if type(current) is ReplayTensor:
        torch.utils.swap_tensors(current, value)
    else:
        with torch.no_grad():
            current.copy_(value)
    return current


def _same_bits(one: object, other: object) -> bool:
    return bool(bytes_of(one) == bytes_of(other))


def _with_storage(values: Tensor, device: str, layout: list[int], storages: dict[int, Any]) -> Any:
    address, size, offset = layout
    storage = storages.get(address)
    if storage is None or storage.nbytes() != size * values.element_size():
        storage = storages[address] = torch.empty(size, dtype=values.dtype, device=device).untyped_storage()
    tensor = torch.empty(0, dtype=values.dtype, device=device).set_(
        storage, offset, values.size(), values.stride()
    )
    return tensor.copy_(values)


def _describe_difference(name: str, before: str, now: str, value_sentences: list[str]) -> str:
    old, new = (metadata.partition(" ")[2] for metadata in (before, now))
    for i, sentence in enumerate(value_sentences):
        if old[4 * i : 4 * i + 4] != new[4 * i : 4 * i + 4]:
            return sentence
    return f"`{name}` has changed"


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(names[:MAX_SHOWN]) + _more(names)


def _more(found: Sequence[Any]) -> str:
    count = len(found) - MAX_SHOWN
    return f" and {count} more" if count > 0 else ""


class RandomDrawCheck:
    """Detects that the script and its skipped data loading both draw from `random` or numpy."""

    def __init__(self) -> None:
        self.initial_states = _host_random_states()

    def compare(self, saved: dict[str, Any]) -> list[str]:
        now = _host_random_states()
        return [
            kind
            for kind, state in now.items()
            if state != self.initial_states.get(kind) and state != saved.get(kind)
        ]


def _host_random_states() -> dict[str, Any]:
    return {
        kind: state
        for kind, state in random_states(torch, devices=False).items()
        if kind in ("python", "numpy")
    }
