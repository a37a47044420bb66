"""One pass of a module recorded as a CUDA graph, and its replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree

from flatout.kernels.graph_arguments import (
    NotRecordable,
    emptied,
    filled,
    like,
    why_not_outputs,
)
from flatout.kernels.graph_capture import CaptureState, InOrder, capture, plain_grad
from flatout.kernels.graph_observation import PassObservation

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module

LEAST_FREE = 0.1  # share of the device's memory left for evaluations and other shapes
TOLERANCE = (
    1e-2  # share of the largest value: recorded kernels may round differently; other passes differ by more
)


class RecordedModule(Protocol):
    """The module that is recorded. ``eagerly`` is ``forward`` outside a recording."""

    module: Module
    device: Device
    forward: Callable[..., Any]

    def eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class RecordedPass:
    """Forward and backward pass as two graphs with shared memory.

    Raises RuntimeError or NotRecordable if they cannot be recorded.
    """

    def __init__(
        self,
        graphs: RecordedModule,
        seen: PassObservation,
        used: frozenset[int],
        inputs: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.graphs, self.seen, self.device = graphs, seen, graphs.device
        self.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.lease: weakref.ref[_Lease] | None = None
        self.order = InOrder(self.device)
        self.parameters = [p for p in graphs.module.parameters() if p.requires_grad]
        self.inputs = [like(tensor) for tensor in inputs]
        self.forward_graph, self.backward_graph, pool = (
            torch.cuda.CUDAGraph(),
            torch.cuda.CUDAGraph(),
            torch.cuda.graph_pool_handle(),
        )
        static = iter(self.inputs)
        mine = filled(args, static), filled(kwargs, static)
        torch.clear_autocast_cache()  # weights cast outside a recording are not part of it
        try:
            with _leaves_of_its_own(graphs.module) as own, capture(self.forward_graph, self.device, pool):
                found = graphs.forward(*mine[0], **mine[1])
        finally:
            torch.clear_autocast_cache()
        leaves, self.structure = _pytree.tree_flatten(found)
        if why := why_not_outputs(leaves, [*self.inputs, *self.parameters, *graphs.module.buffers()]):
            raise NotRecordable(why)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.differentiable = [at for at in self.places if leaves[at].requires_grad]
        self.used = sorted(used & set(self.differentiable))
        self.gradients = [torch.empty_like(leaves[at]) for at in self.used]
        if any(id(leaf) in own for leaf in _leaves([leaves[at] for at in self.used])):
            raise NotRecordable("reaches its weights other than through its modules")
        wanted = [
            tensor
            for tensor in (*self.inputs, *(own[id(p)] for p in self.parameters))
            if tensor.requires_grad
        ]
        with capture(self.backward_graph, self.device, pool):
            made = plain_grad()([leaves[at] for at in self.used], wanted, self.gradients, allow_unused=True)
        if any(
            each is not None and (type(each) is not torch.Tensor or each.layout != torch.strided)
            for each in made
        ):
            raise NotRecordable("has sparse gradients")
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        if free_bytes < LEAST_FREE * all_bytes:
            raise NotRecordable("leaves too little memory for the rest of the program")
        self.outputs = [leaves[at].detach() for at in self.places]
        self.made = [None if each is None else each.detach() for each in made]
        self.wanted = [tensor.requires_grad for tensor in (*self.inputs, *self.parameters)]

    @property
    def busy(self) -> bool:
        """Whether a backward pass may still need the results of the last forward pass."""
        return self.lease is not None and self.lease() is not None

    def passed(self, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the forward pass; the returned tensors belong to the script."""
        lease = _Lease(args, kwargs, generator_of(self.device))
        self.lease = weakref.ref(lease)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (lease, tensor), lambda held: held[1]):
            outputs = _Replay.apply(self, lease, len(inputs), *inputs, *self.parameters)
        leaves = list(self.leaves)
        for at, output in zip(self.places, outputs, strict=True):
            leaves[at] = output
        return _pytree.tree_unflatten(leaves, self.structure)

    def replayed(self, inputs: Iterable[Any]) -> list[Any]:
        """The outputs of a replay, in their own memory."""
        with torch.no_grad():
            moved = [(to, given) for to, given in zip(self.inputs, inputs, strict=True) if to.numel()]
            self.order.wait()
            if moved:
                torch._foreach_copy_([to for to, _ in moved], [given for _, given in moved])
            self.forward_graph.replay()
            if self.seen.written:
                torch.autograd.graph.increment_version(self.seen.written)
            return [output.clone() for output in self.outputs]

    def differentiated(self, gradients: list[Any]) -> list[Any]:
        """The gradients of inputs and parameters from those of the used outputs, in their own memory."""
        with torch.no_grad():
            self.order.wait()
            torch._foreach_copy_(self.gradients, gradients)
            self.backward_graph.replay()
            there = [each for each in self.made if each is not None]
            fresh = [torch.empty_like(each) for each in there]
            if there:
                torch._foreach_copy_(fresh, there)
        own, found = iter(fresh), iter(self.made)
        return [None if not wanted or next(found) is None else next(own) for wanted in self.wanted]


