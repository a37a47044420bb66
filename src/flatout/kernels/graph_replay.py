"""One pass of a module recorded as a CUDA graph, and its replay."""

import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import device as Device
from torch.autograd.function import FunctionCtx
from torch.nn import Module
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.kernels.graph_recording import (
    Arguments,
    CaptureState,
    NotRecordable,
    StreamOrder,
    capture,
    copy_leaf,
    tensors_of,
    unwrapped_grad,
    why_not_copyable,
    with_tensors,
    without_tensors,
)

# Detect effects of a forward pass beyond computing on its inputs, by observing one eager pass.
#
# A recorded pass repeats its kernels and nothing else. So a pass cannot be recorded if it reads device values,
# copies from the host, draws random numbers on the host, sets attributes of its modules, or changes its inputs.
# Nor may it use tensors that are neither inputs, parameters, buffers nor attributes of its modules.

DEVICE_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


def reporting_setattr(
    set_attribute: Callable[..., None], callbacks: Mapping[int, Sequence[Callable[[str], None]]]
) -> Callable[..., None]:
    """A replacement for ``nn.Module.__setattr__``.

    ``callbacks``: for set attributes, by the id of the module. ``training`` is left out, because it belongs to
    the key of a recording.
    """

    def __setattr__(module: Module, name: str, value: object) -> None:
        if name != "training":
            for callback in callbacks.get(id(module), ()):
                callback(f"{type(module).__name__}.{name}")
        set_attribute(module, name, value)

    return __setattr__


class _OperatorObserver(TorchDispatchMode):
    def __init__(self, known_memory: set[int], device: Device) -> None:
        super().__init__()
        # Tensors alive before the pass share no memory with new ones.
        self.known_memory, self.device = known_memory, device
        self.why = ""

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DEVICE_READS and any(tensor.is_cuda for tensor in tensors_of((args, kwargs))):
            self._set_reason(f"reads a value of the device ({function.overloadpacket.__name__})")
        for tensor in tensors_of((args, kwargs)):
            if tensor.device != self.device:
                if tensor.device.type == "cpu" and tensor.dim() == 0:
                    continue  # a number, which is part of the recording
                self._set_reason(f"uses a tensor on {tensor.device}")
            elif _memory_key(tensor) not in self.known_memory:
                self._set_reason("uses a tensor that is neither an input nor belongs to a module")
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            self.known_memory.add(_memory_key(tensor))
            if tensor.device != self.device and tensor.dim():
                self._set_reason(f"makes a tensor on {tensor.device}")
        return result

    def _set_reason(self, why: str) -> None:
        self.why = self.why or why


class PassObservation:
    """The observations: ``why`` a pass cannot be recorded ("" if it can), and the buffers it writes."""

    def __init__(self) -> None:
        self.why = ""
        self.written: list[Any] = []


@contextmanager
def observe_pass(
    module: Module, inputs: Sequence[Any], device: Device, changes: list[str], operators: bool
) -> Iterator[PassObservation]:
    """Observe the body, one eager forward pass.

    ``changes``: attributes set on modules so far, appended live. ``operators``: whether to observe each
    operator as well.
    """
    observation, buffers = PassObservation(), list(module.buffers())
    generators, change_count = _host_generators(), len(changes)
    # Compare values, too: batch normalisation kernels write running statistics without a version change.
    buffer_states = [(buffer._version, buffer.clone()) for buffer in buffers]
    input_versions = [tensor._version for tensor in inputs]
    if operators:
        tensors = [*inputs, *module.parameters(), *buffers]
        tensors += tensors_of([list(vars(part).values()) for part in module.modules()])
        with _OperatorObserver({_memory_key(tensor) for tensor in tensors}, device) as observer:
            yield observation
        observation.why = observer.why
    else:
        yield observation
    observation.written = [
        buffer
        for buffer, (version, value) in zip(buffers, buffer_states, strict=True)
        if buffer._version != version or not torch.equal(buffer, value)
    ]
    if len(changes) > change_count:
        observation.why = f"sets {changes[-1]}"
    elif _host_generators() != generators:
        observation.why = "draws random numbers on the host"
    elif [tensor._version for tensor in inputs] != input_versions:
        observation.why = "changes its inputs"


def _host_generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    numpy_state = [numpy.asarray(part).tolist() for part in numpy.random.get_state()] if numpy else []
    return random.getstate(), torch.get_rng_state().tolist(), numpy_state


