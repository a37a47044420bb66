"""The ranks of one training decide together: whether a step holds, what size micro-batches have, when all of them end.

Beside the collectives of training, a group of its own on the CPU (gloo) carries two numbers a step after the backward pass, and one after the
optimizer, which nobody waits for before the next step begins. Words are exchanged only when a rank has failed. The group is made when the first
step of the first Loop begins: a Loop that is never iterated over waits for nobody. It waits as long as the training's own group does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from flatout.loop.memory import OutOfMemory
from flatout.loop.rejoin import Rejoin
from flatout.plan.errors import LoopError

GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()  # by the whole group: one that is destroyed takes its groups along
FINE, NO_MEMORY, ENDED = 0, 1, 2  # the largest counts
NO_SIZE = -(2**62)


def ranks_of(torch: Any, model: Any) -> Ranks | None:
    """The ranks that train this model: those of its DistributedDataParallel, or all there are. None where there is one, or no group on the CPU to be had."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.is_gloo_available()):
        return None
    parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    members = distributed.get_process_group_ranks(model.process_group if parallel else None)
    return Ranks(torch, members, Rejoin(torch, model) if parallel else None) if len(members) > 1 else None


def group_of(distributed: Any, members: tuple[int, ...]) -> Any:
    """The group on the CPU that all Loops of these ranks share."""
    whole = distributed.group.WORLD
    known = GROUPS.setdefault(whole, {})
    if members not in known:
        options = getattr(whole._get_backend(whole.bound_device_id or whole._device_types[0]), "options", None)
        known[members] = distributed.new_group(members, backend="gloo", timeout=getattr(options, "_timeout", None), use_local_synchronization=True)
    return known[members]


def may_exchange(optimizer: Any) -> bool:
    """Whether ranks may meet inside the optimizer's step, which one of them alone must then not do again."""
    return bool(optimizer._optimizer_step_pre_hooks) or not type(optimizer).__module__.startswith("torch.optim.")


