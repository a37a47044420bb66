"""Fake execution: runs a script's operators for shapes only, and reports their memory blocks.

The lower layer is torch's FakeTensorMode, which answers each operator with tensors that have shape, dtype and
device, but no memory. The upper layer is a mode of flatout. It replaces real tensors of the script
(parameters, data) by fake counterparts, so that nothing is written into them. It counts storages as they are
created and freed. It answers queries for values (known_values.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.known_values import KnownValues
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage


# Measures the workspaces of convolutions on a CPU.
#
# OneDNN reorders tensors and sums weight gradients per thread. It decides how much memory that takes; no shape
# tells it. So each convolution of a step is really run with two and with four samples, all in one allocator
# recording. The memory beyond its results is linear in the number of samples (a single sample is handled
# differently).

MEASURED_SAMPLES = (2, 4)
RECORD_PREFIX = "flatout: workspace "


class Workspaces:
    """Workspace sizes.

    ``bytes_of`` returns the bytes of a call, if known; ``measure`` runs the calls that were unknown.
    """

    def __init__(self, torch: ModuleType) -> None:
        aten = torch.ops.aten
        self.torch = torch
        # the arguments with one sample per row
        self._batched_args = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
        self._fits: dict[Any, tuple[float, float]] = {}  # call -> constant bytes, bytes per sample
        self._unmeasured: dict[Any, tuple[Any, list[Any]]] = {}

    def bytes_of(self, function: object, args: Sequence[Any]) -> int:
        batched = self._batched_args.get(function)
        if batched is None or args[batched[0]].device.type != "cpu" or not args[batched[0]].shape[0]:
            return 0
        samples = args[batched[0]].shape[0]
        call = (function, *(self._hashable(arg, i in batched) for i, arg in enumerate(args)))
        if call not in self._fits:
            self._unmeasured.setdefault(
                call, (function, [self._spec_of(arg, i in batched) for i, arg in enumerate(args)])
            )
            return 0
        fixed, per_sample = self._fits[call]
        return max(0, round(fixed + per_sample * samples))

    def _hashable(self, arg: object, has_samples: bool) -> Any:
        return (
            self._spec_of(arg, has_samples)
            if isinstance(arg, self.torch.Tensor)
            else tuple(arg)
            if isinstance(arg, list)
            else arg
        )

    def _spec_of(self, arg: object, has_samples: bool) -> Any:
        if not isinstance(arg, self.torch.Tensor):
            return arg
        channels_last = (
            arg.dim() == 4
            and not arg.is_contiguous()
            and arg.is_contiguous(memory_format=self.torch.channels_last)
        )
        return _TensorSpec(
            tuple(arg.shape[1:] if has_samples else arg.shape), has_samples, arg.dtype, channels_last
        )

    def measure(self) -> None:
        """Run the unknown calls; call it with dispatch modes off.

        The random state is unchanged: all inputs are zero.
        """
        if not self._unmeasured:
            return
        torch, unmeasured = self.torch, list(self._unmeasured.items())
        self._unmeasured = {}
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        with torch.no_grad(), profile:
            for i, (_, (function, args)) in enumerate(unmeasured):
                for samples in MEASURED_SAMPLES:
                    inputs = [
                        arg.zeros(torch, samples) if isinstance(arg, _TensorSpec) else arg for arg in args
                    ]
                    with torch.profiler.record_function(f"{RECORD_PREFIX}{i} {samples}"):
                        result = function(*inputs)
                    del result, inputs
        measured = dict(_workspace_bytes(profile.profiler.kineto_results.events()))
        for i, (call, _) in enumerate(unmeasured):
            small, large = (measured.get((i, samples), 0) for samples in MEASURED_SAMPLES)
            per_sample = max(0.0, (large - small) / (MEASURED_SAMPLES[1] - MEASURED_SAMPLES[0]))
            self._fits[call] = (small - per_sample * MEASURED_SAMPLES[0], per_sample)


class _TensorSpec(tuple[Any, ...]):
    """(shape, whether samples come before it, dtype, channels last)"""

    def __new__(cls, *parts: object) -> _TensorSpec:
        return super().__new__(cls, parts)

    def zeros(self, torch: ModuleType, samples: int) -> Any:
        shape, has_samples, dtype, channels_last = self
        tensor = torch.zeros((samples, *shape) if has_samples else shape, dtype=dtype, device="cpu")
        return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def _workspace_bytes(events: Iterable[Any]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (number of the call, samples) and the bytes that it took beyond its results, from a recording."""
    spans, allocations = [], []
    for event in events:
        if event.name() == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(RECORD_PREFIX):
            number, samples = map(int, event.name().removeprefix(RECORD_PREFIX).split())
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), (number, samples)))
    allocations.sort(key=lambda change: change[0])
    for start, end, call in spans:
        running_bytes = list(accumulate((size for ns, size in allocations if start <= ns <= end), initial=0))
        yield call, max(running_bytes) - running_bytes[-1]


