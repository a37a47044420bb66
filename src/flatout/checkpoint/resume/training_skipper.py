"""Skips the training work of a script: backward passes, optimizer steps and functions of tensors.

While recording, nothing inside these calls is logged, because a replay does not execute them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from flatout.agent.ledger import Ledger
from flatout.checkpoint.resume.fake_operators import RESHAPING_IN_PLACE, FakeOperators
from flatout.checkpoint.resume.gradient_sources import ReplayTensor
from flatout.checkpoint.resume.value_log import ValueLog

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Function = Callable[..., Any]


class TrainingSkipper:
    """Patches the skipped functions. ``ledger``: for patches that stay after the resume point."""

    def __init__(self, value_log: ValueLog, fake_operators: FakeOperators, ledger: Ledger) -> None:
        self.value_log, self.fake_operators, self._ledger = value_log, fake_operators, ledger
        self._step_patches = Ledger()
        self._until_resume_point = Ledger()
        self._mode: Any = None  # a torch function mode that answers instead of the functions

    def install(self) -> None:
        ledger = self._ledger
        ledger.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        ledger.set(torch.autograd, "grad", self._wrap_grad(torch.autograd.grad))
        if self._step_patches.entries():
            return  # keep the patches: torch hooks a step method only once
        for kind in (getattr(torch.optim, name) for name in torch.optim.__all__):
            if (
                isinstance(kind, type)
                and issubclass(kind, Optimizer)
                and kind not in (Optimizer, torch.optim.LBFGS)
            ):
                # below torch's hooks, which are recorded
                self._step_patches.set(kind, "step", _wrap_step(kind.step, self.value_log))  # type: ignore[attr-defined]

    # -- replaying

    def replay(self, on_start: Callable[[], None]) -> None:
        """Prepare the replay; functions are answered after `start`.

        ``on_start`` is called before the first call of a module with weights."""
        ReplayTensor.on_bypass = staticmethod(self._on_bypass)  # type: ignore[method-assign]
        self._until_resume_point.set(
            torch.nn.Module, "__call__", self._wrap_module_call(torch.nn.Module.__call__, on_start)
        )
        self._until_resume_point.set(
            torch.nn.Parameter, "__deepcopy__", _without_torch_function(torch.nn.Parameter.__deepcopy__)
        )
        function = torch.autograd.Function
        self._until_resume_point.set(
            function, "apply", classmethod(self._wrap_apply(vars(function)["apply"]))
        )
        for side in ("setup_input_hook", "setup_output_hook"):  # the backward hooks of a module
            self._until_resume_point.set(torch.utils.hooks.BackwardHook, side, lambda hook, given: given)
        # profiler labels take a fifth of the time of a skipped step
        record_function = torch.autograd.profiler.record_function
        self._ledger.set(
            record_function,
            "__enter__",
            _skip_if(record_function.__enter__, lambda _: self.value_log.replaying),
        )
        self._ledger.set(
            record_function, "__exit__", _skip_if(record_function.__exit__, lambda name: name.record is None)
        )
        self._mode = self.fake_operators.mode()
        self._mode.disabled = True
        self._mode.__enter__()

    def start(self) -> None:
        self._mode.disabled = False
        _compiler("force_eager")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Execute functions normally inside this context."""
        if self._mode is None:
            yield
            return
        was_disabled, self._mode.disabled = self._mode.disabled, True
        try:
            yield
        finally:
            self._mode.disabled = was_disabled
            if self.value_log.replaying:
                _compiler("force_eager")

    def stop(self) -> None:
        """Execute functions normally from the resume point on."""
        self._mode.disabled = True
        _compiler("default")

    def uninstall(self) -> None:
        """Remove every patch of the replay. The mode may lie below modes of the script."""
        modes = []
        while (mode := torch.overrides._pop_mode()) is not self._mode:
            modes.append(mode)
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)
        self._until_resume_point.restore()

    def _on_bypass(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__.partition(".")[0]
        if not self._mode.disabled:
            if not func._schema.is_mutable:
                return self.fake_operators.answer(func, args, kwargs)
            # an in-place operation returns its target
            if type(args[0]) is ReplayTensor and name.endswith("_") and name not in RESHAPING_IN_PLACE:
                return self.fake_operators.gradient_sources.add_sources(args[0], args)
        return self.fake_operators.refuse(f"{name}() needs a tensor that the checkpoint does not hold")

    def _wrap_module_call(self, original: Function, on_start: Callable[[], None]) -> Function:
        @wraps(original)
        def call(module: Module, *args: object, **kwargs: object) -> Any:
            if (
                not self.value_log.training_began
                and self.value_log.observes
                and any(True for _ in module.parameters())
            ):
                on_start()
            return original(module, *args, **kwargs)

        return call

    def _wrap_backward(self, original: Function) -> Function:
        @wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            if not self.value_log.replaying:
                with self.value_log.unrecorded:
                    return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            wanted = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
            return self.fake_operators.gradient_sources.set_gradients(
                (tensors,) if isinstance(tensors, torch.Tensor) else tensors, wanted
            )

        return backward

    def _wrap_grad(self, original: Function) -> Function:
        @wraps(original)
        def grad(outputs: object, inputs: object, *args: object, **kwargs: object) -> Any:
            if not self.value_log.replaying:
                with self.value_log.unrecorded:
                    return original(outputs, inputs, *args, **kwargs)
            return self.fake_operators.gradient_sources.grads(outputs, inputs)

        return grad

    def _wrap_apply(self, original: Function) -> Function:
        def apply(cls: type, *args: object, **kwargs: object) -> Any:
            of_class = original.__get__(None, cls)
            if self._mode.disabled:
                return of_class(*args, **kwargs)
            with torch.no_grad():
                result = of_class(*args, **kwargs)
            return self.fake_operators.gradient_sources.add_sources(result, (*args, *kwargs.values()))

        return apply


def _compiler(stance: str) -> None:
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        torch.compiler.set_stance(stance)


def _without_torch_function(original: Function) -> Function:
    @wraps(original)
    def copy(weight: Tensor, *args: object) -> Any:
        with torch._C.DisableTorchFunction():
            return original(weight, *args)

    return copy


def _wrap_step(original: Function, value_log: ValueLog) -> Function:
    # optimizer -> number of weights that had gradients
    max_gradients: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @wraps(original)
    def step(
        optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: object, **kwargs: object
    ) -> Any:
        if not value_log.replaying:
            with value_log.unrecorded:
                return original(
                    optimizer,
                    *(() if closure is None else (_recorded_closure(closure, value_log),)),
                    *args,
                    **kwargs,
                )
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        gradients = sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if gradients > max_gradients.get(optimizer, 0):  # its state must exist, even without values
            max_gradients[optimizer] = gradients
            with value_log.unrecorded:
                original(optimizer)
        return loss

    return step


def _recorded_closure(closure: Function, value_log: ValueLog) -> Function:
    def call() -> Any:
        before, value_log.paused = value_log.paused, value_log.paused - 1
        try:
            return closure()
        finally:
            value_log.paused = before

    return call


def _skip_if(original: Function, condition: Callable[[Any], bool]) -> Function:
    @wraps(original)
    def call(thing: object, *args: object) -> Any:
        if not condition(thing):
            return original(thing, *args)
        return None if args else thing

    return call
