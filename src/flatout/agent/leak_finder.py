"""Leak finder: finds living tensors of earlier steps, their container and the line that fills it.

It inspects only between two steps. Tensors are known by weak references, so that inspecting keeps none of
them alive.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.holders import NamedHolder, attribute_of, filling_line, most_common_holder, user_frames
from flatout.schema.findings import SourceLocation

if TYPE_CHECKING:
    from torch import Tensor

MAX_NODES = 5000  # limit of a walk over the autograd graph
MAX_SUSPECTS = 4  # tensors whose holders are searched; each costs a walk over all objects
GROWABLE = (list, dict, set, deque)


@dataclass
class Leak:
    """What holds tensors of earlier steps: its readable name, and the line that puts them there."""

    holder: str = ""
    place: SourceLocation | None = None
    graph: bool = False
    tensors_a_step: float = 0.0


class LeakFinder:
    """Finds growing containers.

    ``inspect`` is called a few times, some steps apart; ``leak`` reports what grew in between.
    """

    def __init__(self, torch: ModuleType, owners: Iterable[Any] = ()) -> None:
        """``owners``: user objects whose attributes may grow, such as data sets."""
        self.torch = torch
        self._owners = [weakref.ref(owner) for owner in owners]
        self._lengths: list[dict[NamedHolder, int]] = []  # of the named containers, at each look
        self._snapshots: list[tuple[int, dict[int, weakref.ref[Any]]]] = []
        self._graph_sizes: list[int] = []
        # bytes of tensors in the user's variables, at each look
        self._sizes: list[dict[tuple[str, str], int]] = []

    def inspect(self, step: int) -> None:
        alive = {id(tensor): weakref.ref(tensor) for tensor in self._living_tensors()}
        self._snapshots.append((step, alive))
        self._graph_sizes.append(
            max(
                (self._nodes(tensor) for tensor in self._living_tensors() if tensor.grad_fn is not None),
                default=0,
            )
        )
        self._lengths.append(dict(self._containers()))
        self._sizes.append(
            {
                (frame.f_code.co_filename, name): value.untyped_storage().nbytes()
                for frame in user_frames()
                for name, value in frame.f_locals.items()
                if isinstance(value, self.torch.Tensor) and value.layout == self.torch.strided
            }
        )

    def leak(self, expected: Iterable[Any]) -> Leak | None:
        """Return the leak, if any.

        ``expected``: tensors that must live: parameters, gradients, optimizer state, buffers.
        """
        if len(self._snapshots) < 4:
            return None
        gc.unfreeze()  # frozen objects, the program's or those of lever gc_pause, are in no list of referrers
        expected_ids = {id(tensor) for tensor in expected}
        created = self._created_between(expected_ids)
        counts = [len(tensors) for tensors in created]
        steps = self._snapshots[-2][0] - self._snapshots[0][0]
        growing = all(counts) and steps > 0
        chain = (
            self._longest_chain(expected_ids)
            if all(b > a for a, b in zip(self._graph_sizes, self._graph_sizes[1:], strict=False))
            else None
        )
        suspects = [tensor for tensors in created for tensor in tensors] if growing else []
        if not suspects and chain is None:
            return self._growing_tensor()
        leak = Leak(tensors_a_step=len(suspects) / steps if suspects else 0.0)
        leak.graph = chain is not None or any(t.grad_fn is not None for t in suspects)
        searched = suspects[:MAX_SUSPECTS] or [chain]
        own_ids = {id(own) for own in (suspects, searched, created, *created)}
        leak.holder, leak.place = most_common_holder(searched, own_ids)
        return leak

    def growing_container(self) -> Leak | None:
        """Return the named container that grew at each look; of several, the one with the largest growth."""
        if len(self._lengths) < 4:
            return None
        if not (growth := _growth(self._lengths)):
            return None
        kind, name, owner, files = max(growth)[1]
        return Leak(f"{kind} `{name}`" + (f" of {owner}" if owner else ""), filling_line(name, kind, files))

    def _containers(self) -> Iterator[tuple[NamedHolder, int]]:
        for frame in user_frames():
            for name, value in frame.f_locals.items():
                if isinstance(value, GROWABLE):
                    yield (type(value).__name__, name, "", (frame.f_code.co_filename,)), len(value)
        for owner in (owner for ref in self._owners if (owner := ref()) is not None):
            for name, value in getattr(owner, "__dict__", {}).items():
                named = (
                    attribute_of(owner, name, type(value).__name__) if isinstance(value, GROWABLE) else None
                )
                if named is not None:
                    yield named, len(value)

    def _growing_tensor(self) -> Leak | None:
        if not (growth := _growth(self._sizes)):
            return None
        _, (file, name) = max(growth)
        return Leak(f"tensor `{name}`", filling_line(name, "variable", [file]))

    # -- tensors

    def _living_tensors(self) -> Iterator[Any]:
        tensor_class = self.torch.Tensor
        return (thing for thing in gc.get_objects() if issubclass(type(thing), tensor_class))

    def _created_between(self, expected_ids: set[int]) -> list[list[Any]]:
        now = {id(tensor): tensor for tensor in self._living_tensors() if id(tensor) not in expected_ids}
        groups = []
        for (_, before), (_, after) in zip(self._snapshots[:-2], self._snapshots[1:-1], strict=True):
            candidates = [(ref(), before.get(key)) for key, ref in after.items() if key in now]
            # An address is reused once its tensor is gone.
            groups.append(
                [
                    tensor
                    for tensor, earlier in candidates
                    if tensor is not None and (earlier is None or earlier() is not tensor)
                ]
            )
        return groups

    def _longest_chain(self, expected_ids: set[int]) -> Any:
        chains = [
            (self._nodes(tensor), tensor)
            for tensor in self._living_tensors()
            if tensor.grad_fn is not None and id(tensor) not in expected_ids
        ]
        return max(chains, key=lambda pair: pair[0])[1] if chains else None

    def _nodes(self, tensor: Tensor) -> int:
        seen: set[Any] = set()
        todo = [tensor.grad_fn]
        while todo and len(seen) < MAX_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(next_node for next_node, _ in node.next_functions)
        return len(seen)


def _growth(sizes: list[dict[Any, int]]) -> list[tuple[int, Any]]:
    """Return the total growth of each key whose size grew from each inspection to the next."""
    first, *later = sizes
    return [
        (later[-1][key] - size, key)
        for key, size in first.items()
        if all(key in inspection for inspection in later)
        and all(b[key] > a[key] for a, b in zip(sizes, later, strict=False))
    ]
