"""Detect effects of a forward pass beyond computing on its inputs, by observing one eager pass.

A recorded pass repeats its kernels and nothing else. So a pass cannot be recorded if it reads device values,
copies from the host, draws random numbers on the host, sets attributes of its modules, or changes its inputs.
Nor may it use tensors that are neither inputs, parameters, buffers nor attributes of its modules.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import device as Device
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.kernels.graph_recording import tensors_of

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
        tensors = [*inputs, *module.parameters(), *buffers, *_attributes(module)]
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
    numpy_state = (
        ()
        if numpy is None
        else tuple(
            part if isinstance(part, (str, int, float)) else part.tobytes()
            for part in numpy.random.get_state()
        )
    )
    state = torch.get_rng_state()
    return random.getstate(), ctypes.string_at(state.data_ptr(), state.numel()), numpy_state


def _attributes(module: Module) -> Iterator[Any]:
    for submodule in module.modules():
        for value in vars(submodule).values():
            if isinstance(value, torch.Tensor):
                yield value


def _memory_key(tensor: Tensor) -> int:
    """The memory of a tensor. A wrapper without memory counts separately."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
