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
from flatout.checkpoint.resume.fake_operators import FakeOperators
from flatout.checkpoint.resume.fake_tensors import ReplayTensor
from flatout.checkpoint.resume.operator_names import SHAPING
from flatout.checkpoint.resume.value_log import ValueLog

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class Skipping:
    """Patches the skipped functions. ``ledger``: for patches that stay after the resume point."""

    def __init__(self, value_log: ValueLog, replay_tensors: FakeOperators, ledger: Ledger) -> None:
        self.value_log, self.replay_tensors, self._ledger = value_log, replay_tensors, ledger
        self._steps = Ledger()
        self._until_resume_point = Ledger()
        self._mode: Any = None  # a torch function mode that answers instead of the functions

    def install(self) -> None:
        ledger = self._ledger
        ledger.set(torch.autograd, "backward", self._without_backward(torch.autograd.backward))
        ledger.set(torch.autograd, "grad", self._without_grad(torch.autograd.grad))
        if self._steps.entries():
            return  # keep the patches: torch hooks a step method only once
        for kind in (
            getattr(torch.optim, name)
            for name in torch.optim.__all__
            if isinstance(getattr(torch.optim, name), type)
        ):
            if issubclass(kind, torch.optim.Optimizer) and kind not in (
                torch.optim.Optimizer,
                torch.optim.LBFGS,
            ):
                # below torch's hooks, which are recorded
                self._steps.set(kind, "step", _without_step(kind.step, self.value_log))

    # -- replaying ------------------------------------------------------------------------------------------

    def play(self, begins: Callable[[], None]) -> None:
        """Prepare the replay; functions are answered after `starts`.

        ``begins`` is called before the first call of a module with weights.
        """
        ReplayTensor.reached = staticmethod(self._reached)  # type: ignore[method-assign]
        self._until_resume_point.set(
            torch.nn.Module, "__call__", self._begun_by(torch.nn.Module.__call__, begins)
        )
        self._until_resume_point.set(
            torch.nn.Parameter, "__deepcopy__", _for_real(torch.nn.Parameter.__deepcopy__)
        )
        function = torch.autograd.Function
        self._until_resume_point.set(
            function, "apply", classmethod(self._with_sources(vars(function)["apply"]))
        )
        for side in ("setup_input_hook", "setup_output_hook"):  # the backward hooks of a module
            self._until_resume_point.set(torch.utils.hooks.BackwardHook, side, lambda hook, given: given)
        # profiler labels take a fifth of the time of a skipped step
        named = torch.autograd.profiler.record_function
        self._ledger.set(named, "__enter__", _unless(named.__enter__, lambda _: self.value_log.going))
        self._ledger.set(named, "__exit__", _unless(named.__exit__, lambda name: name.record is None))
        self._mode = self.replay_tensors.mode()
        self._mode.off = True
        self._mode.__enter__()

    def starts(self) -> None:
        self._mode.off = False
        _compiler("force_eager")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Execute functions normally inside this context."""
        if self._mode is None:
            yield
            return
        before, self._mode.off = self._mode.off, True
        try:
            yield
        finally:
            self._mode.off = before
            if self.value_log.going:
                _compiler("force_eager")

    def stops(self) -> None:
        """Execute functions normally from the resume point on."""
        self._mode.off = True
        _compiler("default")

    def ends(self) -> None:
        """Remove every patch of the replay. The mode may lie below modes of the script."""
        above = []
        while (mode := torch.overrides._pop_mode()) is not self._mode:
            above.append(mode)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)
        self._until_resume_point.restore()

    def _reached(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle an operation on a fake tensor that bypassed the mode, e.g. from TorchScript."""
        name = func.__name__.partition(".")[0]
        if not self._mode.off:
            if not func._schema.is_mutable:
                return self.replay_tensors.answered(func, args, kwargs)
            # an in-place operation returns its target
            if type(args[0]) is ReplayTensor and name.endswith("_") and name not in SHAPING:
                return self.replay_tensors.gradient_sources.comes_from(args[0], args)
        return self.replay_tensors.refuse(f"{name}() needs a tensor that the checkpoint does not hold")

    def _begun_by(self, really: Callable[..., Any], begins: Callable[[], None]) -> Callable[..., Any]:
        @wraps(really)
        def call(module: Module, *args: object, **kwargs: object) -> Any:
            if (
                not self.value_log.began
                and self.value_log.observes
                and any(True for _ in module.parameters())
            ):
                begins()
            return really(module, *args, **kwargs)

        return call

    def _without_backward(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            if not self.value_log.going:
                with self.value_log.unrecorded:
                    return really(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            wanted = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
            return self.replay_tensors.gradient_sources.went_backward(
                (tensors,) if isinstance(tensors, torch.Tensor) else tensors, wanted
            )

        return backward

    def _without_grad(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def grad(outputs: object, inputs: object, *args: object, **kwargs: object) -> Any:
            if not self.value_log.going:
                with self.value_log.unrecorded:
                    return really(outputs, inputs, *args, **kwargs)
            return self.replay_tensors.gradient_sources.grads(outputs, inputs)

        return grad

    def _with_sources(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an autograd function: its results get the gradient sources of its inputs."""

        def apply(cls: type, *args: object, **kwargs: object) -> Any:
            of_class = really.__get__(None, cls)
            if self._mode.off:
                return of_class(*args, **kwargs)
            with torch.no_grad():
                found = of_class(*args, **kwargs)
            return self.replay_tensors.gradient_sources.comes_from(found, (*args, *kwargs.values()))

        return apply


def _compiler(stance: str) -> None:
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        torch.compiler.set_stance(stance)


def _for_real(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def copied(weight: Tensor, *args: object) -> Any:
        with torch._C.DisableTorchFunction():
            return really(weight, *args)

    return copied


def _without_step(really: Callable[..., Any], value_log: ValueLog) -> Callable[..., Any]:
    # optimizer -> number of weights that had gradients
    made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @wraps(really)
    def step(
        optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: object, **kwargs: object
    ) -> Any:
        if not value_log.going:
            with value_log.unrecorded:
                return really(
                    optimizer, *(() if closure is None else (_observed(closure, value_log),)), *args, **kwargs
                )
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        moved = sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if moved > made.get(optimizer, 0):  # its state must exist, even without values
            made[optimizer] = moved
            with value_log.unrecorded:
                really(optimizer)
        return loss

    return step


def _observed(closure: Callable[..., Any], value_log: ValueLog) -> Callable[..., Any]:
    """Wrap the closure of an optimizer step: it is the script's own code, so it is recorded."""

    def call() -> Any:
        before, value_log.paused = value_log.paused, value_log.paused - 1
        try:
            return closure()
        finally:
            value_log.paused = before

    return call


def _unless(really: Callable[..., Any], skips: Callable[[Any], bool]) -> Callable[..., Any]:
    @wraps(really)
    def call(thing: object, *args: object) -> Any:
        if not skips(thing):
            return really(thing, *args)
        return None if args else thing

    return call
