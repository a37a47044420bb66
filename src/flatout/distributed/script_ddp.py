"""Change at run time how a script's own DistributedDataParallel exchanges gradients and buffers.

Its arguments are fixed in its *reducer*, which is made with it. This module replaces the reducer by one with
the same parameters in the same buckets, so that sums keep their order. The change happens at the start of a
forward pass whose gradients will be exchanged, before torch prepares its reducer. All ranks must request the
same before the same forward pass; each changes its request after the same step.

    gradient_as_bucket_view    a reducer made with it, after no rank kept the gradients of earlier passes
    static_graph               the same, after every rank saw one order of gradients
    another transport          a reducer with a communication hook. torch cannot remove a hook; to drop it, a
                               new reducer is made again
    fewer broadcasts           before each broadcast of buffers the ranks check whether any buffer has changed

A hook sends each bucket as flatout's own ranks do (wire.py, bucket_queue.py). Transports with several collectives
continue after the last bucket has left, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flatout.distributed.absent import OUR_HOOK, why_left_alone
from flatout.distributed.ddp_observation import HELD, Observed, Sending, buffers_of, device_of, patch
from flatout.distributed.wire import CodecKind

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from flatout.schema.program import Ledger, TrainingContext

KEEPS = "the script keeps gradients of earlier passes, which the next pass would overwrite"
CHANGES = "the order in which parameters get their gradients differs between passes"


@dataclass(frozen=True)
class DdpSettings:
    """False keeps the script's own setting. ``way``: None for torch's own averaging."""

    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    broadcast_when_changed: bool = False
    way: CodecKind | None = None


AS_IT_IS = DdpSettings()


def change(context: TrainingContext, ledger: Ledger, **wanted: Any) -> None:
    """Apply the settings to every DistributedDataParallel of the script from the next exchange on.

    Raises LookupError.

    They hold until the ledger is restored.
    """
    if why := why_left_alone(context.ddp_modules):
        raise LookupError(why)
    for ddp in context.ddp_modules:
        if ddp not in HELD:
            HELD[ddp] = ScriptDdp(context, ddp, type(ledger))
        ledger.set(HELD[ddp], "wanted", replace(HELD[ddp].wanted, **wanted))
    patch(context.torch, type(ledger))


class ScriptDdp:
    """One DistributedDataParallel: its ``wanted`` settings, and those in effect ``now``.

    ``gave_way``: the script has registered its own hook.
    """

    def __init__(
        self, context: TrainingContext, ddp: DistributedDataParallel, ledgers: Callable[[], Any]
    ) -> None:
        self.torch, self.context, self._ledgers = context.torch, context, ledgers
        self.wanted = self.now = AS_IT_IS
        self.gave_way = False
        self.hook: Callable[..., Any] | None = None
        self.parameters, self._sparse = ddp._build_params_for_reducer()
        self._names = ddp._build_debug_param_to_name_mapping(self.parameters)
        self._own_views, self._own_static = ddp.gradient_as_bucket_view, ddp.static_graph
        self._observed: Observed | None = None
        self._sending: Sending | None = None
        self._seen: list[tuple[Any, ...]] | None = None  # the buffers when they last equalled rank 0's

    @property
    def rests(self) -> bool:
        return self.gave_way or self.wanted == self.now == AS_IT_IS

    # -- at the start of a forward pass ----------------------------------------------------------------------

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        if (
            self.gave_way
            or not self.torch.is_grad_enabled()
            or not ddp.require_backward_grad_sync
            or ddp._join_config.enable
        ):
            return
        if self._sending is not None:
            self._sending.begin()
        goal = self._sound(ddp)
        if goal != self.now:
            before, self.now = self.now, goal
            self._seen = None
            if replace(goal, broadcast_when_changed=False) != replace(before, broadcast_when_changed=False):
                self._remake(ddp)

    def _sound(self, ddp: object) -> DdpSettings:
        """The settings that are safe from now on.

        Some are safe only after observed passes that show that results do not change.
        """
        wanted, observed = self.wanted, self._observed
        if not (wanted.gradient_as_bucket_view or wanted.static_graph):
            if observed is not None and not observed.complete:
                observed.close()
                self._observed = None
            return wanted
        if observed is None:
            observed = self._observed = Observed(self.parameters)
        if not observed.complete:
            observed.pass_begins()
            if observed.complete:
                self._agree(ddp, observed)
        views, static = (
            observed.verdict[name] is True for name in ("gradient_as_bucket_view", "static_graph")
        )
        return replace(
            wanted,
            gradient_as_bucket_view=wanted.gradient_as_bucket_view and views,
            static_graph=wanted.static_graph and static,
        )

    def _agree(self, ddp: DistributedDataParallel, observed: Observed) -> None:
        """Combine the observations of all ranks."""
        names = list(observed.verdict)
        info = self.torch.tensor(
            [float(observed.verdict[name] is True) for name in names], device=device_of(self.torch, ddp)
        )
        self.torch.distributed.all_reduce(info, self.torch.distributed.ReduceOp.MIN, group=ddp.process_group)
        observed.verdict = {name: bool(each) for name, each in zip(names, info.tolist(), strict=True)}
        for name, why in (("gradient_as_bucket_view", KEEPS), ("static_graph", CHANGES)):
            if getattr(self.wanted, name) and not observed.verdict[name]:
                self.context.report("ddp_flags", f"{name} is not used: {why}")

    # -- the reducer -----------------------------------------------------------------------------------------

    def _remake(self, ddp: DistributedDataParallel) -> None:
        """Make a reducer as `DistributedDataParallel.__setstate__` does, with the buckets of the old one.

        If the graph has become static, torch chooses the buckets.
        """
        ddp.reducer._rebuild_buckets()  # torch would do this in the same pass
        place = {id(p): at for at, p in enumerate(self.parameters)}
        buckets = [
            [place[id(p)] for p in bucket.parameters()]
            for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        ]
        ddp.gradient_as_bucket_view = self._own_views or self.now.gradient_as_bucket_view
        ddp.static_graph = self._own_static or self.now.static_graph
        ledger = self._ledgers()
        if self._own_static or not self.now.static_graph:
            ledger.set(
                self.torch.distributed,
                "_compute_bucket_assignment_by_size",
                lambda *about: (buckets[::-1], [ddp.bucket_bytes_cap] * len(buckets)),
            )
        try:
            ddp._ddp_init_helper(self.parameters, self._sparse, self._names, ddp.static_graph)
        finally:
            ledger.restore()
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        if not ddp.gradient_as_bucket_view:
            for p in self.parameters:
                if p.grad is not None and p.grad._is_view():  # of a bucket of the old reducer
                    p.grad = p.grad.clone()
        self._send(ddp)

    def _send(self, ddp: DistributedDataParallel) -> None:
        self._sending = self.hook = None
        if self.now.way is not None:
            wire = self.now.way.make(self.torch, self.torch.distributed.get_world_size(ddp.process_group))
            sending = self._sending = Sending(self.torch, wire, ddp.process_group, len(self.parameters))
            self.hook = lambda state, bucket: sending.leave(bucket)
            self.hook.__qualname__ = OUR_HOOK
            ddp.register_comm_hook(wire if wire.remembers else None, self.hook)
            ddp._comm_hooks.pop()  # a pickled module must not contain our hook

    def give_way(self, ddp: object) -> None:
        """The script registers a hook, and torch accepts only one."""
        if self.now != AS_IT_IS:
            self.now = AS_IT_IS
            self._remake(ddp)
        self.gave_way = True

    # -- buffers ---------------------------------------------------------------------------------------------

    @contextmanager
    def broadcast(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Skip torch's broadcast of rank 0's buffers if no rank has changed any since the last one."""
        asks = (
            self.now.broadcast_when_changed
            and ddp.will_sync_module_buffers()
            and not ddp._join_config.enable
            and not hasattr(ddp, "buffer_hook")
        )
        if asks and not self._any_changed(ddp):
            before, ddp.broadcast_buffers = ddp.broadcast_buffers, False
            try:
                yield
            finally:
                ddp.broadcast_buffers = before
            return
        yield
        if asks:
            self._seen = buffers_of(ddp)

    def _any_changed(self, ddp: DistributedDataParallel) -> bool:
        info = self.torch.tensor(
            [float(self._seen is None or buffers_of(ddp) != self._seen)], device=device_of(self.torch, ddp)
        )
        self.torch.distributed.all_reduce(info, self.torch.distributed.ReduceOp.MAX, group=ddp.process_group)
        return bool(info.item())


# -- replacements for torch's own methods --------------------------------------------------------------------
