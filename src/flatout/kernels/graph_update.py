"""The update of one optimizer as a CUDA graph.

It records the launches of the optimizer's own ``step``. The recording reads gradients from its own memory;
the gradients of the parameters are copied there before each replay. Numbers in the parameter groups are part
of a recording. A number that changes rarely, such as a learning rate between epochs, costs a new recording. A
learning rate that changes in every step is read from the device, if the optimizer's kernels support it
("fused").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import device as Device
from torch.optim import Optimizer

from flatout.kernels.graph_recording import CaptureState, StreamOrder, brief, capture

RECORDABLE = {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "ASGD", "Adagrad"}
WARMUP_STEPS = 2  # eager steps in which optimizers create their state
MIN_REPLAYS = 20  # replays that a recording should serve before another one is made


def why_not_recordable(optimizer: Optimizer) -> str:
    """Why the update of this optimizer cannot be recorded; "" if it can."""
    cls = type(optimizer)
    if (
        cls.__module__.split(".")[:2] != ["torch", "optim"]
        or cls.__name__ not in RECORDABLE
        or step_cell(cls) is None
    ):
        return f"{cls.__name__} is not an optimizer of torch whose update can be recorded"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters or any(not p.is_cuda or p.device != parameters[0].device for p in parameters):
        return "not all of its parameters are on one CUDA device"
    if cls.__name__ != "SGD" and not all(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    ):
        return f"{cls.__name__} counts its steps on the host (with fused=True it counts on the device)"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    return ""


class UpdateGraph:
    """Replaces ``optimizer.step``; ``eager_step`` is the original.

    ``why_eager`` says why the update stays eager from now on; "" if it does not.
    """

    def __init__(self, optimizer: Optimizer, eager_step: Callable[..., Any]) -> None:
        self.optimizer, self.eager_step = optimizer, eager_step
        self.device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self.step_with_hooks = torch.optim.Optimizer.profile_hook_step(self._replay)
        self.recorded: _Recorded | None = None
        self.steps = 0
        self.rates_on_device = False  # learning rates are read from the device
        self.why_eager = ""

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        if self.why_eager or closure is not None or self.steps <= WARMUP_STEPS or self._must_run_eagerly():
            return self.eager_step() if closure is None else self.eager_step(closure)
        state = _State(self.optimizer)
        if not state.recordable or not state.grads:
            return self.eager_step()
        if (self.recorded is None or not self.recorded.fits(state)) and not self._record(state):
            return self.eager_step()
        self.optimizer._opt_called = True  # as the wrapper of a learning-rate scheduler sets
        return self.step_with_hooks(self.optimizer)

    def _must_run_eagerly(self) -> bool:
        return bool(
            CaptureState.active
            or torch.cuda.is_current_stream_capturing()
            or getattr(self.optimizer, "grad_scale", None) is not None
            or getattr(self.optimizer, "found_inf", None) is not None
        )

    def _record(self, state: _State) -> bool:
        before = self.recorded
        if before is not None and 0 < before.replays < MIN_REPLAYS:
            if self.rates_on_device or before.state.key != state.key or not state.fused:
                self._stays_eager("its parameter groups change too often")
                return False
            self.rates_on_device = True
        self.recorded = None  # frees its memory for the next one
        try:
            self.recorded = _Recorded(self.optimizer, state, self.device, self.rates_on_device)
        except RuntimeError as error:
            self._stays_eager(f"its update cannot be recorded ({brief(error)})")
            return False
        return True

    def _stays_eager(self, why: str) -> None:
        self.why_eager, self.recorded = why, None

    def discard(self) -> None:
        """Free the memory of the recording."""
        self._stays_eager("the lever is off")

    def _replay(self, optimizer: Optimizer) -> None:
        assert self.recorded is not None
        self.recorded.replay()


class _State:
    """The state that a recorded update depends on.

    It consists of the parameters with gradients, the groups' numbers, and all addresses.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        self.parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        self.grads = [p.grad for p in self.parameters]
        self.rates = [group["lr"] for group in groups]
        numbers = [
            [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
            for group in groups
        ]
        self.tensors = [
            *self.parameters,
            *(
                value
                for p in self.parameters
                for value in optimizer.state[p].values()
                if isinstance(value, torch.Tensor)
            ),
        ]
        # All but the rates
        self.key = (
            numbers,
            [tensor.data_ptr() for tensor in self.tensors],
            [(grad.shape, grad.stride(), grad.dtype, grad.layout) for grad in self.grads],
        )
        self.fused = all(group.get("fused") for group in groups)
        on_device = any(
            isinstance(value, torch.Tensor)
            for group in groups
            for name, value in group.items()
            if name != "params"
        )
        self.recordable = not on_device and all(
            grad.layout == torch.strided and grad.device == p.device
            for grad, p in zip(self.grads, self.parameters, strict=True)
        )


class _Recorded:
    def __init__(self, optimizer: Optimizer, state: _State, device: Device, rates_on_device: bool) -> None:
        self.optimizer, self.state, self.rates_on_device, self.replays = optimizer, state, rates_on_device, 0
        self.order = StreamOrder(device)
        self.graph = torch.cuda.CUDAGraph()
        self.grads = [
            torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
            for grad in state.grads
        ]
        self.rates = [
            torch.tensor(float(rate), dtype=torch.float32, device=device) if rates_on_device else rate
            for rate in state.rates
        ]
        groups_before = [(group, dict(group)) for group in optimizer.param_groups]
        try:
            for p, grad in zip(state.parameters, self.grads, strict=True):
                p.grad = grad
            for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = (
                        True  # otherwise torch rejects the capture; fused kernels compute the same
                    )
            with capture(self.graph, device, torch.cuda.graph_pool_handle()):
                step_cell(type(optimizer)).cell_contents(optimizer)
        finally:
            for group, values in groups_before:
                group.update(values)
            for p, grad in zip(state.parameters, state.grads, strict=True):
                p.grad = grad

    def fits(self, state: _State) -> bool:
        """Whether this recording fits a state. Stores changed learning rates for the replay."""
        if self.state.key != state.key or not (self.rates_on_device or state.rates == self.state.rates):
            return False
        for rate, now, then in zip(self.rates, state.rates, self.state.rates, strict=True):
            if now != then:
                rate.fill_(float(now))
        self.state.rates = state.rates
        return True

    def replay(self) -> None:
        with torch.no_grad():
            self.order.wait()
            torch._foreach_copy_(self.grads, [p.grad for p in self.state.parameters])
            self.graph.replay()
            torch.autograd.graph.increment_version(self.state.tensors)
        self.replays += 1


def step_cell(cls: Any) -> Any:
    """The cell that holds the update inside torch's wrapper of ``step``; None if there is none.

    The wrapper calls the hooks. The compiler puts a wrapper of its own around torch's for some classes.
    """
    step = cls.step if getattr(cls.step, "hooked", False) else None
    while step is not None and "func" not in step.__code__.co_freevars:
        step = getattr(step, "__wrapped__", None)
    return step.__closure__[step.__code__.co_freevars.index("func")] if step is not None else None
