"""Observes a program from inside: turns what it does into the events of invariants, and sends their findings.

Everything is observed on live objects: a torch function mode sees the calls of the main thread, module hooks the
forward passes, wrappers the backward passes, optimizers, schedulers, loaders and loaded states. Compiled functions
run eagerly meanwhile. Only the first rank reports.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pkgutil
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import AfterImport
from flatout.agent.ledger import Ledger
from flatout.agent.loader_methods import wrap_loader_method
from flatout.diagnose.invariant import Clip, Invariant, line_here
from flatout.diagnose.observed_program import ObservedProgram, parameters_of
from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import rank_number
from flatout.measure.clock import seconds
from flatout.trial.channel import Channel, Hangup

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

ENTRY = "flatout.diagnose.observer:attach"
REPORT_EVERY_S = 1.0
OBSERVED_BATCHES = 8  # of a loader, whose calls are seen; those that make later ones are many, and alike
COLLECTIVES = ("all_reduce", "reduce", "broadcast")
Function = Callable[..., Any]


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    from flatout.diagnose.rules import TABLE

    die_with_parent()
    observer = Observer(torch, [rule.invariant for rule in TABLE if rule.invariant is not None])
    try:
        channel = Channel.connect(job["address"])
        channel.send({"attached": os.getpid(), "rank": os.environ.get("RANK", "0")})
    except (OSError, Hangup):
        return
    observer.report_to(channel)


class Observer:
    def __init__(self, torch: ModuleType, kinds: Iterable[type[Invariant]]) -> None:
        self.torch, self.ledger = torch, Ledger()
        self.program = ObservedProgram(torch)
        self.invariants = [kind(self.program) for kind in kinds]
        self.active = True
        self.failed: dict[str, str] = {}  # invariants that raised an error -> what
        self._channel: Channel | None = None
        self._reported_s = 0.0
        self._in_backward = self._in_step = False
        self._mode: Any = None
        self._latest: weakref.ref[Any] | None = None  # the loader of the latest batch
        self._iterators: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._indices: dict[int, list[Any]] = {}
        self._batches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handlers = {
            name: [getattr(i, name) for i in self.invariants if getattr(type(i), name) is not event]
            for name, event in vars(Invariant).items()
            if not name.startswith("_") and callable(event)
        }
        calls: defaultdict[str, list[Function]] = defaultdict(list)
        for invariant in self.invariants:
            for name in invariant.calls:
                calls[name].append(invariant.called)
        self._calls = dict(calls)
        self._install()

    def report_to(self, channel: Channel) -> None:
        self._channel = channel
        atexit.register(self.report)

    def findings(self) -> list[Any]:
        """The findings of all invariants, from what was observed so far."""
        was, self.active = self.active, False
        try:
            return [
                finding for invariant in tuple(self.invariants) for finding in self._findings_of(invariant)
            ]
        finally:
            self.active = was

    def _findings_of(self, invariant: Invariant) -> list[Any]:
        try:
            return list(invariant.findings())
        except Exception as error:
            self.failed[type(invariant).__name__] = f"{type(error).__name__}: {error}"
            return []

    def report(self) -> None:
        """Send all findings; the parent keeps the last report."""
        if self._channel is None or not (self.active and self.program.backwards) or rank_number():
            return
        self._reported_s = seconds()
        try:
            found = [finding.to_json() for finding in self.findings()]
            self._channel.send(
                {
                    "findings": found,
                    "steps": self.program.steps,
                    "passes": self.program.passes,
                    "loaders": len(self.program.training_loaders),
                    "evaluated": self.program.evaluated,
                    "labels": self.program.label_digests,
                    "failed": self.failed,
                }
            )
        except Hangup:
            self._channel = None

    def _report_if_due(self) -> None:
        if self._channel is not None and seconds() - self._reported_s > REPORT_EVERY_S:
            self.report()

    def restore(self) -> None:
        """Remove all hooks."""
        self.active = False
        self.ledger.restore()

    # -- hooks

    def _install(self) -> None:
        torch, ledger = self.torch, self.ledger
        self._install_on_objects()
        # a compiled function would hide its calls
        finder = AfterImport({"torch._dynamo": lambda _: torch.compiler.set_stance("force_eager")})
        sys.meta_path.insert(0, finder)
        ledger.on_restore("finder", lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        modules, scaler = torch.nn.modules.module, torch.amp.GradScaler
        optimizers = import_module("torch.optim.optimizer")
        for hook in (
            modules.register_module_forward_pre_hook(self._forward_begins),
            modules.register_module_forward_hook(self._forward_ends, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._step_begins),
            optimizers.register_optimizer_step_post_hook(self._step_ends),
        ):
            ledger.on_restore("hook", hook.remove)
        for owner, name, event, arguments in (
            (torch.nn.Module, "train", "mode_set", 2),
            (torch, "save", "saved", 2),
            (torch, "manual_seed", "seeded", 1),
            (torch.utils.data.Subset, "__init__", "subset_made", 1),
            (scaler, "scale", "loss_scaled", 2),
            (scaler, "unscale_", "gradients_unscaled", 2),
            (scaler, "step", "scaler_stepped", 2),
            (scaler, "update", "scaler_updated", 1),
        ):
            self._after(owner, name, partial(self._emit_first, event, arguments))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._after(owner, "zero_grad", self._cleared)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                ledger.set(owner, name, self._wrap_clip(getattr(owner, name)))
        for name in self._calls:
            if "." in name:
                owner, _, attribute = name.rpartition(".")
                self._after(pkgutil.resolve_name(owner), attribute, partial(self._called, name))
        for name in COLLECTIVES if torch.distributed.is_available() else ():
            self._after(torch.distributed, name, partial(self._reduced, name))
        ledger.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        for kind in list(vars(torch.optim.lr_scheduler).values()):
            if isinstance(kind, type) and kind.__module__ == torch.optim.lr_scheduler.__name__:
                if "step" in vars(kind):
                    self._after(kind, "step", self._scheduler_stepped)
                if "__init__" in vars(kind) and "step" in vars(kind):
                    self._after(kind, "__init__", self._made)
        for what, wrap in (
            ("making", self._wrap_made),
            ("iterator", self._wrap_iterator),
            ("next epoch", self._wrap_iterator),
            ("batch", self._wrap_batch),
            ("indices", self._wrap_indices),
        ):
            wrap_loader_method(torch, what, wrap, ledger)
        self._mode = _function_mode(self)
        self._mode.__enter__()
        ledger.on_restore("function mode", lambda: self._mode.__exit__(None, None, None))
        os.register_at_fork(after_in_child=self._forked)

    def _install_on_objects(self) -> None:
        """Observe what is made and loaded: almost without cost."""
        torch, modules = self.torch, self.torch.nn.modules.module
        for hook in (
            modules.register_module_parameter_registration_hook(self._parameter_registered),
            modules.register_module_module_registration_hook(self._child_registered),
        ):
            self.ledger.on_restore("hook", hook.remove)
        optimizer = torch.optim.Optimizer
        self._after(optimizer, "__init__", self._made)
        self._after(optimizer, "__init__", partial(self._emit_first, "optimizer_made", 1))
        self._after(optimizer, "load_state_dict", partial(self._emit_first, "optimizer_loaded", 2))
        self._after(torch.nn.Module, "load_state_dict", self._state_loaded)

    def _forked(self) -> None:
        self.active = False  # a worker of a loader

    def _emit(self, event: str, *args: Any) -> None:
        handlers = self._handlers[event]
        if self.active and handlers and not self.torch.jit.is_tracing():
            with self._without_calls():
                for handler in tuple(handlers):
                    self._handle(handler, args)

    def _handle(self, handler: Function, args: tuple[Any, ...]) -> Any:
        """Call an invariant; one that fails is left out, and named in the report."""
        self.active = False  # what it computes is no event
        try:
            return handler(*args)
        except Exception as error:
            invariant = handler.__self__  # type: ignore[attr-defined]
            self.failed[type(invariant).__name__] = f"{type(error).__name__}: {error}"
            self.invariants.remove(invariant)
            for handlers in (*self._handlers.values(), *self._calls.values()):
                handlers[:] = [other for other in handlers if other.__self__ is not invariant]
            return None
        finally:
            self.active = True

    def _after(self, owner: Any, name: str, observe: Callable[[Any, dict[str, Any]], None]) -> None:
        """Call ``observe`` with the result and the arguments, by name, of each call."""
        original, observer = getattr(owner, name), self
        signature = inspect.signature(original)

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if observer.active:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                observe(result, bound.arguments)
            return result

        self.ledger.set(owner, name, observed)

    def _emit_first(self, event: str, count: int, result: Any, arguments: dict[str, Any]) -> None:
        extra = [result] if event == "loss_scaled" else []
        self._emit(event, *list(arguments.values())[:count], *extra)

    def _called(self, name: str, result: Any, arguments: dict[str, Any]) -> None:
        for handler in tuple(self._calls[name]):
            self._handle(handler, (name, tuple(arguments.values()), {}, result))

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """A torch function has returned; the result that the program gets."""
        handlers = self._calls.get(getattr(function, "__name__", ""))
        if (
            handlers
            and self.active
            and not (self._in_step or self._in_backward)
            and self.torch._C._functorch.peek_interpreter_stack() is None
            and not self.torch.jit.is_tracing()
        ):
            for handler in tuple(handlers):
                replacement = self._handle(handler, (function.__name__, args, kwargs, result))
                result = result if replacement is None else replacement
        return result

    @contextmanager
    def _without_calls(self) -> Iterator[None]:
        """Calls are not seen, and cost nothing, unless the program has entered a function mode of its own."""
        overrides = self.torch.overrides
        if self._mode is not None and overrides._get_current_function_mode() is self._mode:
            with overrides._pop_mode_temporarily():
                yield
        else:
            yield

    # -- modules

    def _parameter_registered(self, module: Module, name: str, parameter: Tensor | None) -> None:
        if self.active and parameter is not None:
            self.program.register_parameter(module, name, parameter)
            self._emit("parameter_made", module, name, parameter)

    def _child_registered(self, parent: Module, name: str, child: Module | None) -> None:
        if child is not None:
            self.program.register_child(parent, name, child)

    def _forward_begins(self, module: Module, inputs: tuple[Any, ...]) -> None:
        if not self.program.forward_depth and self.active:
            self.program.register_root(module)
            self.program.evaluated |= self.program.backwards > 0 and not self.torch.is_grad_enabled()
        self.program.forward_depth += 1
        self._emit("forward_begins", module, inputs)

    def _forward_ends(self, module: Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.program.forward_depth = max(0, self.program.forward_depth - 1)
        self._emit("forward_ends", module, output)

    def _state_loaded(self, result: Any, arguments: dict[str, Any]) -> None:
        module, state, strict = list(arguments.values())[:3]
        self._emit("state_loaded", module, state, strict, result)

    # -- passes and steps

    def _wrap_backward(self, backward: Function) -> Function:
        observer, program = self, self.program

        @wraps(backward)
        def observed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if observer._in_backward or not observer.active:
                return backward(tensors, *args, **kwargs)
            losses = (tensors,) if isinstance(tensors, observer.torch.Tensor) else tuple(tensors)
            loader = observer._latest() if observer._latest is not None else None
            if loader is not None and loader not in program.training_loaders:
                program.training_loaders.add(loader)
            observer._emit("backward_begins", losses)
            observer._in_backward = True
            try:
                result = backward(tensors, *args, **kwargs)
            finally:
                observer._in_backward = False
            if not program.backwards and observer._channel is not None:
                with suppress(Hangup):
                    observer._channel.send({"training": os.getpid()})
            program.backwards += 1
            observer._emit("backward_ends")
            observer._report_if_due()
            return result

        return observed

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._emit("step_begins", optimizer)
        self._in_step = not (args or kwargs)  # a closure computes a loss inside

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = False
        self.program.steps += 1
        self._emit("step_ends", optimizer)
        self._report_if_due()

    def _cleared(self, result: Any, arguments: dict[str, Any]) -> None:
        owner = arguments["self"]
        optimizer = isinstance(owner, self.torch.optim.Optimizer)
        self._emit("gradients_cleared", list(parameters_of(owner) if optimizer else owner.parameters()))

    def _wrap_clip(self, clip: Function) -> Function:
        observer, signature = self, inspect.signature(clip)

        @wraps(clip)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not observer.active:
                return clip(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            given, limit = list(bound.arguments.values())[:2]
            parameters = [given] if isinstance(given, observer.torch.Tensor) else list(given)
            if inspect.isgenerator(given):  # a generator again: torch warns of an empty one
                bound.arguments["parameters"] = (p for p in parameters)
            elif isinstance(given, Iterator):
                bound.arguments["parameters"] = parameters
            total = clip(*bound.args, **bound.kwargs)
            observer._emit("gradients_clipped", Clip(line_here(), given, parameters, limit, total))
            return total

        return observed

    def _reduced(self, name: str, result: Any, arguments: dict[str, Any]) -> None:
        self._emit("reduced", name, arguments["tensor"])

    def _scheduler_stepped(self, result: Any, arguments: dict[str, Any]) -> None:
        if arguments["self"] in self.program.made:  # its initialiser steps, too
            self._emit("scheduler_stepped", arguments["self"])

    def _made(self, result: Any, arguments: dict[str, Any]) -> None:
        self.program.register_made(arguments["self"])

    # -- loaders

    def _wrap_made(self, init: Function) -> Function:
        def observed(loader: DataLoader, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            if self.active:
                self.program.register_made(loader)

        return observed

    def _wrap_iterator(self, begin: Function) -> Function:
        def observed(iterator: Any, loader: DataLoader, *args: Any, **kwargs: Any) -> Any:
            begins = iterator not in self._iterators or not kwargs.get("first_iter", bool(args and args[0]))
            self._iterators[iterator] = weakref.ref(loader)
            if begins:
                self._indices[id(iterator)] = []
                self._emit("pass_begins", loader)
            return begin(iterator, loader, *args, **kwargs)

        return observed

    def _wrap_indices(self, take: Function) -> Function:
        def observed(iterator: Any) -> Any:
            indices = take(iterator)
            if self.active and iterator in self._iterators:
                self._indices.setdefault(id(iterator), []).append(indices)
            return indices

        return observed

    def _wrap_batch(self, take: Function) -> Function:
        def observed(iterator: Any) -> Any:
            ref = self._iterators.get(iterator)
            loader = ref() if ref is not None else None
            seen = self._batches.get(loader, 0) if loader is not None else 0
            try:
                with self._without_calls() if seen >= OBSERVED_BATCHES else nullcontext():
                    batch = take(iterator)
            except StopIteration:
                if loader is not None:
                    if loader in self.program.training_loaders and self.active:
                        self.program.passes += 1
                    self._emit("pass_ends", loader)
                    self._indices.pop(id(iterator), None)
                raise
            if loader is not None:
                self._latest, self._batches[loader] = weakref.ref(loader), seen + 1
                taken = self._indices.get(id(iterator))
                self._emit("batch", loader, batch, taken.pop(0) if taken else None)
            return batch

        return observed


def _function_mode(observer: Observer) -> Any:
    class FunctionMode(observer.torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(
            self, function: Function, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            return observer.call(function, args, kwargs, function(*args, **kwargs))

    return FunctionMode()
