"""What the ranks of one program say to each other, while they are recorded, or brought to a save again.

Recorded, collectives are counted: the saves of all ranks are of one moment where each group has met equally often. Played back, no rank waits for another: what
a collective would have written has no values, and `DistributedDataParallel` is the module that it wraps. What was said before the training began is said again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from flatout.capture.ledger import Ledger
from flatout.replay.skeleton import Skeletons
from flatout.replay.tape import Tape

MET = 7  # an event
# Methods of a process group, in all versions of torch; each writes to its first argument.
MEETINGS = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced",
            "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "barrier",
            "monitored_barrier", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "gather_into_tensor", "gather_single",
            "reduce_scatter_single", "reduce_scatter_single_coalesced")
FROM_ONE_TO_ONE = ("send", "recv", "recv_anysource")
NOTHING_WRITTEN = ("barrier", "monitored_barrier")


class Collectives:
    """``counts``: of each group by its name, how often it has met."""

    def __init__(self, tape: Tape, skeletons: Skeletons, ledger: Ledger) -> None:
        self.tape, self.skeletons = tape, skeletons
        self.counts: dict[str, int] = {}
        self.begun: dict[str, int] | None = None  # as the training began
        self._under_way: list[Any] = []
        self._why_not: dict[str, None] = {}
        group = torch.distributed.ProcessGroup
        for names, heard in ((MEETINGS, self._met), (FROM_ONE_TO_ONE, self._told_one)):
            for name in names:
                if hasattr(group, name):
                    ledger.set(group, name, heard(getattr(group, name)))
        wrapper = DistributedDataParallel
        ledger.set(wrapper, "forward", self._by_itself(wrapper.forward))
        ledger.set(wrapper, "register_comm_hook", self._through_a_hook(wrapper.register_comm_hook))

    def begins(self) -> None:
        self.begun = dict(self.counts)

    def state(self) -> dict[str, Any]:
        """As JSON; equal on all ranks of a group where their saves are of one moment."""
        return {"met": dict(self.counts), "begun": dict(self.begun or {})}

    def unsound(self) -> list[str]:
        self._prune()
        return [*self._why_not, *(["its ranks are in the middle of a collective"] if self._under_way else [])]

    def _prune(self) -> None:
        self._under_way = [work for work in self._under_way if not work.is_completed()]

    def _met(self, really: Callable) -> Callable:
        tape = self.tape

        @wraps(really)
        def meet(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not tape.hears:
                return really(group, *args, **kwargs)
            tape.event(MET)
            name = group.group_name
            self.counts[name] = self.counts.get(name, 0) + 1
            if tape.going and self.begun is not None:
                if really.__name__ not in NOTHING_WRITTEN:
                    self.skeletons.lose(pytree.tree_leaves(args[0] if args else next(iter(kwargs.values()))))
                return Done()
            work = really(group, *args, **kwargs)
            if work is not None and self.begun is not None:
                self._prune()
                self._under_way.append(work)
            return work

        return meet

    def _told_one(self, really: Callable) -> Callable:
        @wraps(really)
        def tell(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self.tape.hears:
                self._why_not["its ranks send to single others"] = None
            return really(group, *args, **kwargs)

        return tell

    def _through_a_hook(self, really: Callable) -> Callable:
        """What it remembers from one backward pass to the next (PowerSGD: what it has not sent yet) nobody could put back."""
        @wraps(really)
        def register(module: Any, state: object, hook: Callable) -> None:
            if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                self._why_not["its ranks exchange gradients through a hook that has a state of its own"] = None
            really(module, state, hook)

        return register

    def _by_itself(self, really: Callable) -> Callable:
        @wraps(really)
        def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
            if not self.tape.going:
                return really(module, *inputs, **kwargs)
            if module.device_ids:  # it brings its inputs there
                place = torch.device(module.device_type, module.device_ids[0])
                inputs, kwargs = pytree.tree_map(lambda each: each.to(place) if isinstance(each, torch.Tensor) else each, (inputs, kwargs))
            return module.module(*inputs, **kwargs)

        return forward


class Done:
    """In the place of the handle of a collective that was skipped."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