class Ranks:
    """``rejoin`` completes the exchange of gradients for a rank that has failed; None where a backward pass exchanges nothing by itself."""

    def __init__(self, torch: Any, members: Sequence[int], rejoin: Rejoin | None) -> None:
        self.torch, self.members, self.rejoin = torch, list(members), rejoin
        self._group: Any = None
        self._told: tuple[Any, Any] | None = None  # how the last update went: the exchange under way, and its number

    def begin(self) -> None:
        """Called before each step. Raises LoopError where the last update has failed on another rank."""
        if self._group is None:
            self._group = self._exchanged(lambda: group_of(self.torch.distributed, tuple(self.members)))
        self.settle()
        if self.rejoin is not None:
            self.rejoin.attempt_begins()

    def agree(self, failed: OutOfMemory | None) -> OutOfMemory | None:
        """None where this attempt at a step went well on every rank, else what failed, with the smallest size that did not fit anywhere.

        A rank that ran out of memory first takes part in what the others exchange. Raises LoopError where another rank has ended.
        """
        if failed is not None:
            self._take_part(failed.said)
        code, size = self._largest([FINE if failed is None else NO_MEMORY, NO_SIZE if failed is None else -failed.size])
        if code == FINE:
            return None
        if code == ENDED:
            raise LoopError(self._words(""))
        said = failed.said if failed is not None else "on another rank"
        if self.rejoin is not None:
            self.rejoin.attempt_begins()
        return OutOfMemory(said, -size)

    def end(self, error: BaseException) -> None:
        """Tell the others, who are on their way to ``agree``, that this rank ends here. Raises LoopError where they cannot be reached."""
        said = f"{type(error).__name__}: {error}"
        self._take_part(said)
        self._largest([ENDED, NO_SIZE])
        self._words(said)

    def one_answer(self, answer: str, refusal: str) -> None:
        """All ranks go on with the same answer, or none does. Raises LoopError where another rank has refused or answers otherwise."""
        found = self._told_by_all([answer, refusal])
        if refusal:
            return
        for rank, (theirs, why) in zip(self.members, found, strict=True):
            if why:
                raise LoopError(f"rank {rank} cannot go on, so no rank does: {why}")
            if theirs != answer:
                raise LoopError(f"the loss is a {answer} over samples on this rank and a {theirs} on rank {rank}: the ranks compute different losses. "
                                f'If they do not, say which it is: reduction="{answer}".')

    def updated(self, error: BaseException | None) -> None:
        """Tell the others how the optimizer's step went. Nobody waits, but for a rank that fails: its words must arrive."""
        number = self.torch.tensor([FINE if error is None else ENDED], device="cpu")
        distributed = self.torch.distributed
        self._told = self._exchanged(lambda: distributed.all_reduce(number, distributed.ReduceOp.MAX, group=self._group, async_op=True)), number
        if error is not None:
            self.settle(f"{type(error).__name__}: {error}")

    def settle(self, said: str = "") -> None:
        """Wait for what the others told of their last update. Raises LoopError where one has failed and it is not this one, which has ``said`` why."""
        if self._told is None:
            return
        (work, number), self._told = self._told, None
        self._exchanged(work.wait)
        if int(number) == ENDED:
            words = self._words(said)
            if not said:
                raise LoopError(words)

    def close(self) -> None:
        """Take the hooks off the wrapper, until the next step."""
        if self.rejoin is not None:
            self.rejoin.close()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each of these numbers over all ranks."""
        return self._largest(values, self.torch.float64)

    def _largest(self, values: Sequence[Any], dtype: Any = None) -> Any:
        return self._exchanged(lambda: largest(self.torch, self._group, values, dtype))

    def _words(self, said: str) -> str:
        """What the ranks that ended have to say; every rank calls it at the same place."""
        found = self._told_by_all(said)
        return "; ".join(f"rank {rank} has ended the training, so all ranks do: {words}" for rank, words in zip(self.members, found, strict=True) if words)

    def _told_by_all(self, what: Any) -> list[Any]:
        found: list[Any] = self._exchanged(lambda: told_by_all(self.torch, self._group, len(self.members), what))
        return found

    def _take_part(self, said: str) -> None:
        if self.rejoin is None:
            return
        try:
            self.rejoin.take_part()
        except Exception as error:
            raise LoopError(f"this rank failed ({said}) and could not take part any more in what the others exchange ({_first_line(error)}), so it ends, and "
                            "they do when they miss it: go on from your last save.") from None

    def _exchanged(self, exchange: Callable[[], Any]) -> Any:
        return exchanged(exchange, "go on from your last save.")


def exchanged(exchange: Callable[[], Any], otherwise: str) -> Any:
    """What an exchange gives. Raises LoopError where a rank is missed; ``otherwise``: what to do then."""
    try:
        return exchange()
    except RuntimeError as error:
        raise LoopError(f"the ranks have lost each other ({_first_line(error)}): one of them has ended, or was not heard of within the group's timeout. "
                        f"Its own last words say why; {otherwise}") from None


def largest(torch: Any, group: Any, values: Sequence[Any], dtype: Any = None) -> list[Any]:
    """Of each of these numbers over a group on the CPU. Raises RuntimeError where one of them has gone."""
    numbers = torch.tensor(values, dtype=dtype, device="cpu")
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=group)
    found: list[Any] = numbers.tolist()
    return found


def told_by_all(torch: Any, group: Any, ranks: int, what: Any) -> list[Any]:
    """What each rank of a group on the CPU tells at this place. As JSON: torch's own way for objects is a pickle, which runs what it is sent. Raises
    RuntimeError where one of them has gone."""
    data = json.dumps(what).encode()
    longest = torch.tensor(len(data), device="cpu")
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=group)
    mine = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(all_of_them, mine, group=group)
    return [json.loads(bytes(one.tolist())) for one in all_of_them]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
