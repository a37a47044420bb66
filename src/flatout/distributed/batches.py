"""The batches of a rank: its own samples of each training batch, with their random numbers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.division import CUT, INDEX, OWN, SplitSettings
from flatout.distributed.shares import BatchShare, Rows, SplitBatches, SplitIterator, share
from flatout.job.rank_environment import RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from flatout.schema.program import Ledger, TrainingContext


# Random numbers of a program that runs in several processes.
#
# All ranks start from the same state. They draw the sampler order from the *common* stream, which equals the
# plain run's if nothing else draws from it. A rank's random numbers for its own samples (dropout, noise,
# augmentation) must differ between ranks, or the samples of a batch would share their noise. They come from the
# rank's *own* stream.


class Streams:
    """torch's default generators, of the host and of the devices in use.

    They hold one stream while the other waits.

    If batches come from a DataLoader, the script draws from its own stream, except inside ``common``
    (``use_own`` begins this). If it draws its batches itself, it draws from the common stream, except inside
    ``own``.
    """

    def __init__(self, torch: ModuleType, rank: int) -> None:
        self.torch, self.rank = torch, rank
        self._inactive_states: dict[int, Any] = {}  # by generator, the state of the inactive stream
        self._in_own = False

    def use_own(self) -> None:
        """From now on the script draws from the rank's own stream."""
        if not self._in_own:
            self._swap(to_own=True)

    @contextmanager
    def common(self) -> Iterator[None]:
        """Draw from the common stream, equally on every rank."""
        with self._active(own=False):
            yield

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from this rank's own stream."""
        with self._active(own=True):
            yield

    @contextmanager
    def _active(self, own: bool) -> Iterator[None]:
        if own == self._in_own:
            yield
            return
        self._swap(own)
        try:
            yield
        finally:
            self._swap(not own)

    def _swap(self, to_own: bool) -> None:
        for i, generator in enumerate(self._generators()):
            state = generator.get_state()
            if i in self._inactive_states:
                generator.set_state(self._inactive_states[i])
            elif to_own:
                generator.manual_seed(offset(generator.initial_seed(), self.rank))
            else:
                continue  # a device first used since the last swap
            self._inactive_states[i] = state
        self._in_own = to_own

    def _generators(self) -> list[Any]:
        cuda = self.torch.cuda
        return [self.torch.default_generator, *(cuda.default_generators if cuda.is_initialized() else ())]


class HostStreams:
    """Per-rank states of ``random`` and numpy while this process fetches samples.

    They are swapped out afterwards, so that the script's own random decisions stay the same on every rank. If
    a data set draws nothing in its first fetches, it is not checked again.
    """

    CHECKED_FETCHES = 8

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._own: Any = None
        self._fetches = 0
        self._uses_rng = False

    @contextmanager
    def own(self) -> Iterator[None]:
        if self._fetches >= self.CHECKED_FETCHES and not self._uses_rng:
            yield
            return
        self._fetches += 1
        common = _state()
        if self._own is None:
            self._own = _seeded(common, self.rank)
        _set_state(self._own)
        try:
            yield
        finally:
            state = _state()
            self._uses_rng = self._uses_rng or not _same(state, self._own)
            self._own = state
            _set_state(common)


def offset(seed: int, rank: int) -> int:
    """The seed of a rank's own stream."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank}".encode()).digest()[:7], "big")


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None and hasattr(numpy, "random") else None


def _state() -> tuple[Any, Any]:
    numpy = _numpy()
    return random.getstate(), numpy.get_state() if numpy is not None else None


def _set_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        _numpy().set_state(state[1])


def _seeded(state: tuple[Any, Any], rank: int) -> tuple[Any, Any]:
    """The state of both generators, seeded for this rank from the common state. Changes the generators."""
    seed = offset(hash(state[0][1][:8]), rank)
    random.seed(seed)
    if state[1] is not None:
        _numpy().seed(seed % 2**32)
    return _state()


def _same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    if a[0] != b[0] or (a[1] is None) != (b[1] is None):
        return False
    return a[1] is None or bool(a[1][2] == b[1][2] and (a[1][1] == b[1][1]).all())


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
