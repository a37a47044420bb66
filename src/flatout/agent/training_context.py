"""The training context: the live objects of a running training script, and the events of its steps.

This module does not time, hash or decide; a Listener does. What is installed, and its cost:

    Optimizer pre/post step hooks      torch's own global hooks, one call per step, until a backward pass after stop_observing()
    torch.autograd.backward            one wrapper per backward pass (Tensor.backward calls it), as long
    torch.autograd.grad                one wrapper per call
    DataLoader.__init__                 one wrapper, to find loaders and let LOADER levers choose arguments
    iterators of DataLoaders            one wrapper per iterator, to let LOADER levers make the batches
    global forward hooks               until the second step has ended, to find the root modules (25 % of a forward)
    forward hooks on the root modules  only while a listener needs phases
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.compilers import is_compiled
from flatout.agent.ledger import Ledger
from flatout.agent.listener import GuardedListener, Listener
from flatout.agent.pickles import keep_out_of_pickles
from flatout.agent.program_view import MAX_ROOTS, ProgramView
from flatout.schema.program import Ledger as AnyLedger
from flatout.schema.program import Wrapper

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

Function = Callable[..., Any]


class TrainingContext(ProgramView):
    """The view of a running script, with the hooks that keep it up to date and send events to a listener."""

    def __init__(self, torch: ModuleType, listener: Listener, ledger: Ledger) -> None:
        super().__init__(torch)
        self.listener: Listener = GuardedListener(listener)
        self.ledger = ledger
        self._step_hooks = Ledger()  # what each step pays for
        self._pickles_filtered = False
        # root -> whether its last forward pass was under autocast, until a backward pass
        self._under_autocast: dict[int, bool] = {}
        self._forward_depth = 0
        self._in_backward = False
        self._backwards_at_step = 0
        self._global_hooks: list[Any] = []
        self._warning_filter: Any = None
        self._root_hooks: dict[int, list[Any]] = {}
        self.paused = False
        self.stopped = False  # paused for good
        self._compiler_safe = False
        self.deferred: Callable[[], None] | None = None
        self.untimed: Callable[[], AbstractContextManager[None]] = nullcontext

    # -- install

    def register_objects(
        self,
        roots: Iterable[Any],
        optimizers: Iterable[Any],
        loaders: Iterable[Any],
        losses: Iterable[Any] = (),
    ) -> None:
        """Register known objects instead of ``install``: nothing is searched, and no step is observed."""
        self._roots = {id(root): weakref.ref(root) for root in roots}
        self._losses = {id(loss): weakref.ref(loss) for loss in losses}
        for optimizer in optimizers:
            self._optimizers.register(optimizer)
        self.compiled_by_script = any(map(is_compiled, self.roots))
        for loader in loaders:
            self._loaders.register(loader)

    def rebuild_loader(self, loader: DataLoader, ledger: AnyLedger) -> Any:
        return self._loaders.rebuild(loader, ledger)

    def first_step_done(self, backwards: int) -> None:
        """Let levers act, for a caller that runs the steps itself."""
        self.steps, self.backwards, self.backwards_in_last_step = 1, backwards, backwards

    def install(self) -> None:
        """Install the hooks. Called once, right after torch was imported."""
        torch, ledger = self.torch, self.ledger
        ledger.on_restore("hooks of each step", self._step_hooks.restore)
        self._optimizers.observe(ledger, self._step_hooks, self)
        self._step_hooks.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        ledger.set(torch.autograd, "grad", self._wrap_grad(torch.autograd.grad))
        self._loaders.observe_creation(ledger)
        self._scalers.observe(ledger, self)
        if self.listener.wants_phases:
            self._loaders.observe_batches(ledger, self)
        distribution = torch.distributions.Distribution
        ledger.set(distribution, "__init__", self._wrap_distribution_init(distribution.__init__))
        self._add_global_hooks()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        # A child that is forked during training is a loader worker or a helper, so it stays inactive.
        if self.steps or self.backwards:
            self.paused = True
            self.listener = Listener()

    def switch_listener(self, listener: Listener) -> None:
        """Send events only to this listener from now on.

        A compiler must not see these hooks: it would trace them and break its graphs there.
        """
        self.listener, self._compiler_safe = GuardedListener(listener), True
        for root in self.roots:
            compiled = getattr(root, "_compiled_call_impl", None)
            if compiled is not None:  # compiled by module.compile(), which includes the hooks
                self.ledger.set(root, "_compiled_call_impl", self._wrap_compiled_call(root, compiled))

    def _wrap_compiled_call(self, root: Module, compiled: Function) -> Function:
        module = weakref.ref(root)

        @wraps(compiled)
        def call(*args: object, **kwargs: object) -> Any:
            self._root_begins(module(), args, kwargs)
            return compiled(*args, **kwargs)

        return call

    def stop_observing(self) -> None:
        """Stop listening for good. Levers and loader rules stay; the next backward pass removes the hooks of each step.

        Not this call: torch may be iterating over the optimizer hooks.
        """
        self.paused = self.stopped = True
        self.listener = Listener()
        self._remove_global_hooks()
        for hooks in self._root_hooks.values():
            for hook in hooks:
                hook.remove()
        self._root_hooks.clear()

    # -- root modules

    def _add_global_hooks(self) -> None:
        modules = self.torch.nn.modules.module
        self._global_hooks = [
            modules.register_module_forward_pre_hook(self._any_forward_begins),
            modules.register_module_forward_hook(self._any_forward_ends, always_call=True),
        ]
        # torch.compile would warn the user of flatout's hooks, which are removed soon.
        warnings.filterwarnings(
            "ignore",
            message=r"Using `torch\.compile\(module\)` when there are global hooks",
            category=UserWarning,
        )
        self._warning_filter = warnings.filters[0]
        self.ledger.on_restore("global forward hooks", self._remove_global_hooks)

    @property
    def has_global_hooks(self) -> bool:
        """Whether hooks run around every module's forward.

        A compiler would trace them, and recompile when they are gone.
        """
        return bool(self._global_hooks)

    def _remove_global_hooks(self) -> None:
        for hook in self._global_hooks:
            hook.remove()
        self._global_hooks = []
        if self._warning_filter in warnings.filters:
            # a list; typeshed declares a sequence
            warnings.filters.remove(self._warning_filter)  # type: ignore[attr-defined]

    def _any_forward_begins(self, module: Module, args: tuple[Any, ...]) -> None:
        self._forward_depth += 1
        if self._forward_depth > 1 or not self.torch.is_grad_enabled() or self.paused:
            return
        key = id(module)
        known = self._roots.get(key)
        if known is not None and known() is module:
            return
        if self._in_backward and any(module is part for root in self.roots for part in root.modules()):
            return  # recomputed by activation checkpointing
        if not any(p.requires_grad for p in module.parameters()):
            if isinstance(module, self.torch.nn.modules.loss._Loss):
                self._losses[key] = weakref.ref(module)
            return
        self._roots[key] = weakref.ref(module)
        if len(self._roots) <= MAX_ROOTS:
            module_class = self.torch.nn.Module  # a ScriptModule has hooks, but no methods to set them
            self._root_hooks[key] = [
                module_class.register_forward_pre_hook(
                    module, self._root_begins, with_kwargs=True, prepend=True
                ),
                module_class.register_forward_hook(module, self._root_ends),
            ]
            self._keep_out_of_pickles()
            self._root_begins(module, args, {})  # this call has run its own pre-hooks already

    def _any_forward_ends(self, module: Module, args: tuple[Any, ...], output: object) -> None:
        self._forward_depth = max(0, self._forward_depth - 1)

    def _root_begins(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch = self.torch
        if self._compiler_safe and torch.compiler.is_compiling():
            return
        if self.paused or not torch.is_grad_enabled():
            return
        if self.boundaries.forward_or_backward_begins():
            self._step_ended()
        if not self.steps:
            self._under_autocast[id(module)] = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(
                "cuda"
            )
        self.listener.forward_begin(module, args, kwargs)
        self._run_deferred()

    def _root_ends(self, module: Module, args: tuple[Any, ...], output: object) -> None:
        if self._compiler_safe:  # the end of a forward pass is not needed
            return
        if not self.paused and self.torch.is_grad_enabled():
            self.listener.forward_end(module, output)

    def _keep_out_of_pickles(self) -> None:
        if not self._pickles_filtered:
            self._pickles_filtered = True
            keep_out_of_pickles(self.torch, self.ledger, TrainingContext)

    # -- backward

    def _wrap_backward(self, backward: Function) -> Function:
        context = self

        @wraps(backward)
        def hooked_backward(tensors: Any, *args: object, **kwargs: object) -> Any:
            if context.paused:
                if context.stopped and context.torch.autograd.backward is hooked_backward:  # nothing wraps it
                    context._step_hooks.restore()
                return backward(tensors, *args, **kwargs)
            # reentrant checkpointing calls backward inside a backward pass
            if context._in_backward:
                return backward(tensors, *args, **kwargs)
            if context.boundaries.forward_or_backward_begins():
                context._step_ended()
            context._loaders.backward_begins()
            roots = (tensors,) if isinstance(tensors, context.torch.Tensor) else tuple(tensors)
            context.create_graph_seen |= _creates_graph(args, kwargs)
            context.anomaly_seen = context.torch.is_anomaly_enabled()
            context._note_autocast()
            context.listener.backward_begin(tuple(map(context.without_scale, roots)))
            context._run_deferred()
            context._in_backward = True
            try:
                result = backward(tensors, *args, **kwargs)
            finally:
                context._in_backward = False
            context.backwards += 1
            context.closure_steps |= context._optimizers.stepping
            context.boundaries.backward_ended()
            context.listener.backward_end()
            return result

        return hooked_backward

    def _note_autocast(self) -> None:
        """Ignore forward passes of an evaluation: the same root runs again before the backward pass."""
        self.autocast_seen |= any(self._under_autocast.values())
        self._under_autocast.clear()

    def _wrap_grad(self, grad: Function) -> Function:
        context = self

        @wraps(grad)
        def hooked_grad(outputs: object, inputs: object, *args: object, **kwargs: object) -> Any:
            context.create_graph_seen |= _creates_graph(args, kwargs)
            context._note_autocast()
            was_backward, context._in_backward = context._in_backward, True
            try:
                return grad(outputs, inputs, *args, **kwargs)
            finally:
                context._in_backward = was_backward

        return hooked_grad

    def _wrap_distribution_init(self, init: Function) -> Function:
        context = self

        @wraps(init)
        def hooked_init(distribution: object, *args: object, **kwargs: object) -> None:
            context.distributions_seen = True
            init(distribution, *args, **kwargs)

        return hooked_init

    # -- optimizers and step boundaries

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self.listener.optimizer_begin(optimizer)
        self._run_deferred()

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        if not self.steps:
            self._optimizers.ignore_wrappers_of(optimizer)
        self.optimizer_events += 1
        self.listener.optimizer_end(optimizer)
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._step_ended()

    def optimizer_skipped(self, optimizer: Optimizer) -> None:
        """End the cycle when a GradScaler found infinite gradients and did not call the optimizer."""
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._step_ended()

    def _step_ended(self) -> None:
        if not self.steps and self.torch.utils.data.get_worker_info() is not None:
            self.paused = True  # a loader worker that computes its own gradients
            return
        self.steps += 1
        self.backwards_in_last_step = self.backwards - self._backwards_at_step
        self._backwards_at_step = self.backwards
        if self.steps <= 2:  # not when a root is found: its compiler would trace the check
            self.compiled_by_script |= any(map(is_compiled, self.roots))
        if self.steps == 2 and self._global_hooks:
            self._remove_global_hooks()
            self._forward_depth = 0
        self.listener.step_end()

    def _run_deferred(self) -> None:
        """Run a listener's deferred action once, after all listeners.

        Its exceptions reach the script, like those of a signal handler.
        """
        if self.deferred is not None:
            deferred, self.deferred = self.deferred, None
            deferred()

    # -- wrapping the forward of a root module

    def wrap_forward(self, root: Module, wrapper: Wrapper, ledger: AnyLedger) -> Callable[[], None]:
        """Replace ``root.forward`` by ``wrapper(root.forward)``; names, type and state_dict stay.

        The wrapper runs in training and evaluation. Returns a function that removes it (it must be the
        outermost then).
        """
        self._keep_out_of_pickles()
        wrapped = wrapper(root.forward)
        wrapped.flatout = True  # type: ignore[attr-defined]
        mark = ledger.mark()
        ledger.set(root, "forward", wrapped)
        return lambda: ledger.restore(mark)


def _creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``backward`` or ``grad`` creates a graph; Tensor.backward passes it by position."""
    return bool(kwargs.get("create_graph", len(args) > 2 and args[2]))
