"""The training context: the live objects of a running training script, and the events of its steps.

This module does not time, hash or decide; a Listener does. What is installed, and its cost:

    Optimizer pre/post step hooks      torch's own global hooks, one call per step
    torch.autograd.backward, grad      one wrapper per backward pass (Tensor.backward calls it)
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
from functools import wraps
from typing import Any

from flatout.capture.batches import rows, samples_in
from flatout.capture.compilers import compiler_off, is_compiled
from flatout.capture.layers import layer_counts
from flatout.capture.ledger import Ledger
from flatout.capture.listener import Guarded, Listener
from flatout.capture.loaders import FeedRule, LoaderRule, Loaders, way_of
from flatout.capture.names import variables_of
from flatout.capture.optimizers import Optimizers
from flatout.capture.pickles import keep_out_of_pickles, without_hooks
from flatout.capture.scalers import Scalers
from flatout.capture.steps import StepBoundaries

ROOTS_THAT_MAKE_SENSE = 16  # with more root modules, the script calls its model in pieces


class TrainingContext:
    """The live objects of a script, as weak references: attaching keeps no model or loader alive."""

    def __init__(self, torch: Any, listener: Listener, ledger: Ledger) -> None:
        self.torch = torch
        self.listener: Listener = Guarded(listener)
        self.ledger = ledger
        self.boundaries = StepBoundaries()
        self.steps = 0
        self.backwards = 0
        self.backwards_in_last_step = 0
        self.optimizer_events = 0
        self.closure_steps = False
        self.autocast_seen = False  # in a forward pass of the first step that a backward pass followed
        self.anomaly_seen = False  # anomaly detection, in the last backward pass
        self.create_graph_seen = False
        self.compiled_by_script = False
        self.distributions_seen = False
        self.threads_at_import = torch.get_num_threads()
        self.reports: list[tuple[str, str]] = []  # messages of levers after they were applied
        self.says: Callable[[str, str], None] | None = None  # prints such a message at once
        self.handed_on: Any = None  # where the runs of a search pass on their cached samples
        self.divided: Any = None  # the installed state of `data_parallel`, for levers that act through it
        self.graph_passes: list[Any] = []  # graph passes of levers, before `compile` compiles the graph
        # modules that `compile` excludes, because levers change their outputs
        self.uncompiled: list[Any] = []
        self._loaders = Loaders(torch)
        self._scalers = Scalers(torch)
        self._pickles_guarded = False
        self._roots: dict[int, weakref.ref] = {}
        # root -> whether its last forward pass was under autocast, until a backward pass
        self._under_autocast: dict[int, bool] = {}
        self._losses: dict[int, weakref.ref] = {}
        self._optimizers = Optimizers(self.boundaries)
        self._depth = 0
        self._in_backward = False
        self._backwards_at_step = 0
        self._discovery: list[Any] = []
        self._filter: Any = None
        self._root_hooks: dict[int, list[Any]] = {}
        self.asleep = False
        self._unseen = False
        self.then: Callable[[], None] | None = None

    # -- recorded facts -------------------------------------------------------------------------------------

    @property
    def roots(self) -> list[Any]:
        """Outermost trainable modules called with gradients enabled, in the order first seen."""
        return [root for ref in self._roots.values() if (root := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        return self._optimizers.alive

    @property
    def loss_modules(self) -> list[Any]:
        return [loss for ref in self._losses.values() if (loss := ref()) is not None]

    @property
    def scalers(self) -> list[Any]:
        """The enabled GradScalers of the script."""
        return self._scalers.enabled

    @property
    def loaders(self) -> list[dict[str, Any]]:
        """The arguments that the script passed to each DataLoader, and those that it got."""
        return self._loaders.seen

    @property
    def parameters(self) -> list[Any]:
        """Every trainable parameter, without duplicates: of the optimizers, else of the root modules."""
        from_optimizers = [
            p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        found = from_optimizers or [p for root in self.roots for p in root.parameters()]
        return [p for p in {id(p): p for p in found}.values() if p.requires_grad]

    @property
    def device(self) -> Any:
        """The device of the first parameter."""
        return next((p.device for p in self.parameters), self.torch.device("cpu"))

    @property
    def device_type(self) -> str:
        return str(self.device.type)

    @property
    def in_pieces(self) -> bool:
        """Whether the script calls parts of its model separately, so that no forward is the whole model."""
        return len(self.roots) > ROOTS_THAT_MAKE_SENSE

    @staticmethod
    def without_ranks(root: Any) -> Any:
        """Return the module inside a wrapper that averages gradients: one rank alone can call it."""
        return root.module if type(root).__name__ == "DistributedDataParallel" else root

    @property
    def ddp_modules(self) -> list[Any]:
        """The script's DistributedDataParallel modules that train: root modules, or inside of one."""
        found = {
            id(module): module
            for root in self.roots
            for module in root.modules()
            if type(module).__name__ == "DistributedDataParallel"
        }
        return [
            module for module in found.values() if type(module).__module__ == "torch.nn.parallel.distributed"
        ]

    def has_layer(self, *names: str) -> bool:
        """Whether a root holds a layer whose class or base class has one of these names or prefixes.

        torch.jit keeps the names.
        """
        modules = [module for root in self.roots for module in root.modules()]
        kinds = {kind.__name__ for module in modules for kind in type(module).__mro__} | {
            str(getattr(module, "original_name", "")) for module in modules
        }
        return any(name.startswith(names) for name in kinds)

    def data_is_random(self) -> bool:
        """Whether fetching a sample of the first map-style data set draws random numbers; True if unknown."""
        return self._loaders.data_is_random()

    def change_loaders(self, change: Callable[[Any, dict[str, Any]], dict[str, Any]], ledger: Ledger) -> None:
        """Make DataLoaders with ``change(dataset, arguments)`` from now on, until the ledger is restored."""
        rule = LoaderRule(change)
        self._loaders.rules.append(rule)
        ledger.call("loader rule", lambda: self._loaders.rules.remove(rule))

    def feed_loaders(self, rule: FeedRule, ledger: Ledger) -> None:
        """Let ``rule(loader, asked, feed)`` choose how batches are made, until the ledger is restored."""
        ledger.call("feed rule", self._loaders.feed_by(rule))

    @property
    def training_loader(self) -> int | None:
        """The position in ``loaders`` of the loader that fed most backward passes, or None."""
        fed = self._loaders.fed
        return max(fed, key=fed.__getitem__) if fed else None

    @property
    def loaders_that_train(self) -> list[int]:
        """The positions in ``loaders`` of all that fed a backward pass."""
        return sorted({self._loaders.first_like(number) for number in self._loaders.fed})

    @property
    def live_loaders(self) -> list[Any]:
        """The living DataLoaders, in creation order."""
        return list(self._loaders.alive)

    @property
    def training_loaders(self) -> list[Any]:
        """The loaders in ``live_loaders`` that train; all of them if no backward pass was fed from any."""
        train = self.loaders_that_train
        return [
            loader for loader in self.live_loaders if not train or self.first_loader_like(loader) in train
        ]

    def number_of_loader(self, loader: Any) -> int | None:
        """Return the position of a DataLoader in ``loaders``; None if it was made before flatout attached."""
        return self._loaders.number.get(loader)

    def first_loader_like(self, loader: Any) -> int | None:
        """Return the position of the first DataLoader made like this one, e.g. in an earlier epoch."""
        return self._loaders.alike.get(loader)

    @staticmethod
    def way_of_loader(dataset: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Return a key that loaders made alike have in common."""
        return way_of(dataset, arguments)

    @staticmethod
    def samples_in(batch: Any, asked: int | None = None) -> int | None:
        """Return the number of samples in a batch, or None; ``asked``: the batch size of its loader."""
        return samples_in(batch, asked)

    @staticmethod
    def rows_of(batch: Any, samples: int, start: int, stop: int) -> Any:
        """Return some samples of a batch."""
        return rows(batch, samples, start, stop)

    without_hooks = staticmethod(without_hooks)  # for packages that must not import this one
    compiler_off = staticmethod(compiler_off)
    variables_of = staticmethod(variables_of)

    def without_scale(self, loss: Any) -> Any:
        """Return the unscaled loss of a loss that a GradScaler has scaled; other losses unchanged."""
        return self._scalers.without_scale(loss)

    def report(self, lever: str, sentence: str) -> None:
        if self.says is None:
            self.reports.append((lever, sentence))
        else:
            self.says(lever, sentence)

    def describe(self) -> dict[str, Any]:
        parameters = self.parameters
        return {
            "roots": [type(root).__name__ for root in self.roots],
            "layers": layer_counts(self.roots),
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "losses": [type(loss).__name__ for loss in self.loss_modules],
            "loaders": self.loaders[:8],
            "training_loader": self.training_loader,
            "scalers": len(self.scalers),
            "parameters": sum(p.numel() for p in parameters),
            "dtypes": sorted({str(p.dtype) for p in parameters}),
            "device": self.device_type,
            "device_index": self.device.index,
            "backwards_per_step": self.backwards_in_last_step,
            "closure_steps": self.closure_steps,
            "boundaries": "backward" if self.boundaries.by_backward else "optimizer",
        }

    # -- install --------------------------------------------------------------------------------------------

    def introduce(
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
            self._optimizers.meet(optimizer)
        self.compiled_by_script = any(map(is_compiled, self.roots))
        for loader in loaders:
            self._loaders.meet(loader)

    def made_again(self, loader: Any, ledger: Ledger) -> Any:
        """Return this DataLoader rebuilt by the rules, or itself if no rule applies.

        Feeds act on it from here on.
        """
        return self._loaders.made_again(loader, ledger)

    def first_step_done(self, backwards: int) -> None:
        """Let levers act, for a caller that runs the steps itself."""
        self.steps, self.backwards, self.backwards_in_last_step = 1, backwards, backwards

    def install(self) -> None:
        """Install the hooks. Called once, right after torch was imported."""
        torch, ledger = self.torch, self.ledger
        self._optimizers.observe(ledger, self)
        ledger.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        ledger.set(torch.autograd, "grad", self._wrap_grad(torch.autograd.grad))
        self._loaders.observe_making(ledger)
        self._scalers.observe(ledger, self)
        if self.listener.wants_phases:
            self._loaders.observe_batches(ledger, self)
        distribution = torch.distributions.Distribution
        ledger.set(distribution, "__init__", self._wrap_distribution_init(distribution.__init__))
        self._look_for_roots()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        # A child that is forked during training is a loader worker or a helper, so it stays inactive.
        if self.steps or self.backwards:
            self.asleep = True
            self.listener = Listener()

    def listen_for(self, listener: Listener) -> None:
        """Send events only to this listener from now on.

        A compiler must not see these hooks: it would trace them and break its graphs there.
        """
        self.listener, self._unseen = Guarded(listener), True
        for root in self.roots:
            compiled = getattr(root, "_compiled_call_impl", None)
            if compiled is not None:  # compiled by module.compile(), which includes the hooks
                self.ledger.set(root, "_compiled_call_impl", self._called_from_outside(root, compiled))

    def _called_from_outside(self, root: Any, compiled: Callable) -> Callable:
        module = weakref.ref(root)

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._root_begins(module(), args, kwargs)
            return compiled(*args, **kwargs)

        return call

    def rest(self) -> None:
        """Stop listening for good; what stays costs two flag tests per step. Levers and loader rules stay.

        The optimizer hooks are not removed: torch iterates over their dictionary during this call.
        """
        self.asleep = True
        self.listener = Listener()
        self._stop_looking()
        for hooks in self._root_hooks.values():
            for hook in hooks:
                hook.remove()
        self._root_hooks.clear()

    # -- root modules ---------------------------------------------------------------------------------------

    def _look_for_roots(self) -> None:
        modules = self.torch.nn.modules.module
        self._discovery = [
            modules.register_module_forward_pre_hook(self._any_forward_begins),
            modules.register_module_forward_hook(self._any_forward_ends, always_call=True),
        ]
        # torch.compile would warn the user of flatout's hooks, which are removed soon.
        warnings.filterwarnings(
            "ignore",
            message=r"Using `torch\.compile\(module\)` when there are global hooks",
            category=UserWarning,
        )
        self._filter = warnings.filters[0]
        self.ledger.call("global forward hooks", self._stop_looking)

    @property
    def looks_for_roots(self) -> bool:
        """Whether hooks run around every module's forward.

        A compiler would trace them, and recompile when they are gone.
        """
        return bool(self._discovery)

    def _stop_looking(self) -> None:
        for hook in self._discovery:
            hook.remove()
        self._discovery = []
        if self._filter in warnings.filters:
            # a list; typeshed declares a sequence
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def _any_forward_begins(self, module: Any, args: tuple) -> None:
        self._depth += 1
        if self._depth > 1 or not self.torch.is_grad_enabled() or self.asleep:
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
        if len(self._roots) <= ROOTS_THAT_MAKE_SENSE:
            hooked = self.torch.nn.Module  # a ScriptModule has hooks, but no methods to set them
            self._root_hooks[key] = [
                hooked.register_forward_pre_hook(module, self._root_begins, with_kwargs=True, prepend=True),
                hooked.register_forward_hook(module, self._root_ends),
            ]
            self._keep_out_of_pickles()
            self._root_begins(module, args, {})  # this call has run its own pre-hooks already

    def _any_forward_ends(self, module: Any, args: tuple, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _root_begins(self, module: Any, args: tuple, kwargs: dict) -> None:
        torch = self.torch
        if self._unseen and torch.compiler.is_compiling():
            return
        if self.asleep or not torch.is_grad_enabled():
            return
        if self.boundaries.forward_or_backward_begins():
            self._step_ended()
        if not self.steps:
            self._under_autocast[id(module)] = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(
                "cuda"
            )
        self.listener.forward_begin(module, args, kwargs)
        self._do_then()

    def _root_ends(self, module: Any, args: tuple, output: Any) -> None:
        if self._unseen:  # the end of a forward pass is not needed
            return
        if not self.asleep and self.torch.is_grad_enabled():
            self.listener.forward_end(module, output)

    def _keep_out_of_pickles(self) -> None:
        if not self._pickles_guarded:
            self._pickles_guarded = True
            keep_out_of_pickles(self.torch, self.ledger, TrainingContext)

    # -- backward -------------------------------------------------------------------------------------------

    def _wrap_backward(self, backward: Callable) -> Callable:
        context = self

        @wraps(backward)
        def hooked_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # reentrant checkpointing calls backward inside a backward pass
            if context.asleep or context._in_backward:
                return backward(tensors, *args, **kwargs)
            if context.boundaries.forward_or_backward_begins():
                context._step_ended()
            context._loaders.backward_begins()
            roots = (tensors,) if isinstance(tensors, context.torch.Tensor) else tuple(tensors)
            context.create_graph_seen |= _creates_graph(args, kwargs)
            context.anomaly_seen = context.torch.is_anomaly_enabled()
            context._note_autocast()
            context.listener.backward_begin(tuple(map(context.without_scale, roots)))
            context._do_then()
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

    def _wrap_grad(self, grad: Callable) -> Callable:
        context = self

        @wraps(grad)
        def hooked_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            context.create_graph_seen |= _creates_graph(args, kwargs)
            context._note_autocast()
            before, context._in_backward = context._in_backward, True
            try:
                return grad(outputs, inputs, *args, **kwargs)
            finally:
                context._in_backward = before

        return hooked_grad

    def _wrap_distribution_init(self, init: Callable) -> Callable:
        context = self

        @wraps(init)
        def hooked_init(distribution: Any, *args: Any, **kwargs: Any) -> None:
            context.distributions_seen = True
            init(distribution, *args, **kwargs)

        return hooked_init

    # -- optimizers and step boundaries ---------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        self.listener.optimizer_begin(optimizer)
        self._do_then()

    def optimizer_ends(self, optimizer: Any) -> None:
        if not self.steps:
            self._optimizers.wait_for_no_wrapper_of(optimizer)
        self.optimizer_events += 1
        self.listener.optimizer_end(optimizer)
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._step_ended()

    def optimizer_left_out(self, optimizer: Any) -> None:
        """End the cycle when a GradScaler found infinite gradients and did not call the optimizer."""
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._step_ended()

    def _step_ended(self) -> None:
        if not self.steps and self.torch.utils.data.get_worker_info() is not None:
            self.asleep = True  # a loader worker that computes its own gradients
            return
        self.steps += 1
        self.backwards_in_last_step = self.backwards - self._backwards_at_step
        self._backwards_at_step = self.backwards
        if self.steps <= 2:  # not when a root is found: its compiler would trace the check
            self.compiled_by_script |= any(map(is_compiled, self.roots))
        if self.steps == 2 and self._discovery:
            self._stop_looking()
            self._depth = 0
        self.listener.step_end()

    def _do_then(self) -> None:
        """Run a listener's deferred action once, after all listeners.

        Its exceptions reach the script, like those of a signal handler.
        """
        if self.then is not None:
            then, self.then = self.then, None
            then()

    # -- wrapping the forward of a root module --------------------------------------------------------------

    def wrap_forward(
        self, root: Any, wrapper: Callable[[Callable], Callable], ledger: Ledger
    ) -> Callable[[], None]:
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


def _creates_graph(args: tuple, kwargs: dict) -> bool:
    """Whether a call of ``backward`` or ``grad`` creates a graph; Tensor.backward passes it by position."""
    return bool(kwargs.get("create_graph", len(args) > 2 and args[2]))
