"""Detect effects of a forward pass beyond computing on its inputs, by observing one eager pass.

A recorded pass repeats its kernels and nothing else. So a pass cannot be recorded if it reads device values,
copies from the host, draws random numbers on the host, sets attributes of its modules, or changes its inputs.
Nor may it use tensors that are neither inputs, parameters, buffers nor attributes of its modules.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.kernels.graph_arguments import tensors_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


def telling_of_changes(
    set_attribute: Callable[..., None], changed: Mapping[int, Sequence[Callable[[str], None]]]
) -> Callable[..., None]:
    """A replacement for ``nn.Module.__setattr__``.

    ``changed``: callbacks for set attributes, by the id of the module. ``training`` is left out, because it
    belongs to the key of a recording.
    """

    def __setattr__(module: Module, name: str, value: object) -> None:
        if name != "training":
            for tell in changed.get(id(module), ()):
                tell(f"{type(module).__name__}.{name}")
        set_attribute(module, name, value)

    return __setattr__


class _Operators(TorchDispatchMode):
    """Detects tensors that enter a pass from outside, and operators that a recording cannot repeat."""

    def __init__(self, known: set[int], device: Device) -> None:
        super().__init__()
        self.known, self.device = (
            known,
            device,
        )  # by memory; tensors alive before the pass share none with new ones
        self.why = ""

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in READS and any(tensor.is_cuda for tensor in tensors_of((args, kwargs))):
            self._because(f"reads a value of the device ({function.overloadpacket.__name__})")
        for tensor in tensors_of((args, kwargs)):
            if tensor.device != self.device:
                if tensor.device.type == "cpu" and tensor.dim() == 0:
                    continue  # a number, which is part of the recording
                self._because(f"uses a tensor on {tensor.device}")
            elif _place(tensor) not in self.known:
                self._because("uses a tensor that is neither an input nor belongs to a module")
        made = function(*args, **kwargs)
        for tensor in tensors_of(made):
            self.known.add(_place(tensor))
            if tensor.device != self.device and tensor.dim():
                self._because(f"makes a tensor on {tensor.device}")
        return made

    def _because(self, why: str) -> None:
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
    seen, buffers = PassObservation(), list(module.buffers())
    # Compare values, too: batch normalisation kernels write running statistics without a version change.
    before = (
        _host_generators(),
        [(buffer._version, buffer.clone()) for buffer in buffers],
        [tensor._version for tensor in inputs],
        len(changes),
    )
    if operators:
        tensors = [*inputs, *module.parameters(), *buffers, *_attributes(module)]
        mode = _Operators({_place(tensor) for tensor in tensors}, device)
        with mode:
            yield seen
        seen.why = mode.why
    else:
        yield seen
    generators, of_buffers, of_inputs, changed = before
    seen.written = [
        buffer
        for buffer, (version, value) in zip(buffers, of_buffers, strict=True)
        if buffer._version != version or not torch.equal(buffer, value)
    ]
    if len(changes) > changed:
        seen.why = f"sets {changes[-1]}"
    elif _host_generators() != generators:
        seen.why = "draws random numbers on the host"
    elif [tensor._version for tensor in inputs] != of_inputs:
        seen.why = "changes its inputs"


def _host_generators() -> tuple[Any, ...]:
    """The states of the host's random generators."""
    numpy = sys.modules.get("numpy")
    drawn = (
        ()
        if numpy is None
        else tuple(
            part if isinstance(part, (str, int, float)) else part.tobytes()
            for part in numpy.random.get_state()
        )
    )
    state = torch.get_rng_state()
    return random.getstate(), ctypes.string_at(state.data_ptr(), state.numel()), drawn


def _attributes(module: Module) -> Iterator[Any]:
    """Tensors that are plain attributes of modules, such as position tables."""
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, torch.Tensor):
                yield value


def _place(tensor: Tensor) -> int:
    """The memory of a tensor. A wrapper without memory counts separately."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
