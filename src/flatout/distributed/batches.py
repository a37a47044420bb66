"""The batches of a rank: its own samples of each training batch, with their random numbers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.division import CUT, INDEX, OWN, SplitSettings
from flatout.job.rank_environment import RankEnvironment
from flatout.schema.errors import CannotParallelize

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from flatout.schema.program import Ledger, TrainingContext


# Split a batch between the ranks.
#
# Each rank takes consecutive samples; the first ranks take one more if the split is uneven. Every rank draws
# the batches of the whole program in the plain run's order and fetches only its own samples. If a batch has
# fewer samples than ranks, every rank computes all of it. It then counts on rank 0 alone, so that no rank is
# without a batch.


@dataclass(frozen=True)
class BatchShare:
    """Samples ``start`` to ``stop`` of a batch of ``samples``.

    ``weight``: its part of a mean over the batch; the weights of all ranks add up to 1."""

    samples: int
    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        return self.stop - self.start


def share(samples: int, rank: int, world: int) -> BatchShare:
    """The share of a batch for ``rank`` of ``world``."""
    if samples < world:
        return BatchShare(samples, 0, samples, 1.0 if rank == 0 else 0.0)
    base, remainder = divmod(samples, world)
    start = rank * base + min(rank, remainder)
    stop = start + base + (rank < remainder)
    return BatchShare(samples, start, stop, (stop - start) / samples)


@dataclass(frozen=True)
class Rows:
    """The location of a share's samples in a shape: ``per_sample`` entries per sample along ``dim``."""

    dim: int
    per_sample: int
    share: BatchShare

    @classmethod
    def of(cls, shape: Sequence[int], share: BatchShare) -> Rows | None:
        """The first dimension if its size matches, else the only one that matches.

        Otherwise the first one, if samples were flattened into it (heads, tokens)."""
        # The rule of agent/batches.batch_dimension plus one case; the package distributed may not import agent.
        dims = [dim for dim, size in enumerate(shape) if size == share.size]
        if dims and (dims[0] == 0 or len(dims) == 1):
            return cls(dims[0], 1, share)
        if not dims and shape and share.size > 1 and shape[0] and shape[0] % share.size == 0:
            return cls(0, shape[0] // share.size, share)
        return None

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        whole = list(shape)
        whole[self.dim] = self.share.samples * self.per_sample
        return whole

    def own_rows(self, tensor: Tensor) -> Any:
        return tensor.narrow(self.dim, self.share.start * self.per_sample, self.share.size * self.per_sample)


class SplitBatches:
    """Replaces the sampler of a DataLoader's iterator."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> SplitIterator:
        return SplitIterator(iter(self.batches), self.rank, self.world)


class SplitIterator:
    """``shares``: the shares of batches that were drawn and not yet consumed.

    Workers prefetch and deliver in order."""

    def __init__(self, batches: Iterator[Any], rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world
        self.shares: deque[BatchShare] = deque()

    def __iter__(self) -> SplitIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        part = share(len(batch), self.rank, self.world)
        self.shares.append(part)
        return batch[part.start : part.stop]


# Join a model's outputs for the shares of a batch: the script sees the whole batch's outputs on every rank.
#
# Each rank then computes the same loss. A backward pass takes from its gradient the rows of the rank's own
# share. The gradients of all ranks therefore add up to that of the whole batch, whatever the loss does with its
# samples. This requires a model that treats its samples independently.


def join_outputs(torch: ModuleType, output: object, local_share: BatchShare, world: int) -> Any:
    """``output`` with the rows of all ranks in each tensor.

    Raises CannotParallelize for a value without rows per sample, such as a loss."""
    from torch.utils._pytree import tree_map_only

    def join_tensor(tensor: Tensor) -> Any:
        rows = Rows.of(list(tensor.shape), local_share)
        if rows is None and tensor.requires_grad:
            raise CannotParallelize(
                f"its model returns a tensor of shape {list(tensor.shape)} that has no row for each sample (its own loss?)"
            )
        return tensor if rows is None else _gather_rows(torch, tensor, rows, world)

    return tree_map_only(torch.Tensor, join_tensor, output)


def _gather_rows(torch: Any, tensor: Tensor, rows: Rows, world: int) -> Any:
    sizes = [share(rows.share.samples, rank, world).size * rows.per_sample for rank in range(world)]

    class GatherRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, local: Tensor) -> Any:
            first = local.detach().movedim(rows.dim, 0).contiguous()
            padded = first
            if missing := max(sizes) - len(first):
                padded = torch.cat([first, first.new_zeros((missing, *first.shape[1:]))])
            parts = [torch.empty_like(padded) for _ in sizes]
            torch.distributed.all_gather(parts, padded)
            whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
            return whole.movedim(0, rows.dim)

        @staticmethod
        def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
            return rows.own_rows(gradient)

    return GatherRows.apply(tensor)


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
    ``own``."""

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
    a data set draws nothing in its first fetches, it is not checked again."""

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
            # also for further outputs, such as an attention's normalisers
            size = rows.whole_shape(shape)[rows.dim]
            own_rows = tree_map_only(
                tensor_class,
                lambda t: (
                    rows.own_rows(t).contiguous() if t.dim() > rows.dim and t.shape[rows.dim] == size else t
                ),
                whole,
            )
            return args[0].copy_(own_rows) if operator._schema.is_mutable else own_rows

    return WholeBatchDraws()


def _shape(arg: Any, tensor_class: Any) -> list[int] | None:
    if isinstance(arg, tensor_class):
        return list(arg.shape) or None
    is_shape = isinstance(arg, (list, tuple)) and arg and set(map(type, arg)) == {int}
    return list(arg) if is_shape else None


def _widen(arg: object, shape: list[int], rows: Rows, tensor_class: Any) -> Any:
    """A tensor for all samples with this rank's part in place, or the sizes of one.

    Only this part matters for the result."""
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
