"""Checkpoint tensors that are sharded over ranks (DTensor): each rank saves and restores its slice.

Another number of ranks cannot resume from them. torch.distributed.checkpoint writes checkpoints that can be
sharded in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    slices = {}
    for key, value in _inside(state):
        if is_divided(value):
            slices[key] = value
        elif inner := slices_in(value):
            slices[key] = inner
    return slices


def sharded_again(state: Any, own: object, like: Callable[[Where], Any], where: Where = ()) -> Any:
    """``state`` with this rank's slices as the local parts of sharded tensors.

    ``own``: the `slices_in` of this rank; None for the rank that wrote ``state``. ``like(where)`` returns the
    live tensor at a place, or None. Raises SaveError if that is not sharded as it was saved.
    """
    if isinstance(state, Slice):
        return _sharded(own if isinstance(own, Slice) else state, like(where), where)
    inside = own if isinstance(own, Mapping) else {}
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = sharded_again(value, inside.get(key), like, (*where, key))
        return state
    if type(state) in (list, tuple):
        return type(state)(
            sharded_again(value, inside.get(number), like, (*where, number))
            for number, value in enumerate(state)
        )
    return state


def _sharded(piece: Slice, now: Any, where: Where) -> Any:
    name, mine = ".".join(map(str, where)), slice_of(now) if is_divided(now) else None
    if mine is None or mine.shape != piece.shape:
        shape = f"has shape {list(now.shape)}" if now is not None else "is missing"
        raise SaveError(
            f"{name} was sharded and has shape {list(piece.shape)}; its tensor {shape} now"
            + (", and is not sharded" if mine is None and now is not None else "")
        )
    if (mine.offsets, mine.local.shape) != (piece.offsets, piece.local.shape):
        raise SaveError(f"{name} is sharded in another way than in the checkpoint")
    made = sys.modules["torch.distributed.tensor"].DTensor
    return made.from_local(
        piece.local.to(mine.local.device),
        now.device_mesh,
        now.placements,
        run_check=False,
        shape=now.shape,
        stride=now.stride(),
    )


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if type(value) in (list, tuple) else ()
