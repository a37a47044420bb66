"""Joint decisions of the ranks of one training: whether a step counts, micro-batch sizes, and when to stop.

A separate CPU group (gloo) carries two numbers per step after the backward pass. It carries one more after
the optimizer, which is asynchronous until the next step begins. Texts are exchanged only after a failure. The
group is created when the first step of the first Loop begins, so a Loop that is never iterated blocks no
rank. Its timeout is that of the training's own group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.loop.memory import OutOfMemory
from flatout.loop.rejoin import Rejoin
from flatout.schema.errors import LoopError, first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer

GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = (
    WeakKeyDictionary()
)  # by the world group: destroying it drops its groups
FINE, NO_MEMORY, ENDED = 0, 1, 2  # the maximum over ranks counts
NO_SIZE = -(2**62)


def ranks_of(torch: ModuleType, model: Module) -> LoopRanks | None:
    """The ranks that train this model: those of its DistributedDataParallel, or all ranks.

    None for a single rank, or if no CPU group is available.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.is_gloo_available()):
        return None
    parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    members = distributed.get_process_group_ranks(model.process_group if parallel else None)
    return LoopRanks(torch, members, Rejoin(torch, model) if parallel else None) if len(members) > 1 else None


def group_of(distributed: ModuleType, members: tuple[int, ...]) -> Any:
    """The CPU group that all Loops of these ranks share."""
    whole = distributed.group.WORLD
    known = GROUPS.setdefault(whole, {})
    if members not in known:
        options = getattr(
            whole._get_backend(whole.bound_device_id or whole._device_types[0]), "options", None
        )
        known[members] = distributed.new_group(
            members,
            backend="gloo",
            timeout=getattr(options, "_timeout", None),
            use_local_synchronization=True,
        )
    return known[members]


