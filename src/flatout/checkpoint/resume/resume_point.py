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
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from flatout.checkpoint.random_states import random_states, set_state_of
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.fake_tensors import ReplayTensor, meta_of
from flatout.checkpoint.resume.initial_tensors import InitialTensors, bytes_of, digest_of, few, living
from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.resume.replayed_loaders import LOADED
from flatout.checkpoint.resume.saved_world import USUAL, weights_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

SHOWN = 4


class ResumePoint:
    """Restores a saved state. ``refuse`` gets a reason and does not return. ``replay_tensors`` ends here."""

    def __init__(
        self,
        state: dict[str, Any],
        replay_tensors: FakeOperators,
        origins: InitialTensors,
        refuse: Callable[[str], NoReturn],
    ) -> None:
        self.state, self.replay_tensors, self.origins, self.refuse = state, replay_tensors, origins, refuse

    def compare(self, world: ReachableState, waiting: list[Any]) -> None:
        """Reject a script that differs from its saved state. ``waiting``: tensors that are valid already."""
        before, now = self.state["plain"], world.plain
        differ = [
            _differs(name, value, now[name], world.leaves[name])
            for name, value in before.items()
            if name in now and now[name] != value
        ]
        differ += [f"`{name}` is missing" for name in before if name not in now] + [
            f"`{name}` is new" for name in now if name not in before
        ]
        if differ:
            self.refuse(
                f"at the resume point, these variables differ from the first run: {'; '.join(differ[:SHOWN])}{_more(differ)}"
            )
        paths = [*self.state["tensors"], *self.state["digests"], *self.state["left"]]
        self._look_for_others(world, waiting)
        lost = sorted(set(paths) ^ set(world.tensors))
        if lost:
            self.refuse(
                f"at the resume point, these tensors are missing or new: {', '.join(f'`{path}`' for path in lost[:SHOWN])}{_more(lost)}"
            )
        if list(self.state["optimizers"]) != list(world.optimizers):
            self.refuse("at the resume point, the optimizers differ from the first run")
        changed = [
            path
            for path, digest in self.state["digests"].items()
            if type(world.tensors[path]) is ReplayTensor
            or zlib.crc32(few(world.tensors[path]), digest_of(world.tensors[path])) != digest
        ]
        if changed:
            self.refuse(
                f"at the start of training, {', '.join(f'`{path}`' for path in changed[:SHOWN])}{_more(changed)} had other values than in the first run"
            )

    def _look_for_others(self, world: ReachableState, waiting: list[Any]) -> None:
        """Check tensors that no variable leads to.

        A fake one stops the code that reads it. One that seems to have values cannot be restored, so it is
        rejected. A batch that the replay has loaded again becomes a fake one: `enumerate` holds such a batch
        without using it.
        """
        gc.collect()
        self.origins.let_go()
        known = {id(tensor) for tensor in (*world.tensors.values(), *waiting)}
        known |= {id(leaf) for leaf in pytree.tree_leaves(self.state) if isinstance(leaf, torch.Tensor)}
        known |= {
            id(leaf)
            for optimizer in world.optimizers.values()
            for leaf in pytree.tree_leaves(dict(optimizer.state))
            if isinstance(leaf, torch.Tensor)
        }
        known |= {
            id(tensor.grad)
            for tensor in world.tensors.values()
            if type(tensor) is not ReplayTensor and tensor.is_leaf and tensor.grad is not None
        }
        # the base of a view
        known |= {
            id(tensor._base)
            for tensor in world.tensors.values()
            if type(tensor) is not ReplayTensor and tensor._base is not None
        }
        there = {
            id(tensor)
            for path, tensor in world.tensors.items()
            if type(tensor) is not ReplayTensor and path not in self.state["left"]
        }
        others = [
            tensor
            for tensor in living()
            if id(tensor) not in known
            and type(tensor) is not ReplayTensor
            and (not self.origins.unchanged(tensor) or self._was_written_to(tensor))
            # a view's base is restored with it: rows of a variable that a loop iterates over
            and id(tensor._base) not in there
        ]
        for tensor in [tensor for tensor in others if hasattr(tensor, LOADED)]:
            others = [each for each in others if each is not tensor]
            torch.utils.swap_tensors(tensor, ReplayTensor(meta_of(tensor)))
        if others:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in others[:SHOWN])
            self.refuse(
                f"no variable leads to {len(others)} tensors (of shape {shapes}{_more(others)}), so the checkpoint does not hold their values"
            )

    def _was_written_to(self, tensor: Tensor) -> bool:
        """Whether it was written to through another tensor that shares its memory."""
        if type(tensor) not in USUAL or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        try:
            return tensor.untyped_storage().data_ptr() in self.replay_tensors.memory
        except NotImplementedError:  # a functorch wrapper
            return False

    def put_back(self, world: ReachableState) -> None:
        state = self.state
        memory: dict[int, Any] = {}
        apart = self._no_longer_together(world)
        for path, values in state["tensors"].items():
            target = world.tensors[path]
            device, wants_grad, has_graph, lies = state["about"][path]
            if lies[0] in apart and type(target) is not ReplayTensor:
                target.data = _placed(values, device, lies, memory)
            elif type(target) is ReplayTensor:
                made = _placed(values, device, lies, memory)
                if wants_grad:
                    made.requires_grad_()
                    if has_graph:
                        made.register_hook(self._trips(path))
                torch.utils.swap_tensors(target, made)
                self.origins.forget(target)
            elif target.size() == values.size() and target.dtype == values.dtype:
                # keep unchanged tensors: an unfinished graph may hold them in their present version
                if target.requires_grad or not _same_bits(target, values):
                    with torch.no_grad():
                        target.detach().copy_(values)
            else:
                target.data = values.to(device)
        for path, tensor in world.tensors.items():
            if type(tensor) is not ReplayTensor and tensor.is_leaf:
                grad = state["grads"].get(path)
                # a copy: what was read is a view, which cannot be detached in place
                tensor.grad = grad.to(tensor.device, copy=True) if grad is not None else None
        for path, optimizer in world.optimizers.items():
            self._put_back_optimizer(optimizer, state["optimizers"][path])
        for path, (content, at) in state["buffers"].items():
            if path in world.buffers:
                buffer = world.buffers[path]
                buffer.seek(0)
                buffer.truncate()
                buffer.write(content)
                buffer.seek(at)
        for path, generator in world.generators.items():
            if path not in state["generators"] or not set_state_of(
                torch, generator, state["generators"][path]
            ):
                self.refuse(f"`{path}` was another type of random generator in the first run")

    def _no_longer_together(self, world: ReachableState) -> set[int]:
        """Return memory that tensors shared at the checkpoint and do not share now.

        Cause: a weight got the memory of another tensor, which has no values during a replay.
        """
        places: dict[int, set[int]] = {}
        for path in self.state["tensors"]:
            target, (where, *_) = world.tensors[path], self.state["about"][path][3]
            places.setdefault(where, set()).add(
                0 if type(target) is ReplayTensor else target.untyped_storage().data_ptr()
            )
        return {where for where, found in places.items() if len(found) > 1}

    def _put_back_optimizer(self, optimizer: Optimizer, kept: dict[str, Any]) -> None:
        weights, devices = weights_of(optimizer), iter(kept["devices"])
        state = pytree.tree_map(
            lambda leaf: leaf.to(next(devices)) if isinstance(leaf, torch.Tensor) else leaf, kept["state"]
        )
        before = dict(optimizer.state)
        optimizer.state.clear()
        for key, value in state.items():
            known = weights[key] if type(key) is int else key
            there = before.get(known)
            # others may share its state, e.g. a state_dict in a variable
            if type(value) is dict and isinstance(there, dict):
                value = {name: _in_place_of(there.get(name), each) for name, each in value.items()}
            optimizer.state[known] = value

    def _trips(self, path: str) -> Callable[[Any], Any]:
        def trip(grad: Tensor) -> Any:
            self.refuse(
                f"a backward pass goes through `{path}` to operations before the checkpoint, whose graph is not saved"
            )

        return trip


