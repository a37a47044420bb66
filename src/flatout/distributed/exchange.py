"""The exchange of gradients: after a backward pass every rank has the average over all ranks.

Values accumulated by earlier passes are the same on every rank, so the average leaves them unchanged. A
parameter unused on some rank counts as zero there. If no rank used it, it stays without a gradient.

Buckets leave in the same order on every rank, whatever order their gradients arrive in. A bucket leaves
during the backward pass, once its gradients are complete and the earlier buckets have left. With several
optimizers, one pass touches only some parameters. The ranks then first agree on the buckets with new
gradients, and send only these.

torch's DistributedDataParallel does not fit here: it expects a module to wrap, and fails if a gradient arrives
twice in one pass, as under reentrant checkpointing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.job.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel


# How the gradients of a bucket become their mean over all ranks: one of torch's communication hooks.
#
# The same hooks serve flatout's own buckets (exchange.py) and a script's DistributedDataParallel:
#
# plain       allreduce_hook: every byte
# bf16        bf16_compress_hook: half the bytes; the exponent of float32, three digits
# fp16        fp16_compress_hook: half the bytes; four digits, from 6e-8 to 65,504
# powersgd    powerSGD_hook: two thin matrices in place of a matrix; the rest is added to the next gradient

WARM_UP_PASSES = 100  # uncompressed passes before PowerSGD; the published code has none, torch's hook 1,000
POWERSGD_RANK = 2
NO_NUMPY = "torch's PowerSGD draws its first matrices with NumPy, which is not installed"
CommHook = tuple[Any, Callable[[Any, Any], Any]]  # the state and the function that `register_comm_hook` takes


@dataclass(frozen=True)
class Transport:
    """``kind`` is a name of the table above; ``rank`` and ``after`` belong to PowerSGD.

    ``bucket_bytes``: None for one bucket of each dtype."""

    kind: str = "plain"
    rank: int = POWERSGD_RANK
    after: int = WARM_UP_PASSES
    bucket_bytes: int | None = 25 * 2**20  # the default of torch's DistributedDataParallel

    @classmethod
    def read(cls, value: Any) -> Transport:
        """Read a value that the lever ``comm_compression`` accepts."""
        return cls(**(dict(value) if isinstance(value, Mapping) else {"kind": value}))

    def hook(self, group: object = None) -> CommHook:
        """A hook with a state of its own, for a group of ranks (None: all).

        Raises LookupError for PowerSGD without NumPy."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.kind != "powersgd":
            return group, getattr(default_hooks, HOOKS[self.kind])
        if find_spec("numpy") is None:
            raise LookupError(NO_NUMPY)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.after
        )
        # torch rejects the annotation of a bucket
        return state, lambda state, bucket: powersgd_blocking(state, bucket)

    def register(self, torch: ModuleType, ddp: DistributedDataParallel) -> None:
        """Register the hook with a script's module, for the rest of its life: torch cannot remove one."""
        group = ddp.process_group if ddp.process_group is not torch.distributed.group.WORLD else None
        ddp.register_comm_hook(*self.hook(group))
        ddp._comm_hooks.pop()  # a pickled module must not contain flatout's hook