def may_exchange(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step may run collectives, so that one rank alone must not repeat it."""
    return bool(optimizer._optimizer_step_pre_hooks) or not type(optimizer).__module__.startswith(
        "torch.optim."
    )


class LoopRanks:
    """The ranks of one training.

    ``rejoin`` completes the gradient exchange for a failed rank; None if backward passes exchange nothing.
    """

    def __init__(self, torch: ModuleType, members: Sequence[int], rejoin: Rejoin | None) -> None:
        self.torch, self.members, self.rejoin = torch, list(members), rejoin
        self._group: ProcessGroup | None = None
        self._info: tuple[Any, Any] | None = None  # result of the last update: pending exchange, number

    def begin(self) -> None:
        """Call before each step. Raises LoopError if the last update failed on another rank."""
        if self._group is None:
            self._group = self._exchanged(lambda: group_of(self.torch.distributed, tuple(self.members)))
        self.settle()
        if self.rejoin is not None:
            self.rejoin.attempt_begins()

    def agree(self, failed: OutOfMemory | None) -> OutOfMemory | None:
        """Return None if this attempt succeeded on every rank, else the failure.

        The failure holds the smallest size that did not fit anywhere. A rank that ran out of memory first
        takes part in the exchange of the others. Raises LoopError if another rank ended.
        """
        if failed is not None:
            self._take_part(failed.said)
        code, size = self._largest(
            [FINE if failed is None else NO_MEMORY, NO_SIZE if failed is None else -failed.size]
        )
        if code == FINE:
            return None
        if code == ENDED:
            raise LoopError(self._words(""))
        said = failed.said if failed is not None else "on another rank"
        if self.rejoin is not None:
            self.rejoin.attempt_begins()
        return OutOfMemory(said, -size)

    def end(self, error: BaseException) -> None:
        """Tell the ranks that are about to call ``agree`` that this rank stops.

        Raises LoopError if they are unreachable.
        """
        said = f"{type(error).__name__}: {error}"
        self._take_part(said)
        self._largest([ENDED, NO_SIZE])
        self._words(said)

    def one_answer(self, answer: str, refusal: str) -> None:
        """Continue only if all ranks give the same answer.

        Raises LoopError if another rank rejected it or differs.
        """
        found = self._gathered_info([answer, refusal])
        if refusal:
            return
        for rank, (theirs, why) in zip(self.members, found, strict=True):
            if why:
                raise LoopError(f"rank {rank} cannot continue, so all ranks stop: {why}")
            if theirs != answer:
                raise LoopError(
                    f"the loss is a {answer} over samples on this rank and a {theirs} on rank {rank}: the ranks compute different losses. "
                    f'If they compute the same loss, set it explicitly, for example reduction="{answer}".'
                )

    def updated(self, error: BaseException | None) -> None:
        """Report the result of the optimizer's step, asynchronously.

        A failing rank waits until its message has arrived.
        """
        number = self.torch.tensor([FINE if error is None else ENDED], device="cpu")
        distributed = self.torch.distributed
        self._info = (
            self._exchanged(
                lambda: distributed.all_reduce(
                    number, distributed.ReduceOp.MAX, group=self._group, async_op=True
                )
            ),
            number,
        )
        if error is not None:
            self.settle(f"{type(error).__name__}: {error}")

    def settle(self, said: str = "") -> None:
        """Wait for the others' last update.

        Raises LoopError if a rank failed that is not this one (which passes ``said``).
        """
        if self._info is None:
            return
        (work, number), self._info = self._info, None
        self._exchanged(work.wait)
        if int(number) == ENDED:
            words = self._words(said)
            if not said:
                raise LoopError(words)

    def close(self) -> None:
        """Remove the hooks from the wrapper, until the next step."""
        if self.rejoin is not None:
            self.rejoin.close()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each number over all ranks."""
        return self._largest(values, self.torch.float64)

    def _largest(self, values: Sequence[Any], dtype: object = None) -> Any:
        return self._exchanged(lambda: largest(self.torch, self._group, values, dtype))

    def _words(self, said: str) -> str:
        """The errors of the ranks that ended. Collective: every rank calls it at the same point."""
        found = self._gathered_info(said)
        return "; ".join(
            f"rank {rank} has ended the training, so all ranks do: {words}"
            for rank, words in zip(self.members, found, strict=True)
            if words
        )

    def _gathered_info(self, what: object) -> list[Any]:
        found: list[Any] = self._exchanged(
            lambda: gathered_info(self.torch, self._group, len(self.members), what)
        )
        return found

    def _take_part(self, said: str) -> None:
        if self.rejoin is None:
            return
        try:
            self.rejoin.take_part()
        except Exception as error:
            raise LoopError(
                f"this rank failed ({said}) and could not complete the exchange with the other ranks ({first_line(error)}). It stops, and "
                "they stop when they notice. Resume from your last checkpoint."
            ) from None

    def _exchanged(self, exchange: Callable[[], Any]) -> Any:
        return exchanged(exchange, "resume from your last checkpoint.")


def exchanged(exchange: Callable[[], Any], otherwise: str) -> Any:
    """Run an exchange. Raises LoopError if a rank is missing; ``otherwise`` is the advice in that error."""
    try:
        return exchange()
    except RuntimeError as error:
        raise LoopError(
            f"the ranks have lost each other ({first_line(error)}): one of them has ended, or did not respond within the group's timeout. "
            f"Its own error message says why; {otherwise}"
        ) from None


def largest(torch: ModuleType, group: object, values: Sequence[Any], dtype: object = None) -> list[Any]:
    """The maximum of each number over a CPU group. Raises RuntimeError if a rank is gone."""
    numbers = torch.tensor(values, dtype=dtype, device="cpu")
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=group)
    found: list[Any] = numbers.tolist()
    return found


def gathered_info(torch: ModuleType, group: object, ranks: int, what: object) -> list[Any]:
    """Gather one JSON value from each rank of a CPU group. Raises RuntimeError if a rank is gone.

    torch's own object collectives use pickle, which executes what it receives.
    """
    data = json.dumps(what).encode()
    longest = torch.tensor(len(data), device="cpu")
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=group)
    mine = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(all_of_them, mine, group=group)
    return [json.loads(bytes(one.tolist())) for one in all_of_them]