class _Lease:
    """Lives while autograd keeps the saved tensors of a forward pass.

    This lasts until its backward pass, or while the script retains the graph.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], generator: tuple[int, int]) -> None:
        self.arguments, self.generator = (emptied(args), emptied(kwargs)), generator


class _Replay(torch.autograd.Function):
    """The node of a replayed pass in the script's autograd graph.

    Arguments: the recording, its lease, the number of inputs, inputs and parameters.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, recorded: RecordedPass, lease: _Lease, count: int, *tensors: torch.Tensor
    ) -> Any:
        ctx.recorded, ctx.arguments, ctx.generator = recorded, lease.arguments, lease.generator
        ctx.done = False
        ctx.set_materialize_grads(False)
        outputs = recorded.replayed(tensors[:count])
        ctx.save_for_backward(torch.empty(0), *tensors[:count])
        ctx.mark_non_differentiable(
            *(
                output
                for at, output in zip(recorded.places, outputs, strict=True)
                if at not in recorded.differentiable
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Any:
        recorded: RecordedPass = ctx.recorded
        _, *inputs = ctx.saved_tensors
        given = {
            at: gradient
            for at, gradient in zip(recorded.places, gradients, strict=True)
            if gradient is not None
        }
        if torch.is_grad_enabled() or ctx.done or sorted(given) != recorded.used:
            return (None, None, None, *_computed_again(recorded, inputs, ctx.arguments, ctx.generator, given))
        ctx.done = True  # the replay overwrites the results of the forward pass
        return (None, None, None, *recorded.differentiated([given[at] for at in recorded.used]))


def _computed_again(
    recorded: RecordedPass,
    inputs: list[Any],
    arguments: tuple[Any, Any],
    generator: tuple[int, int],
    given: dict[int, Any],
) -> list[Any]:
    """Gradients by an eager pass with the inputs and random numbers of the replayed one.

    They are differentiable.
    """
    again, module, device, written = (
        torch.is_grad_enabled(),
        recorded.graphs.module,
        recorded.device,
        recorded.seen.written,
    )
    now, kept = generator_of(device), [buffer.clone() for buffer in written]
    static = iter(inputs)
    args, kwargs = filled(arguments[0], static), filled(arguments[1], static)
    put_back(device, generator, (), ())
    with (
        torch.enable_grad(),
        torch.autocast("cuda", enabled=recorded.autocast[0], dtype=recorded.autocast[1]),
    ):
        leaves = _pytree.tree_flatten(recorded.graphs.eagerly(args, kwargs))[0]
    put_back(device, now, written, kept)
    sources = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    places = [at for at, source in enumerate(sources) if source.requires_grad]
    at_outputs = [at for at in sorted(given) if leaves[at].requires_grad]
    found = plain_grad()(
        [leaves[at] for at in at_outputs],
        [sources[at] for at in places],
        [given[at] for at in at_outputs],
        allow_unused=True,
        create_graph=again,
    )
    every: list[Any] = [None] * len(sources)
    for at, each in zip(places, found, strict=True):
        every[at] = each
    return every


@contextmanager
def _leaves_of_its_own(module: Module) -> Iterator[dict[int, Any]]:
    """Inside, the module has other parameters in the same memory.

    It yields them by the ids of the original ones. The script's graphs of earlier steps keep nodes for its
    parameters that belong to the stream of those steps. A recording cannot contain these nodes.
    """
    own = {id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
    before: list[tuple[dict[str, Any], str, Any]] = []
    lists: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                before.append((part._parameters, name, p))
        if "_flat_weights" in vars(part):  # used by torch's recurrent layers
            flat = [own.get(id(p), p) for p in part._flat_weights]
            lists += [
                (vars(part), "_flat_weights", flat),
                (vars(part), "_flat_weight_refs", [None if p is None else weakref.ref(p) for p in flat]),
            ]
    before += [(table, name, table[name]) for table, name, _ in lists]
    for table, name, value in [
        *((table, name, own[id(p)]) for table, name, p in before if isinstance(p, torch.Tensor)),
        *lists,
    ]:
        table[name] = value
    try:
        yield own
    finally:
        for table, name, value in before:
            table[name] = value


def _leaves(outputs: list[Any]) -> Iterator[Any]:
    """The leaves of the autograd graph of these tensors."""
    waiting, seen = [output.grad_fn for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def elsewhere() -> bool:
    """Whether a recording, compiler, tracer, transform or mode is active, which must see the real pass."""
    return bool(
        CaptureState.active
        or torch.cuda.is_current_stream_capturing()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        if torch.equal(one, other):
            return True
        if not one.is_floating_point():
            return False
        a, b = one.double(), other.double()
        off = (a - b).abs().nan_to_num(nan=0.0)
        return bool(
            (a.isfinite() == b.isfinite()).all() and off.max() <= TOLERANCE * b[b.isfinite()].abs().max()
        )


def generator_of(device: Device) -> tuple[int, int]:
    """Seed and offset of the device's random generator."""
    generator = torch.cuda.default_generators[device.index]
    return generator.initial_seed(), generator.get_offset()


def put_back(device: Device, state: tuple[int, int], buffers: Iterable[Any], values: Iterable[Any]) -> None:
    generator = torch.cuda.default_generators[device.index]
    if generator.initial_seed() != state[0]:
        generator.manual_seed(state[0])
    generator.set_offset(state[1])
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)  # no new version: a pending backward pass may have saved it
