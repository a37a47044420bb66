"""Draw random numbers for a share of a batch as for the whole batch.

In this mode, an operator that draws numbers for the samples of a share draws them for the whole batch, and
the rank takes its part. All ranks then draw the same, so each sample gets the same numbers as in one process:
dropout masks, noise, everything. This costs the drawing of all ranks' numbers on each rank, and a dispatch
mode.
"""

from collections.abc import Callable
from typing import Any

from flatout.distributed.shares import BatchShare, Rows


def draw_for_whole_batch(torch: Any, share_of: Callable[[], BatchShare | None]) -> Any:
    """A dispatch mode; ``share_of()`` returns the share being computed."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    random_tag, tensor_class = torch.Tag.nondeterministic_seeded, torch.Tensor

    class WholeBatchDraws(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, share = kwargs or {}, share_of()
            if share is None or share.size == share.samples or random_tag not in operator.tags:
                return operator(*args, **kwargs)
            shape = next((shape for arg in args if (shape := _shape(arg, tensor_class)) is not None), None)
            rows = Rows.of(shape, share) if shape is not None else None
            if shape is None or rows is None:
                return operator(*args, **kwargs)
            whole = operator(*(_widen(arg, shape, rows, tensor_class) for arg in args), **kwargs)
            size = rows.whole_shape(shape)[
                rows.dim
            ]  # also for further outputs, such as an attention's normalisers
            own_rows = tree_map_only(
                tensor_class,
                lambda t: (
                    rows.own_rows(t).contiguous() if t.dim() > rows.dim and t.shape[rows.dim] == size else t
                ),
                whole,
            )
            return args[0].copy_(own_rows) if operator._schema.is_mutable else own_rows

    return WholeBatchDraws()


def _shape(arg: object, tensor_class: Any) -> list[int] | None:
    if isinstance(arg, tensor_class):
        return list(arg.shape) if arg.dim() else None
    return (
        list(arg)
        if isinstance(arg, (list, tuple)) and arg and all(type(size) is int for size in arg)
        else None
    )


def _widen(arg: object, shape: list[int], rows: Rows, tensor_class: Any) -> Any:
    """A tensor for all samples with this rank's part in place, or the sizes of one.

    Only this part matters for the result.
    """
    if _shape(arg, tensor_class) != shape:
        return arg
    if not isinstance(arg, tensor_class):
        return rows.whole_shape(shape)
    whole = arg.new_zeros(rows.whole_shape(shape))
    rows.own_rows(whole).copy_(arg)
    return whole
