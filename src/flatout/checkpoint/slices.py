"""Checkpoint tensors that are sharded over ranks (DTensor), and restore them on any number of ranks.

Each rank saves its slice. Later, each rank takes what it needs from the saved slices. A whole tensor counts
as a slice, too: one process may resume from many, and many from one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.errors import SaveError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

Where = tuple[Any, ...]  # the keys and indices of a value in a state


@dataclass(frozen=True)
class Slice:
    """``local`` is the part of a tensor of ``shape`` that begins at ``offsets``."""

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def is_divided(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return module is not None and isinstance(value, module.DTensor)


def slice_of(divided: DTensor) -> Slice | None:
    """This rank's part of a DTensor; None if it is a partial sum, or in several pieces here."""
    if any(placement.is_partial() for placement in divided.placements):
        return None
    pieces = divided.detach().__create_chunk_list__()
    return (
        Slice(divided.detach().to_local(), tuple(divided.shape), tuple(pieces[0].offsets))
        if len(pieces) == 1
        else None
    )


def slices_in(state: object) -> dict[Any, Any]:
    """A state reduced to its sharded tensors, under their keys and indices."""
    found = {}
    for key, value in _inside(state):
        if is_divided(value):
            found[key] = value
        elif inner := slices_in(value):
            found[key] = inner
    return found


def filled(
    torch: ModuleType, state: object, like: Callable[[Where], Any], parts: Iterable[Mapping[Any, Any]]
) -> Any:
    """``state`` with its tensors sharded as they are now. Raises SaveError if parts are missing.

    ``like(where)`` returns the live tensor at a place, or None. ``parts`` are the `slices_in` of the saved
    ranks, read only as far as needed.
    """
    holes = {
        where: hole
        for where, saved in _leaves(state, ())
        if (hole := _hole(torch, saved, like, where)) is not None
    }
    coming = chain([state], parts)
    while any(hole.missing for hole in holes.values()) and (part := next(coming, None)) is not None:
        for where, saved in _leaves(part, ()):
            if where in holes:
                holes[where].take(saved)
    lacking = [where for where, hole in holes.items() if hole.missing]
    if lacking:
        raise SaveError(f"slices of {_spelled(lacking[0])} are missing in the checkpoint")
    return _with(state, (), {where: hole.whole() for where, hole in holes.items()}) if holes else state


class _Hole:
    """The part of one tensor that this rank needs, filled piece by piece."""

    def __init__(self, torch: ModuleType, like: Tensor, shape: tuple[int, ...], dtype: Any) -> None:
        self.torch, self.like = torch, like
        mine = slice_of(like) if is_divided(like) else None
        self.offsets = mine.offsets if mine is not None else (0,) * len(shape)
        self.local = torch.empty(mine.local.shape if mine is not None else shape, dtype=dtype, device="cpu")
        self.missing = self.local.numel()
        self._seen: set[Where] = set()

    def take(self, saved: Slice | Tensor) -> None:
        piece = saved if isinstance(saved, Slice) else Slice(saved, tuple(saved.shape), (0,) * saved.dim())
        box = piece.offsets, tuple(piece.local.shape)
        if not self.missing or box in self._seen:  # replicas are identical
            return
        self._seen.add(box)
        starts = [max(a, b) for a, b in zip(self.offsets, piece.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.local.shape, piece.offsets, piece.local.shape, strict=True
            )
        ]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return
        to, of = (
            tuple(slice(start - at, end - at) for start, end, at in zip(starts, ends, offsets, strict=True))
            for offsets in (self.offsets, piece.offsets)
        )
        self.local[to] = piece.local[of]
        self.missing -= prod(end - start for start, end in zip(starts, ends, strict=True))

    def whole(self) -> Any:
        if not is_divided(self.like):
            return self.local
        like, made = self.like.detach(), sys.modules["torch.distributed.tensor"].DTensor
        here = self.local.to(like.to_local().device)
        return made.from_local(
            here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _hole(torch: ModuleType, saved: Any, like: Callable[[Where], Any], where: Where) -> _Hole | None:
    """None for a value that is used as saved."""
    if isinstance(saved, Slice):
        now = like(where)
        if now is not None and tuple(now.shape) != saved.shape:
            raise SaveError(
                f"{_spelled(where)} was sharded and has shape {list(saved.shape)}, but its tensor has shape {list(now.shape)} now"
            )
        return _Hole(torch, now, saved.shape, saved.local.dtype)
    if isinstance(saved, torch.Tensor) and is_divided(now := like(where)) and now.shape == saved.shape:
        return _Hole(torch, now, tuple(saved.shape), saved.dtype)
    return None


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if type(value) in (list, tuple) else ()


def _leaves(value: object, where: Where) -> Iterable[tuple[Where, Any]]:
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        for key, each in _inside(value):
            yield from _leaves(each, (*where, key))
    else:
        yield where, value


def _with(value: Any, where: Where, instead: Mapping[Where, Any]) -> Any:
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _with(each, (*where, key), instead)
        return value
    if type(value) in (list, tuple):
        return type(value)(_with(each, (*where, at), instead) for at, each in enumerate(value))
    return instead.get(where, value)


def _spelled(where: Where) -> str:
    return ".".join(map(str, where))