# LSTMs in fake execution on a CPU, layer by layer as in oneDNN.
#
# Torch passes real tensors to oneDNN layer by layer, and decomposes the LSTM into steps otherwise. Tensors
# without memory would be decomposed, and the decomposition saves other tensors for the backward pass. So this
# module calls the layers in the same order as ``mkldnn_rnn`` (aten/src/ATen/native/mkldnn/RNN.cpp). What oneDNN
# keeps of a layer is a workspace of a size that only oneDNN knows, so a small layer is run to measure it.

MEASURED_SIZE = 16  # steps and samples of the small layer; beyond, the workspace grows linearly with both
LSTM_MODE = 2  # number of the mode (rnn_kind in ATen)


def lstm_by_layers(torch: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch._VF.lstm``.

    Shapes: input (steps, batch, features), or batch first; states (layers * directions, batch, width).
    """

    def lstm(input: Tensor, states: Any, weights: Sequence[Tensor], *rest: Any) -> Any:
        if not isinstance(states, (list, tuple)) or not _goes_to_onednn(torch, input, states):
            return original(input, states, weights, *rest)
        has_biases, layers, dropout, training, bidirectional, batch_first = rest
        directions = 2 if bidirectional else 1
        weights_per_layer = 4 if has_biases else 2
        x = (input.transpose(0, 1) if batch_first else input).contiguous()
        hidden, cells = [], []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                i = layer * directions + direction
                layer_weights = list(weights[i * weights_per_layer : (i + 1) * weights_per_layer])
                layer_weights += (
                    []
                    if has_biases
                    else [torch.zeros(layer_weights[0].shape[0], dtype=layer_weights[0].dtype)] * 2
                )
                results = torch.ops.aten.mkldnn_rnn_layer(
                    x,
                    *layer_weights,
                    states[0][i],
                    states[1][i],
                    direction == 1,
                    [],
                    LSTM_MODE,
                    states[0].shape[2],
                    layers,
                    has_biases,
                    bidirectional,
                    batch_first,
                    training,
                )
                outputs.append(results[0])
                hidden.append(results[1])
                cells.append(results[2])
            x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
            if dropout and training and layer < layers - 1:
                x = torch.dropout(x, dropout, True)
        return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cells)

    return lstm


def _goes_to_onednn(torch: ModuleType, input: Tensor, states: Sequence[Tensor]) -> bool:
    projected = states[0].shape[2] != states[1].shape[2]
    return bool(
        input.device.type == "cpu"
        and input.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not projected
        and input.numel()
    )


def workspace_bytes(torch: ModuleType, args: Sequence[Any]) -> int:
    """Return the workspace size of ``aten::mkldnn_rnn_layer``. Call it with dispatch modes off."""
    input, weights, rest = args[0], args[1:5], args[7:]
    steps, samples = input.shape[:2]
    width = args[5].shape[-1]
    few_steps, few_samples = min(MEASURED_SIZE, steps), min(MEASURED_SIZE, samples)
    tensors = [
        torch.zeros(few_steps, few_samples, input.shape[2]),
        *(torch.zeros(tuple(weight.shape)) for weight in weights),
        torch.zeros(few_samples, width),
        torch.zeros(few_samples, width),
    ]
    with torch.enable_grad():  # oneDNN keeps nothing without gradients
        measured = torch.ops.aten.mkldnn_rnn_layer(*tensors, *rest)[3].numel()
    return int(measured * (steps * samples) / (few_steps * few_samples))


# Operators that call cuBLAS on a GPU
MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"}
OnAlloc = Callable[[int, bool], Any]  # (bytes, whether a real tensor owns it) -> handle of the block
OnFree = Callable[[Any], None]


class FakeExecution:
    """Runs operators without memory.

    ``on_alloc`` gets each allocated block and returns a handle, which ``on_free`` gets back.

    ``on_matmul`` is called before each product of matrices. ``same_machine``: the script will run on this machine, so the workspaces of its kernels can be
    measured here.
    """

    def __init__(
        self,
        torch: ModuleType,
        ledger: Ledger,
        on_alloc: OnAlloc,
        on_free: OnFree,
        device_type: str,
        same_machine: bool = True,
        on_matmul: Callable[[], None] = lambda: None,
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        self.torch, self.ledger, self.on_alloc, self.on_free = torch, ledger, on_alloc, on_free
        self.on_matmul = on_matmul
        self.device_type = device_type
        self.measures_workspaces = same_machine and device_type == "cpu"
        self.fake_tensor = FakeTensor
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues(torch)
        self.workspaces = Workspaces(torch)
        self._blocks: dict[int, Any] = {}  # address of a storage, real or not -> its block
        self._fakes: dict[int, Any] = {}  # id of a real tensor -> its counterpart, while the tensor lives
        # address of a real storage -> a counterpart that keeps its fake storage alive
        self._fake_of_storage: dict[int, Any] = {}

    # -- install

    def install(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        fake_execution = self

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Callable[..., Any], types: object, args: object = (), kwargs: object = None
            ) -> Any:
                return fake_execution._dispatched(function, args, kwargs or {})

        tensor = self.torch.Tensor
        self.ledger.set(
            tensor, "numpy", _for_fake_tensors(tensor.numpy, self._array, self.fake_tensor), new=True
        )
        self.ledger.set(
            tensor, "__format__", _for_fake_tensors(tensor.__format__, self._formatted, self.fake_tensor)
        )
        self.ledger.set(self.torch._VF, "lstm", lstm_by_layers(self.torch, self.torch._VF.lstm))
        for mode in (self.fake_mode, Counting()):
            mode.__enter__()
            self.ledger.on_restore("dispatch mode", partial(mode.__exit__, None, None, None))

    @contextmanager
    def real_execution(self) -> Iterator[None]:
        """Execute everything inside for real."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            yield

    # -- operators

    def _dispatched(self, function: Any, args: Any, kwargs: Any) -> Any:
        torch = self.torch
        if function.namespace == "profiler":  # start and end of a profiler record: no tensor
            return function(*args, **kwargs)
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        leaves = [
            self._fake(leaf)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, self.fake_tensor)
            else leaf
            for leaf in leaves
        ]
        if function is torch.ops.aten._local_scalar_dense.default:
            with self.real_execution():
                return self.values.number(leaves[0])

        def rebuild(parts: list[Any]) -> Any:
            return torch.utils._pytree.tree_unflatten(parts, spec)

        with self.real_execution():
            values = self.values.compute(function, leaves, rebuild)
        if function is torch.ops.aten.equal.default:
            return values if isinstance(values, bool) else True
        if function.overloadpacket.__name__ in MATMULS:
            self.on_matmul()
        result = self._run_fake(function, leaves, rebuild, values)
        with self.real_execution():
            self.values.record_outputs(function, leaves, result, values)
        for output in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(output, self.fake_tensor):
                self._track(output, real=False)
        temporary_bytes = self.workspaces.bytes_of(function, args) if self.measures_workspaces else 0
        if temporary_bytes:
            self.on_free(self.on_alloc(temporary_bytes, False))
        return result

    def measure_workspaces(self) -> None:
        with self.real_execution():
            self.workspaces.measure()

    def _run_fake(self, function: Any, leaves: list[Any], rebuild: Callable[..., Any], values: object) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        if not function._schema.returns and function._schema.is_mutable:
            return None  # it writes into existing tensors
        args, kwargs = rebuild(leaves)
        try:
            result = function(*args, **kwargs)
            if function is self.torch.ops.aten.mkldnn_rnn_layer.default and self.torch.is_grad_enabled():
                return (*result[:3], self._workspace(args))
            return result
        except (DynamicOutputShapeException, DataDependentOutputException):
            if values is not None:
                return self.torch.utils._pytree.tree_map_only(
                    self.torch.Tensor, self.fake_mode.from_tensor, values
                )
            self.values.guesses.add("a choice of elements")
            return self._largest_result(function, args, kwargs)

    def _largest_result(self, function: Any, args: Any, kwargs: Any) -> Any:
        torch, aten = self.torch, self.torch.ops.aten
        if function is aten.nonzero.default:
            return self._empty((args[0].numel(), args[0].dim()), torch.int64)
        if function is aten.masked_select.default:
            return self._empty((torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),), args[0].dtype)
        if function is aten.index.Tensor:
            indices = []
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                indices += (
                    [self._empty((index.numel(),), torch.int64) for _ in range(index.dim())]
                    if is_mask
                    else [index]
                )
            with self.fake_mode:
                return function(args[0], indices)
        raise NotImplementedError(f"the output shape of {function._schema.name} depends on values")

    def _workspace(self, args: Sequence[Any]) -> Any:
        with self.real_execution():
            size_bytes = workspace_bytes(self.torch, args)
        return self._empty((size_bytes,), self.torch.uint8)

    def _empty(self, shape: tuple[int, ...], dtype: object) -> Any:
        with self.fake_mode:
            return self.torch.empty(shape, dtype=dtype)

    # -- storages

    def _fake(self, tensor: Tensor) -> Any:
        fake = self._fakes.get(id(tensor))
        if fake is None:
            with self.real_execution():
                fake = self.fake_mode.from_tensor(tensor)
                if self.values.worth_keeping(tensor):
                    self.values.set(fake, tensor.detach().clone())
            self._fakes[id(tensor)] = fake
            weakref.finalize(tensor, self._fakes.pop, id(tensor), None).atexit = False
            self.count_real(tensor)
            if tensor.layout == self.torch.strided:
                address = tensor.untyped_storage()._cdata
                if address not in self._fake_of_storage:
                    self._fake_of_storage[address] = fake
                    weakref.finalize(
                        tensor.untyped_storage(), self._fake_of_storage.pop, address, None
                    ).atexit = False
                self._add_block(fake.untyped_storage(), None)  # the real storage is counted already
        return fake

    def count_real(self, tensor: Tensor) -> Any:
        """Return the block of a real tensor on the device; None if it has none there."""
        if tensor.device.type != self.device_type or tensor.layout != self.torch.strided:
            return None
        return self._track(tensor, real=True)

    def block_of(self, tensor: Tensor) -> Any:
        """Return the block of a fake tensor; None for a real tensor or another device."""
        return (
            self._blocks.get(tensor.untyped_storage()._cdata)
            if isinstance(tensor, self.fake_tensor) and tensor.layout == self.torch.strided
            else None
        )

    def _track(self, tensor: Tensor, real: bool) -> Any:
        if tensor.layout != self.torch.strided or tensor.device.type != self.device_type:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._add_block(storage, self.on_alloc(storage.nbytes(), real))
        return self._blocks[storage._cdata]

    def _add_block(self, storage: UntypedStorage, block: Any) -> None:
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = block
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False

    def _freed(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is not None:
            self.on_free(block)

    # -- queries from Python

    def _array(self, tensor: Tensor, *args: object, **kwargs: object) -> Any:
        with self.real_execution():
            value = self.values.get(tensor)
            return (
                value
                if value is not None
                else self.torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
            ).numpy()

    def _formatted(self, tensor: Tensor, spec: str) -> str:
        return format(tensor.detach().item() if tensor.dim() == 0 else repr(tensor), spec)


def _for_fake_tensors(
    original: Callable[..., Any], replacement: Callable[..., Any], fake_tensor: type
) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: object, **kwargs: object) -> Any:
        return (
            replacement(tensor, *args, **kwargs)
            if isinstance(tensor, fake_tensor)
            else original(tensor, *args, **kwargs)
        )

    return call
