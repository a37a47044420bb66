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

from flatout.agent.holders import Named, attribute_of, frames, most_common_holder, putting_line
from flatout.schema.findings import SourceLocation

if TYPE_CHECKING:
    from torch import Tensor

MOST_NODES = 5000  # limit of a walk over the autograd graph
SUSPECTS = 4  # tensors whose holders are searched; each costs a walk over all objects
GROWING = (list, dict, set, deque)


@dataclass
class Held:
    """What holds tensors of earlier steps: its readable name, and the line that puts them there."""

    holder: str = ""
    place: SourceLocation | None = None
    graph: bool = False
    tensors_a_step: float = 0.0


class LeakFinder:
    """Finds growing containers.

    ``look`` is called a few times, some steps apart; ``found`` reports what grew in between.
    """

    def __init__(self, torch: ModuleType, owners: Iterable[Any] = ()) -> None:
        """``owners``: user objects whose attributes may grow, such as data sets."""
        self.torch = torch
        self._owners = [weakref.ref(owner) for owner in owners]
        self._lengths: list[dict[Named, int]] = []  # of the named containers, at each look
        self._looks: list[tuple[int, dict[int, weakref.ref[Any]]]] = []
        self._graphs: list[int] = []
        # bytes of tensors in the user's variables, at each look
        self._sizes: list[dict[tuple[str, str], int]] = []

    def look(self, step: int) -> None:
        alive = {id(tensor): weakref.ref(tensor) for tensor in self._alive()}
        self._looks.append((step, alive))
        self._graphs.append(
            max((self._nodes(tensor) for tensor in self._alive() if tensor.grad_fn is not None), default=0)
        )
        self._lengths.append(dict(self._containers()))
        self._sizes.append(
            {
                (frame.f_code.co_filename, name): value.untyped_storage().nbytes()
                for frame in frames()
                for name, value in frame.f_locals.items()
                if isinstance(value, self.torch.Tensor) and value.layout == self.torch.strided
            }
        )

    def found(self, known: Iterable[Any]) -> Held | None:
        """Return the leak, if any.

        ``known``: tensors that must live: parameters, gradients, optimizer state, buffers.
        """
        if len(self._looks) < 4:
            return None
        gc.unfreeze()  # frozen objects, the program's or those of lever gc_pause, are in no list of referrers
        fine = {id(tensor) for tensor in known}
        births = self._births(fine)
        between = [len(tensors) for tensors in births]
        steps = self._looks[-2][0] - self._looks[0][0]
        growing = all(between) and steps > 0
        chain = (
            self._longest_chain(fine)
            if all(b > a for a, b in zip(self._graphs, self._graphs[1:], strict=False))
            else None
        )
        suspects = [tensor for tensors in births for tensor in tensors] if growing else []
        if not suspects and chain is None:
            return self._swollen()
        held = Held(tensors_a_step=len(suspects) / steps if suspects else 0.0)
        held.graph = chain is not None or any(t.grad_fn is not None for t in suspects)
        looked_at = suspects[:SUSPECTS] or [chain]
        ours = {id(mine) for mine in (suspects, looked_at, births, *births)}
        held.holder, held.place = most_common_holder(looked_at, ours)
        return held

    def fullest(self) -> Held | None:
        """Return the named container that grew at each look; of several, the one with the largest growth."""
        if len(self._lengths) < 4:
            return None
        first, *later = self._lengths
        grown = [
            (later[-1][named] - count, named)
            for named, count in first.items()
            if all(named in counts for counts in later)
            and all(b[named] > a[named] for a, b in zip(self._lengths, later, strict=False))
        ]
        if not grown:
            return None
        kind, name, owner, files = max(grown)[1]
        return Held(f"{kind} `{name}`" + (f" of {owner}" if owner else ""), putting_line(name, kind, files))

    def _containers(self) -> Iterator[tuple[Named, int]]:
        for frame in frames():
            for name, value in frame.f_locals.items():
                if isinstance(value, GROWING):
                    yield (type(value).__name__, name, "", (frame.f_code.co_filename,)), len(value)
        for owner in (owner for ref in self._owners if (owner := ref()) is not None):
            for name, value in getattr(owner, "__dict__", {}).items():
                named = (
                    attribute_of(owner, name, type(value).__name__) if isinstance(value, GROWING) else None
                )
                if named is not None:
                    yield named, len(value)

    def _swollen(self) -> Held | None:
        """Return a single tensor that grew at each look: concatenation without removal."""
        first, *later = self._sizes
        grown = [
            (later[-1][key] - size, key)
            for key, size in first.items()
            if all(key in sizes for sizes in later)
            and all(b[key] > a[key] for a, b in zip(self._sizes, later, strict=False))
        ]
        if not grown:
            return None
        _, (file, name) = max(grown)
        return Held(f"tensor `{name}`", putting_line(name, "variable", [file]))

    # -- tensors --------------------------------------------------------------------------------------------

    def _alive(self) -> Iterator[Any]:
        tensor_class = self.torch.Tensor
        return (thing for thing in gc.get_objects() if issubclass(type(thing), tensor_class))

    def _births(self, fine: set[int]) -> list[list[Any]]:
        """Group the living tensors by the look after which they were created; the last look is left out."""
        now = {id(tensor): tensor for tensor in self._alive() if id(tensor) not in fine}
        found = []
        for (_, before), (_, after) in zip(self._looks[:-2], self._looks[1:-1], strict=True):
            born = [(ref(), before.get(key)) for key, ref in after.items() if key in now]
            # An address is reused once its tensor is gone.
            found.append(
                [
                    tensor
                    for tensor, earlier in born
                    if tensor is not None and (earlier is None or earlier() is not tensor)
                ]
            )
        return found

    def _longest_chain(self, fine: set[int]) -> Any:
        chains = [
            (self._nodes(tensor), tensor)
            for tensor in self._alive()
            if tensor.grad_fn is not None and id(tensor) not in fine
        ]
        return max(chains, key=lambda pair: pair[0])[1] if chains else None

    def _nodes(self, tensor: Tensor) -> int:
        """Count the nodes of the autograd graph below a tensor, up to a limit."""
        seen: set[Any] = set()
        todo = [tensor.grad_fn]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
        return len(seen)


# -- source lines ------------------------------------------------------------------------------------------