def powersgd_blocking(state: Any, bucket: Any) -> Any:
    """torch's PowerSGD, which starts its second collective on a thread of the backend.

    With several buckets under way, gloo would start them in another order on each rank, and wait forever."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


HOOKS = {"plain": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}


def compressible(torch: ModuleType, tensor: Tensor) -> bool:
    """Whether compression saves anything and keeps the sign and an imaginary part."""
    return tensor.dtype in (torch.float32, torch.float64)


CHECKED_PASSES = 2  # no bucket leaves early in these: check for gradients that arrive twice


class CannotExchange(RuntimeError):
    """The ranks of this program cannot be synchronised; the message says why."""


@dataclass(frozen=True)
class Traffic:
    """What one exchange passed to the backend on this rank.

    How often a byte crosses a link depends on the backend: a ring sends each byte nearly twice.
    ``left_early``: of the ``buckets``, those that left during the backward pass."""

    sent_bytes: int = 0
    buckets: int = 0
    left_early: int = 0


@dataclass(frozen=True)
class Bucket:
    """What torch's hooks read of a ``torch.distributed.GradBucket``, which Python cannot make."""

    number: int
    flat: Tensor
    tensors: Sequence[Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return unflatten(self.flat, self.tensors)

    def is_last(self) -> bool:
        return self.last


class Sender:
    """Sends buckets through a hook, and waits for their means."""

    def __init__(self, torch: ModuleType, transport: Transport) -> None:
        self.torch = torch
        self.hook, self.plain = transport.hook(), Transport().hook()
        self.begin()

    def begin(self) -> None:
        self.sent_bytes = 0
        self._futures: list[Any] = []

    def __len__(self) -> int:
        return len(self._futures)

    def send(self, number: int, tensors: Sequence[Tensor], last: bool) -> None:
        """``tensors``: of one dtype and device. The same ``number`` means the same parameters in each pass."""
        torch = self.torch
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            state, function = self.hook if compressible(torch, flat) else self.plain
            future = function(state, Bucket(number, flat, tensors, last))
        self.sent_bytes += bytes_of((state, function), flat)
        self._futures.append(future)

    def means(self) -> list[Any]:
        """The mean of each bucket, in the order in which they left."""
        return [future.wait() for future in self._futures]


def bytes_of(hook: CommHook, flat: Tensor) -> int:
    """The bytes of a bucket that has just been sent. PowerSGD counts them from its first compressed pass on."""
    state, function = hook
    if state is None:
        return flat.numel() * (flat.element_size() if function.__name__ == "allreduce_hook" else 2)
    sent: int = state.total_numel_after_compression
    state.total_numel_after_compression = 0
    return (sent or flat.numel()) * flat.element_size()


class Exchange:
    """``parameters`` are in the same order on every rank.

    ``by_optimizer``: each backward pass touches only some of them."""

    def __init__(
        self,
        torch: ModuleType,
        env: RankEnvironment,
        parameters: Sequence[Any],
        by_optimizer: bool,
        transport: Transport,
    ) -> None:
        self.torch, self.env, self.by_optimizer = torch, env, by_optimizer
        self.parameters = list(parameters)
        self.transport, self.sender = transport, Sender(torch, transport)
        self.passes = 0
        self.may_leave_early = not by_optimizer
        self.arrivals: Counter[int] = Counter()
        self.traffic = Traffic()  # of the last pass
        self.buckets = buckets_of(self.parameters, transport.bucket_bytes)
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self._missing_count: list[int] = []  # number of gradients per bucket
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Remove the gradient hooks."""
        for hook in self._hooks:
            hook.remove()

    # -- while the backward pass runs

    def begin(self) -> None:
        self.passes += 1
        self.arrivals.clear()
        self.sender.begin()
        self._missing_count = [len(bucket) for bucket in self.buckets]

    def _on_gradient(self, index: int, parameter: Parameter) -> None:
        self.arrivals[index] += 1
        number = self.bucket_of[index]
        if self.arrivals[index] > 1:
            if number < len(self.sender):
                raise CannotExchange(
                    "a gradient arrived twice in one backward pass, after it was sent (a block that is recomputed twice?)"
                )
            self.may_leave_early = False
            return
        self._missing_count[number] -= 1
        if self.may_leave_early and self.passes > CHECKED_PASSES:
            while len(self.sender) < len(self.buckets) and not self._missing_count[len(self.sender)]:
                self._send(len(self.sender), len(self.buckets) - 1)

    def _send(self, number: int, last: int) -> None:
        self.sender.send(number, [self._gradient(index) for index in self.buckets[number]], number == last)

    def _gradient(self, index: int) -> Any:
        parameter = self.parameters[index]
        if parameter.grad is None:
            return parameter.detach().new_zeros(parameter.shape)
        if parameter.grad.layout != self.torch.strided:
            raise CannotExchange(
                "its gradients are sparse (an embedding with sparse=True), and flatout cannot exchange sparse gradients"
            )
        return parameter.grad.detach()

    # -- after it

    def average(self, values: Sequence[Any]) -> list[Any]:
        """Average gradients in place, and scalar tensors, which are returned in float32 or better.

        Raises CannotExchange."""
        left_early = len(self.sender)
        numbers = self._updated_buckets() if self.by_optimizer else list(range(len(self.buckets)))
        for number in numbers[left_early:]:
            self._send(number, numbers[-1])
        extra = self._flags_and_values(values)
        work = self.torch.distributed.all_reduce(extra, async_op=True)
        means = self.sender.means()
        work.wait()
        used = extra[len(values) :]
        with self.torch.no_grad():
            for number, flat in zip(numbers, means, strict=True):
                self._write_back(self.buckets[number], flat, used)
        self.traffic = Traffic(self.sender.sent_bytes, len(means), left_early)
        return list(extra[: len(values)] / self.env.world_size)

    def _updated_buckets(self) -> list[int]:
        if not self.parameters:
            return []
        local = {self.bucket_of[index] for index in self.arrivals}
        flags = self.torch.tensor(
            [float(number in local) for number in range(len(self.buckets))], device=self.parameters[0].device
        )
        self.torch.distributed.all_reduce(flags)
        return [number for number, flag in enumerate(flags.tolist()) if flag]

    def _flags_and_values(self, values: Sequence[Any]) -> Any:
        torch = self.torch
        device = next((tensor.device for tensor in (*self.parameters, *values)), torch.device("cpu"))
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        has_gradient = [float(parameter.grad is not None) for parameter in self.parameters]
        return torch.cat(
            [
                *(value.detach().to(device, dtype).reshape(1) for value in values),
                torch.tensor(has_gradient, dtype=dtype, device=device),
            ]
        )

    def _write_back(self, bucket: Sequence[int], flat: Tensor, used: Tensor) -> None:
        parameters = [self.parameters[index] for index in bucket]
        for index, parameter, mean in zip(bucket, parameters, unflatten(flat, parameters), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif float(used[index]) > 0:
                parameter.grad = mean.clone()


def buckets_of(parameters: Sequence[Any], max_bytes: int | None) -> list[list[int]]:
    """Group parameters into buckets of one dtype and device, of about ``max_bytes`` each.

    The last layers come first. With ``most_bytes=None`` there is one bucket per dtype and device. Returns
    indices."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[Any, Any], tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, bucket_bytes = open_buckets.get(key, ([], 0))
        if not bucket or (max_bytes is not None and bucket_bytes + size > max_bytes):
            bucket, bucket_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[key] = (bucket, bucket_bytes + size)
    return buckets


def unflatten(flat: Tensor, tensors: Sequence[Any]) -> list[Any]:
    """Views of ``flat`` in the shapes of the tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]


def same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
