"""PowerSGD: send a matrix as two thin ones, and add the rest to the next gradient.

For a gradient M (n by m, its first dimension against all others) and a thin Q that every rank has:

    P = mean of M Q, made orthonormal
    Q = mean of M'P
    all ranks use P Q', and each rank adds M - P Q' to its next M

Q starts from its last value (warm start), so P converges to the dominant directions over the passes. Vectors,
and matrices that would save less than half, are sent uncompressed together with the Ps; so is everything in
the first passes.

torch has a hook for DistributedDataParallel that does this
(torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook), and the tests compare this file with it. That
hook chains its collectives by callbacks, which gloo runs on its own threads: with several buckets in transit,
ranks would start them in different orders. Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical
Low-Rank Gradient Compression for Distributed Optimization".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.wire import CodecKind, PlainCodec, Sending, Start, wide

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

SEED = 714
SAVING = 2.0  # as torch's min_compression_rate
AFTER = 100  # passes; the published code compresses from the first one, torch's hook after 1,000


class PowerSGD:
    """A PowerSGD wire.

    ``after`` passes are sent uncompressed. A matrix is compressed if that reduces its numbers ``saving``-fold
    or more.
    """

    lossy = remembers = True

    def __init__(
        self, torch: ModuleType, world: int, rank: int, after: int = AFTER, saving: float = SAVING
    ) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.torch, self.world, self.rank, self.after, self.saving = torch, world, rank, after, saving
        self.passes = WeakTensorKeyDictionary()  # by the first parameter of a bucket
        self.queries = WeakTensorKeyDictionary()  # Q, the same on every rank
        self.errors = WeakTensorKeyDictionary()  # the part that this rank has not sent yet
        self._draw = random.Random(SEED)  # equal on every rank; the program's own random numbers are not used

    def send(self, flat: Tensor, parameters: Sequence[Any], start: Start) -> Sending:
        done = self.passes[parameters[0]] = self.passes.get(parameters[0], 0) + 1
        pieces = [
            flat[begin : begin + p.numel()] for p, begin in zip(parameters, _begins(parameters), strict=True)
        ]
        thin = [
            (p, piece.view(p.shape[0], -1))
            for p, piece in zip(parameters, pieces, strict=True)
            if self._saves(p)
        ]
        if done <= self.after or not thin or not wide(self.torch, flat):
            return (yield from PlainCodec(self.torch, self.world).send(flat, parameters, start))
        for p, matrix in thin:
            if p in self.errors:
                matrix.add_(self.errors[p])
        rest = [piece for p, piece in zip(parameters, pieces, strict=True) if not self._saves(p)]
        first = _Packed(self.torch, [*(matrix @ self._query(p, matrix) for p, matrix in thin), *rest])
        yield start(first.flat)
        first.flat.div_(self.world)
        means = first.parts
        bases = [self.torch.linalg.qr(mean).Q for mean in means[: len(thin)]]
        second = _Packed(
            self.torch, [matrix.t() @ basis for (_, matrix), basis in zip(thin, bases, strict=True)]
        )
        yield start(second.flat)
        second.flat.div_(self.world)
        for (p, matrix), basis, query in zip(thin, bases, second.parts, strict=True):
            taken = basis @ query.t()
            self.errors[p] = matrix - taken
            self.queries[p] = query.clone()
            matrix.copy_(taken)
        for piece, mean in zip(rest, means[len(thin) :], strict=True):
            piece.copy_(mean)
        return flat

    def _saves(self, parameter: Parameter) -> bool:
        if parameter.dim() < 2:
            return False
        n, m = parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
        return bool((n + m) * min(n, m, self.rank) * self.saving < n * m)

    def _query(self, parameter: Parameter, matrix: Tensor) -> Any:
        if parameter not in self.queries:
            columns = min(*matrix.shape, self.rank)
            drawn = [[self._draw.gauss(0.0, 1.0) for _ in range(columns)] for _ in range(matrix.shape[1])]
            self.queries[parameter] = self.torch.tensor(drawn, dtype=matrix.dtype, device=matrix.device)
        return self.queries[parameter]


def way(rank: int, after: int) -> CodecKind:
    return CodecKind(
        f"powersgd rank {rank} after {after}", lambda torch, world: PowerSGD(torch, world, rank, after)
    )


class _Packed:
    """Tensors concatenated in ``flat``; ``parts`` are its views in their shapes."""

    def __init__(self, torch: ModuleType, tensors: Sequence[Any]) -> None:
        self.flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = [tensor.numel() for tensor in tensors]
        self.parts = [
            part.view(tensor.shape) for part, tensor in zip(self.flat.split(sizes), tensors, strict=True)
        ]


def _begins(parameters: Sequence[Any]) -> list[int]:
    begins = [0]
    for parameter in parameters[:-1]:
        begins.append(begins[-1] + parameter.numel())
    return begins
