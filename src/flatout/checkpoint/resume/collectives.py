"""Records and replays the communication between the ranks of a script.

While recording, collectives are counted per group. Checkpoints of all ranks belong to the same moment if the
counts of each group agree. During a replay no rank waits for another: the output of a collective is a fake
tensor, and `DistributedDataParallel` only calls the module that it wraps. Communication before training is
repeated for real.

`DistributedDataParallel` assigns gradients to buckets in the order of its first backward pass. The position
in a bucket decides in which order ranks are summed, so the buckets are restored at the resume point.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from flatout.agent.ledger import Ledger
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.value_log import ValueLog

if TYPE_CHECKING:
    from torch.nn import Module

CALLED = 7  # an event
# Methods of a process group, in all versions of torch; each writes to its first argument.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "monitored_barrier",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "gather_into_tensor",
    "gather_single",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
FROM_ONE_TO_ONE = ("send", "recv", "recv_anysource")
NOTHING_WRITTEN = ("barrier", "monitored_barrier")


class Collectives:
    """Counts and replays collectives. ``counts``: the number of collectives of each group, by name."""

    def __init__(self, value_log: ValueLog, replay_tensors: FakeOperators, ledger: Ledger) -> None:
        self.value_log, self.replay_tensors = value_log, replay_tensors
        self.counts: dict[str, int] = {}
        self.begun: dict[str, int] | None = None  # counts at the start of training
        self._under_way: list[Any] = []
        self._why_not: dict[str, None] = {}
        self._wrappers: list[weakref.ref[Any]] = []  # in the order of their first forward passes
        self._hooks: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[..., Any]]] = (
            weakref.WeakKeyDictionary()
        )
        group = torch.distributed.ProcessGroup
        for names, observed in ((COLLECTIVES, self._called), (FROM_ONE_TO_ONE, self._info_of_one)):
            for name in names:
                if hasattr(group, name):
                    ledger.set(group, name, observed(getattr(group, name)))
        wrapper = DistributedDataParallel
        ledger.set(wrapper, "forward", self._by_itself(wrapper.forward))
        ledger.set(wrapper, "register_comm_hook", self._through_a_hook(wrapper.register_comm_hook))

    def begins(self) -> None:
        self.begun = dict(self.counts)

    def met(self) -> dict[str, Any]:
        """Return the counts as JSON; ranks whose checkpoints belong together have equal counts."""
        return {"met": dict(self.counts), "begun": dict(self.begun or {})}

    def unsound(self) -> list[str]:
        self._prune()
        unsettled = any((wrapper := ref()) is not None and _may_change(wrapper) for ref in self._wrappers)
        return [
            *self._why_not,
            *(["a collective is still in progress"] if self._under_way else []),
            *(["DistributedDataParallel has not rebuilt its gradient buckets yet"] if unsettled else []),
        ]

    def place(self) -> list[list[list[int]] | None]:
        """Return the parameter numbers per bucket of each wrapper; None if it is gone or unchanged."""
        return [_buckets_of(wrapper) if (wrapper := ref()) is not None else None for ref in self._wrappers]

    def go_on(self, place: list[list[list[int]] | None]) -> None:
        for ref, buckets in zip(self._wrappers, place, strict=True):
            wrapper = ref()
            if wrapper is not None and buckets is not None:
                _rebuild(wrapper, buckets)
                if wrapper in self._hooks:
                    torch.distributed._register_comm_hook(wrapper.reducer, *self._hooks[wrapper])

    def _prune(self) -> None:
        self._under_way = [work for work in self._under_way if not work.is_completed()]

    def _called(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def meet(group: Any, *args: object, **kwargs: object) -> Any:
            if not value_log.observes:
                return really(group, *args, **kwargs)
            value_log.event(CALLED)
            name = group.group_name
            self.counts[name] = self.counts.get(name, 0) + 1
            if value_log.going and self.begun is not None:
                if really.__name__ not in NOTHING_WRITTEN:
                    self.replay_tensors.lose(
                        pytree.tree_leaves(args[0] if args else next(iter(kwargs.values())))
                    )
                return Done()
            work = really(group, *args, **kwargs)
            if work is not None and self.begun is not None:
                self._prune()
                self._under_way.append(work)
            return work

        return meet

    def _info_of_one(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def tell(group: object, *args: object, **kwargs: object) -> Any:
            if self.value_log.observes:
                self._why_not["its ranks use point-to-point communication"] = None
            return really(group, *args, **kwargs)

        return tell

    def _through_a_hook(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Record a communication hook.

        The state it keeps between backward passes cannot be restored (PowerSGD: the gradients not yet sent).
        """

        @wraps(really)
        def register(module: Module, state: object, hook: Callable[..., Any]) -> None:
            if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                self._why_not["its DistributedDataParallel communication hook has state"] = None
            self._hooks[module] = state, hook
            really(module, state, hook)

        return register

    def _by_itself(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def forward(module: Module, *inputs: object, **kwargs: object) -> Any:
            if not any(ref() is module for ref in self._wrappers):
                self._wrappers.append(weakref.ref(module))
            if not self.value_log.going:
                return really(module, *inputs, **kwargs)
            if module.device_ids:  # it moves its inputs there
                place = torch.device(module.device_type, module.device_ids[0])
                inputs, kwargs = pytree.tree_map(
                    lambda each: each.to(place) if isinstance(each, torch.Tensor) else each, (inputs, kwargs)
                )
            return module.module(*inputs, **kwargs)

        return forward


def _buckets_of(wrapper: DistributedDataParallel) -> list[list[int]] | None:
    metadata = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return (
        [[int(number) for number in bucket.split()] for bucket in metadata.split(",")] if metadata else None
    )


def _may_change(wrapper: DistributedDataParallel) -> bool:
    """Whether the buckets will be rebuilt after the next backward pass.

    With two ranks, the position in a bucket has no effect.
    """
    if torch.distributed.get_world_size(wrapper.process_group) <= 2 or (
        wrapper.find_unused_parameters and not wrapper.static_graph
    ):
        return False
    return _buckets_of(wrapper) is None


def _rebuild(wrapper: DistributedDataParallel, buckets: list[list[int]]) -> None:
    """Restore known buckets, as `DistributedDataParallel.__setstate__` does."""
    parameters, sparse = wrapper._build_params_for_reducer()
    ledger = Ledger()
    ledger.set(
        torch.distributed,
        "_compute_bucket_assignment_by_size",
        lambda *about: (buckets[::-1], [wrapper.bucket_bytes_cap] * len(buckets)),
    )
    try:
        wrapper._ddp_init_helper(
            parameters, sparse, wrapper._build_debug_param_to_name_mapping(parameters), wrapper.static_graph
        )
    finally:
        ledger.restore()
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


class Done:
    """Stands in for the work handle of a skipped collective."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
