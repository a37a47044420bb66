"""Random numbers for a share of a batch, as they would have been drawn for the whole.

While this is on, an operator that draws a tensor with one row a sample draws it for the whole batch, and the rank takes its rows. All ranks then
draw alike, so each sample meets the very numbers that it would have met in one process: dropout masks, noise, everything. It costs the drawing of
every rank's numbers, and a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.ranks.shares import Share


def drawn_for_the_whole(torch: Any, share_of: Callable[[], Share | None]) -> Any:
    """A dispatch mode; ``share_of()`` is the share that is being computed."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    random_tag = torch.Tag.nondeterministic_seeded

    class Whole(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, part = kwargs or {}, share_of()
            if part is None or part.size == part.samples or random_tag not in operator.tags:
                return operator(*args, **kwargs)
            rows = part.size
            given = [thing for thing in args if _has_rows(torch, thing, rows)]
            in_place = operator._schema.is_mutable and bool(given) and args and args[0] is given[0]
            sizes = not given and _with_size(args, rows)
            if not given and not sizes:
                return operator(*args, **kwargs)
            if sizes:
                made = operator(*_whole_sizes(args, part), **kwargs)
            else:
                made = operator(*(_whole(torch, thing, part) if _has_rows(torch, thing, rows) else thing for thing in args), **kwargs)

            def own_rows(thing: Any) -> Any:
                return thing[part.start:part.stop] if isinstance(thing, torch.Tensor) and thing.dim() and thing.shape[0] == part.samples else thing

            taken = tree_map(own_rows, made)
            return args[0].copy_(taken) if in_place else tree_map(lambda t: t.contiguous() if isinstance(t, torch.Tensor) else t, taken)

    return Whole()


def _has_rows(torch: Any, thing: Any, rows: int) -> bool:
    return isinstance(thing, torch.Tensor) and thing.dim() > 0 and thing.shape[0] == rows


def _whole(torch: Any, tensor: Any, part: Share) -> Any:
    """A tensor for all samples with this rank's rows in their place; what the others hold does not decide on ours."""
    whole = tensor.new_zeros((part.samples, *tensor.shape[1:]))
    whole[part.start:part.stop] = tensor
    return whole


def _with_size(args: Any, rows: int) -> bool:
    return any(isinstance(each, (list, tuple)) and each and each[0] == rows and all(isinstance(size, int) for size in each) for each in args)


def _whole_sizes(args: Any, part: Share) -> list[Any]:
    return [[part.samples, *each[1:]] if isinstance(each, (list, tuple)) and each and each[0] == part.size else each for each in args]