def _memory_key(tensor: Tensor) -> int:
    """The memory of a tensor. A wrapper without memory counts separately."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


MIN_FREE_SHARE = 0.1  # share of the device's memory left for evaluations and other shapes
# Share of the largest value: recorded kernels may round differently; other passes differ by more.
TOLERANCE = 1e-2


class RecordedPass:
    """Forward and backward pass as two graphs with shared memory.

    ``graphs`` is the `ModuleGraphs`. Raises RuntimeError or NotRecordable if they cannot be recorded.
    """

    def __init__(
        self,
        graphs: Any,
        observation: PassObservation,
        used_outputs: frozenset[int],
        inputs: list[Any],
        call: Arguments,
    ) -> None:
        self.graphs, self.observation, self.device = graphs, observation, graphs.device
        self.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.lease: weakref.ref[_Lease] | None = None
        self.order = StreamOrder(self.device)
        self.parameters = [p for p in graphs.module.parameters() if p.requires_grad]
        self.inputs = [copy_leaf(tensor) for tensor in inputs]
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        args, kwargs = with_tensors(call, iter(self.inputs))
        torch.clear_autocast_cache()  # weights cast outside a recording are not part of it
        try:
            with (
                _temporary_parameters(graphs.module) as temporary,
                capture(self.forward_graph, self.device, pool),
            ):
                result = graphs.forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()
        leaves, self.structure = _pytree.tree_flatten(result)
        if why := why_not_copyable(leaves, [*self.inputs, *self.parameters, *graphs.module.buffers()]):
            raise NotRecordable(why)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.differentiable = [i for i in self.tensor_indices if leaves[i].requires_grad]
        self.used_outputs = sorted(used_outputs & set(self.differentiable))
        self.grads_in = [torch.empty_like(leaves[i]) for i in self.used_outputs]
        if any(id(leaf) in temporary for leaf in _graph_leaves([leaves[i] for i in self.used_outputs])):
            raise NotRecordable("reaches its weights other than through its modules")
        differentiated = [
            tensor
            for tensor in (*self.inputs, *(temporary[id(p)] for p in self.parameters))
            if tensor.requires_grad
        ]
        with capture(self.backward_graph, self.device, pool):
            grads_out = unwrapped_grad()(
                [leaves[i] for i in self.used_outputs], differentiated, self.grads_in, allow_unused=True
            )
        if any(
            grad is not None and (type(grad) is not torch.Tensor or grad.layout != torch.strided)
            for grad in grads_out
        ):
            raise NotRecordable("has sparse gradients")
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        if free_bytes < MIN_FREE_SHARE * all_bytes:
            raise NotRecordable("leaves too little memory for the rest of the program")
        self.outputs = [leaves[i].detach() for i in self.tensor_indices]
        self.grads_out = [None if grad is None else grad.detach() for grad in grads_out]
        self.needs_grad = [tensor.requires_grad for tensor in (*self.inputs, *self.parameters)]

    @property
    def busy(self) -> bool:
        """Whether a backward pass may still need the results of the last forward pass."""
        return self.lease is not None and self.lease() is not None

    def run(self, inputs: list[Any], call: Arguments) -> Any:
        """Replay the forward pass; the returned tensors belong to the script."""
        lease = _Lease(without_tensors(call), generator_state(self.device))
        self.lease = weakref.ref(lease)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (lease, tensor), lambda held: held[1]):
            outputs = _Replay.apply(self, lease, len(inputs), *inputs, *self.parameters)
        leaves = list(self.leaves)
        for i, output in zip(self.tensor_indices, outputs, strict=True):
            leaves[i] = output
        return _pytree.tree_unflatten(leaves, self.structure)

    def replay_forward(self, inputs: Iterable[Any]) -> list[Any]:
        """The outputs of a replay, in their own memory."""
        with torch.no_grad():
            copies = [pair for pair in zip(self.inputs, inputs, strict=True) if pair[0].numel()]
            self.order.wait()
            if copies:
                torch._foreach_copy_(*map(list, zip(*copies, strict=True)))
            self.forward_graph.replay()
            if self.observation.written:
                torch.autograd.graph.increment_version(self.observation.written)
            return [output.clone() for output in self.outputs]

    def replay_backward(self, output_grads: list[Any]) -> list[Any]:
        """The gradients of inputs and parameters from those of the used outputs, in their own memory."""
        with torch.no_grad():
            self.order.wait()
            torch._foreach_copy_(self.grads_in, output_grads)
            self.backward_graph.replay()
            static_grads = [grad for grad in self.grads_out if grad is not None]
            grads = [torch.empty_like(grad) for grad in static_grads]
            if static_grads:
                torch._foreach_copy_(grads, static_grads)
        remaining, recorded = iter(grads), iter(self.grads_out)
        return [
            None if not needs_grad or next(recorded) is None else next(remaining)
            for needs_grad in self.needs_grad
        ]


class _Lease:
    """Lives while autograd keeps the saved tensors of a forward pass.

    This lasts until its backward pass, or while the script retains the graph.
    """

    def __init__(self, call: Arguments, generator: tuple[int, int]) -> None:
        self.call, self.generator = call, generator


class _Replay(torch.autograd.Function):
    """The node of a replayed pass in the script's autograd graph.

    Arguments: the recording, its lease, the number of inputs, inputs and parameters.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, recorded: RecordedPass, lease: _Lease, count: int, *tensors: torch.Tensor
    ) -> Any:
        ctx.recorded, ctx.call, ctx.generator = recorded, lease.call, lease.generator
        ctx.done = False
        ctx.set_materialize_grads(False)
        outputs = recorded.replay_forward(tensors[:count])
        ctx.save_for_backward(torch.empty(0), *tensors[:count])
        ctx.mark_non_differentiable(
            *(
                output
                for i, output in zip(recorded.tensor_indices, outputs, strict=True)
                if i not in recorded.differentiable
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> Any:
        recorded: RecordedPass = ctx.recorded
        _, *inputs = ctx.saved_tensors
        output_grads = {
            i: grad for i, grad in zip(recorded.tensor_indices, grads, strict=True) if grad is not None
        }
        if torch.is_grad_enabled() or ctx.done or sorted(output_grads) != recorded.used_outputs:
            input_grads = _recompute_gradients(recorded, inputs, ctx.call, ctx.generator, output_grads)
        else:
            ctx.done = True  # the replay overwrites the results of the forward pass
            input_grads = recorded.replay_backward([output_grads[i] for i in recorded.used_outputs])
        return None, None, None, *input_grads


def _recompute_gradients(
    recorded: RecordedPass,
    inputs: list[Any],
    call: Arguments,
    generator: tuple[int, int],
    output_grads: dict[int, Any],
) -> list[Any]:
    """Gradients by an eager pass with the inputs and random numbers of the replayed one.

    They are differentiable.
    """
    create_graph, device, written = torch.is_grad_enabled(), recorded.device, recorded.observation.written
    current_state, saved = generator_state(device), [buffer.clone() for buffer in written]
    restore_state(device, generator, (), ())
    with (
        torch.enable_grad(),
        torch.autocast("cuda", enabled=recorded.autocast[0], dtype=recorded.autocast[1]),
    ):
        leaves = _pytree.tree_flatten(recorded.graphs.run_eagerly(with_tensors(call, iter(inputs))))[0]
    restore_state(device, current_state, written, saved)
    sources = [*inputs, *recorded.parameters]
    source_indices = [i for i, source in enumerate(sources) if source.requires_grad]
    output_indices = [i for i in sorted(output_grads) if leaves[i].requires_grad]
    result = unwrapped_grad()(
        [leaves[i] for i in output_indices],
        [sources[i] for i in source_indices],
        [output_grads[i] for i in output_indices],
        allow_unused=True,
        create_graph=create_graph,
    )
    grads: list[Any] = [None] * len(sources)
    for i, grad in zip(source_indices, result, strict=True):
        grads[i] = grad
    return grads


@contextmanager
def _temporary_parameters(module: Module) -> Iterator[dict[int, Any]]:
    """Inside, the module has other parameters in the same memory.

    It yields them by the ids of the original ones. The script's graphs of earlier steps keep nodes for its
    parameters that belong to the stream of those steps. A recording cannot contain these nodes.
    """
    temporary = {
        id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()
    }
    originals: list[tuple[dict[str, Any], str, Any]] = []
    weight_lists: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                originals.append((part._parameters, name, p))
        if "_flat_weights" in vars(part):  # used by torch's recurrent layers
            flat = [temporary.get(id(p), p) for p in part._flat_weights]
            weight_lists += [
                (vars(part), "_flat_weights", flat),
                (vars(part), "_flat_weight_refs", [None if p is None else weakref.ref(p) for p in flat]),
            ]
    originals += [(table, name, table[name]) for table, name, _ in weight_lists]
    for table, name, value in [
        *((table, name, temporary[id(p)]) for table, name, p in originals if isinstance(p, torch.Tensor)),
        *weight_lists,
    ]:
        table[name] = value
    try:
        yield temporary
    finally:
        for table, name, value in originals:
            table[name] = value


def _graph_leaves(outputs: list[Any]) -> Iterator[Any]:
    pending, visited = [output.grad_fn for output in outputs], set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [next_node for next_node, _ in node.next_functions]


def must_run_eagerly() -> bool:
    """Whether a recording, compiler, tracer, transform or mode is active, which must see the real pass."""
    return bool(
        CaptureState.active
        or torch.cuda.is_current_stream_capturing()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def nearly_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    with torch.no_grad():
        if torch.equal(left, right):
            return True
        if not left.is_floating_point():
            return False
        a, b = left.double(), right.double()
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite) or not torch.equal(
            a[~finite].nan_to_num(), b[~finite].nan_to_num()
        ):
            return False
        a, b = a[finite], b[finite]
        return not b.numel() or bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def generator_state(device: Device) -> tuple[int, int]:
    """Seed and offset of the device's random generator."""
    generator = torch.cuda.default_generators[device.index]
    return generator.initial_seed(), generator.get_offset()


def restore_state(
    device: Device, state: tuple[int, int], buffers: Iterable[Any], values: Iterable[Any]
) -> None:
    generator = torch.cuda.default_generators[device.index]
    if generator.initial_seed() != state[0]:
        generator.manual_seed(state[0])
    generator.set_offset(state[1])
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)  # no new version: a pending backward pass may have saved it