def _in_place_of(there: object, value: object) -> Any:
    """Put the values into the existing tensor; return other kinds of values as they are."""
    if (
        not isinstance(there, torch.Tensor)
        or not isinstance(value, torch.Tensor)
        or there.size() != value.size()
        or there.dtype != value.dtype
    ):
        return value
    if type(there) is ReplayTensor:
        torch.utils.swap_tensors(there, value)
    else:
        with torch.no_grad():
            there.copy_(value)
    return there


def _same_bits(one: object, other: object) -> bool:
    return bool(bytes_of(one) == bytes_of(other))


def _placed(values: Tensor, device: str, lies: list[int], memory: dict[int, Any]) -> Any:
    """Return a tensor with these values; tensors that shared memory share it again."""
    where, size, offset = lies
    storage = memory.get(where)
    if storage is None or storage.nbytes() != size * values.element_size():
        storage = memory[where] = torch.empty(size, dtype=values.dtype, device=device).untyped_storage()
    made = torch.empty(0, dtype=values.dtype, device=device).set_(
        storage, offset, values.size(), values.stride()
    )
    return made.copy_(values)


def _differs(name: str, before: str, now: str, leaves: list[str]) -> str:
    """Name the first value in a variable that differs, if its mark was recorded."""
    marks = [metadata.partition(" ")[2] for metadata in (before, now)]
    at = next(
        (at for at in range(len(leaves)) if marks[0][4 * at : 4 * at + 4] != marks[1][4 * at : 4 * at + 4]),
        None,
    )
    return leaves[at] if at is not None else f"`{name}` has changed"


def _more(found: Iterable[Any]) -> str:
    count = len(list(found)) - SHOWN
    return f" and {count} more" if count > 0 else ""


class RandomDrawCheck:
    """Detects that the script and its skipped data loading both draw from `random` or numpy."""

    def __init__(self) -> None:
        self.began = _others()

    def compare(self, saved: dict[str, Any]) -> list[str]:
        now = _others()
        return [
            kind for kind, state in now.items() if state != self.began.get(kind) and state != saved.get(kind)
        ]


def _others() -> dict[str, Any]:
    return {
        kind: state
        for kind, state in random_states(torch, devices=False).items()
        if kind in ("python", "numpy")
    }
