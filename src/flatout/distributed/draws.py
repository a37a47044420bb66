"""Draw random numbers for a share of a batch as for the whole batch.

In this mode, an operator that draws numbers for the samples of a share draws them for the whole batch, and
the rank takes its part. All ranks then draw the same, so each sample gets the same numbers as in one process:
dropout masks, noise, everything. This costs the drawing of all ranks' numbers on each rank, and a dispatch
mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.distributed.shares import BatchShare, Rows


def drawn_for_the_whole(torch: Any, share_of: Callable[[], BatchShare | None]) -> Any:
    """A dispatch mode; ``share_of()`` returns the share being computed."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    draws, tensor_class = torch.Tag.nondeterministic_seeded, torch.Tensor

    class Whole(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, share = kwargs or {}, share_of()
            if share is None or share.size == share.samples or draws not in operator.tags:
                return operator(*args, **kwargs)
            shape = next((found for each in args if (found := _shape(each, tensor_class)) is not None), None)
            rows = Rows.of(shape, share) if shape is not None else None
            if shape is None or rows is None:
                return operator(*args, **kwargs)
            made = operator(*(_for_the_whole(each, shape, rows, tensor_class) for each in args), **kwargs)
            size = rows.whole(shape)[rows.dim]  # also for further outputs, such as an attention's normalisers
            taken = tree_map_only(
                tensor_class,
                lambda t: (
                    rows.of_the_share(t).contiguous()
                    if t.dim() > rows.dim and t.shape[rows.dim] == size
                    else t
                ),
                made,
            )
            return args[0].copy_(taken) if operator._schema.is_mutable else taken

    return Whole()


def _shape(thing: object, tensor_class: Any) -> list[int] | None:
    """The shape of a tensor that numbers are drawn into or for, or the requested sizes."""
    if isinstance(thing, tensor_class):
        return list(thing.shape) if thing.dim() else None
    return (
        list(thing)
        if isinstance(thing, (list, tuple)) and thing and all(type(size) is int for size in thing)
        else None
    )


def _for_the_whole(thing: object, shape: list[int], rows: Rows, tensor_class: Any) -> Any:
    """A tensor for all samples with this rank's part in place, or the sizes of one.

    Only this part matters for the result.
    """
    if _shape(thing, tensor_class) != shape:
        return thing
    if not isinstance(thing, tensor_class):
        return rows.whole(shape)
    whole = thing.new_zeros(rows.whole(shape))
    rows.of_the_share(whole).copy_(thing)
    return whole
