"""The batches of a rank: its own samples of each training batch, with their random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.division import CUT, INDEX, OWN, SplitSettings
from flatout.distributed.shares import BatchShare, Rows, SplitBatches, SplitIterator, share
from flatout.distributed.streams import HostStreams, Streams, offset
from flatout.job.rank_environment import RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from flatout.schema.program import Ledger, TrainingContext


# Draw random numbers for a share of a batch as for the whole batch.
#
# In this mode, an operator that draws numbers for the samples of a share draws them for the whole batch, and
# the rank takes its part. All ranks then draw the same, so each sample gets the same numbers as in one process:
# dropout masks, noise, everything. This costs the drawing of all ranks' numbers on each rank, and a dispatch
# mode.


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


class RankBatches:
    """``share`` is the part of the batch that this rank is computing; None before the first one."""

    def __init__(
        self, torch: ModuleType, context: TrainingContext, env: RankEnvironment, division: SplitSettings
    ) -> None:
        self.torch, self.context, self.env, self.division = torch, context, env, division
        self.share: BatchShare | None = None
        self.in_forward = False  # in a forward pass of the model
        self.streams, self.host = Streams(torch, env.rank), HostStreams(env.rank)

    def install(self, ledger: Ledger) -> None:
        torch = self.torch
        for what, wrap in (
            ("iterator", self._wrap_iterator_init),
            ("batch", self._wrap_next),
            ("indices", self._wrap_common),
            ("epoch", self._wrap_common),
        ):
            self.context.wrap_loader_method(what, wrap, ledger)
        if self.division.draws == OWN:
            fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
            ledger.set(fetcher, "fetch", self._wrap_fetch(fetcher.fetch))
        else:
            mode = draw_for_whole_batch(
                torch,
                lambda: self.share if self.in_forward or self.division.batches in (INDEX, CUT) else None,
            )
            mode.__enter__()
            ledger.on_restore("dispatch mode", lambda: mode.__exit__(None, None, None))

    def cut(self, batch: object, samples: int | None = None) -> Any:
        """This rank's rows of a whole batch. Raises CannotParallelize if there are none."""
        samples = samples if samples is not None else self.context.samples_in(batch)
        if samples is None:
            raise CannotParallelize("its batches hold no tensor with one row per sample")
        if self.share is None and samples < self.env.world_size:
            raise CannotParallelize(
                f"its first batch has {samples} sample{'s' * (samples > 1)}, fewer than the {self.env.world_size} ranks"
            )
        self.share = part = share(samples, self.env.rank, self.env.world_size)
        return self.context.rows_of(batch, samples, part.start, part.stop)

    def _is_training(self, loader: DataLoader) -> bool:
        return (
            self.torch.is_grad_enabled()
            and self.division.batches in (INDEX, CUT)
            and self.context.first_loader_like(loader) in self.division.loaders
        )

    def _wrap_iterator_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        batches, env, division = self, self.env, self.division

        def init_split(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            init(iterator, loader)
            if not batches._is_training(loader):
                return
            iterator.flatout_split = division.batches
            if division.batches == INDEX:
                iterator._index_sampler = SplitBatches(iterator._index_sampler, env.rank, env.world_size)
                iterator._sampler_iter = iter(iterator._index_sampler)
            if division.draws == OWN:  # workers of different ranks need different random numbers
                iterator._base_seed = offset(iterator._base_seed, env.rank)

        return init_split

    def _wrap_next(self, next_batch: Callable[..., Any]) -> Callable[..., Any]:
        batches = self

        def next_split(iterator: _BaseDataLoaderIter) -> Any:
            batch = next_batch(iterator)
            split = getattr(iterator, "flatout_split", None)
            if split is None:
                return batch
            if isinstance(iterator._sampler_iter, SplitIterator):
                batches.share = iterator._sampler_iter.shares.popleft()
            elif split == CUT:
                batch = batches.cut(batch)
            if batches.division.draws == OWN:
                batches.streams.use_own()
            return batch

        return next_split

    def _wrap_common(self, original: Callable[..., Any]) -> Callable[..., Any]:
        streams = self.streams

        def draw_common(*args: object) -> Any:
            with streams.common():
                return original(*args)

        return draw_common

    def _wrap_fetch(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        host, worker = self.host, self.torch.utils.data.get_worker_info

        @wraps(fetch)
        def fetch_with_own_stream(fetcher: object, index: object) -> Any:
            if worker() is not None:  # its iterator seeds it, differently on each rank
                return fetch(fetcher, index)
            with host.own():
                return fetch(fetcher, index)

        return fetch_with_own_stream
