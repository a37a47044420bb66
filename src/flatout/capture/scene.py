"""The Scene: the live objects of a training script, found while it runs, and the events of its steps.

Nothing here times, hashes or decides; a Listener does. What is installed, and what it costs:

    Optimizer pre/post step hooks      torch's own global hooks, one call a step
    torch.autograd.backward, grad      one wrapper a backward pass (Tensor.backward goes through it)
    DataLoader.__init__                 one wrapper, to learn of loaders and let LOADER levers choose arguments
    iterators of DataLoaders            one wrapper each time a loader is iterated over, to let LOADER levers make the batches
    global forward hooks               until the second step has ended, to find the root modules (25 % of a forward)
    forward hooks on the root modules  only while a listener wants phases
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

ROOTS_THAT_MAKE_SENSE = 16  # more root modules than this: the model is called in pieces


class Scene:
    """Live objects are held weakly: attaching must not keep a model or a loader alive."""

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
        self.autocast_seen = False  # around a forward pass that a backward pass came after, in the first step
        self.anomaly_seen = False  # anomaly detection, in the last backward pass
        self.create_graph_seen = False
        self.compiled_by_script = False
        self.distributions_seen = False
        self.threads_at_import = torch.get_num_threads()
        self.reports: list[tuple[str, str]] = []  # what a lever has to say after it was applied
        self.says: Callable[[str, str], None] | None = None  # where that goes at once
        self.handed_on: Any = None  # where the programs of a search hand on the samples that they have kept
        self.divided: Any = None  # what `data_parallel` has in place, for the levers that act through it
        self.graph_passes: list[Any] = []  # what levers do to a graph before `compile` has it compiled
        self.uncompiled: list[Any] = []  # modules that `compile` leaves out of its graphs, for what levers make of their outputs
        self._loaders = Loaders(torch)
        self._scalers = Scalers(torch)
        self._pickles_guarded = False
        self._roots: dict[int, weakref.ref] = {}
        self._under_autocast: dict[int, bool] = {}  # root -> its last forward pass, until a backward pass begins
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

    # -- what was found ---------------------------------------------------------------------------------------------

    @property
    def roots(self) -> list[Any]:
        """Outermost modules with trainable parameters that were called with gradients on, in the order first seen."""
        return [root for ref in self._roots.values() if (root := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        return self._optimizers.alive

    @property
    def loss_modules(self) -> list[Any]:
        return [loss for ref in self._losses.values() if (loss := ref()) is not None]

    @property
    def scalers(self) -> list[Any]:
        """GradScalers of the script that are switched on."""
        return self._scalers.enabled

    @property
    def loaders(self) -> list[dict[str, Any]]:
        """What each DataLoader was asked for by the script, and what it got."""
        return self._loaders.seen

    @property
    def parameters(self) -> list[Any]:
        """Every trainable parameter: of the optimizers, else of the root modules. No parameter twice."""
        from_optimizers = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        found = from_optimizers or [p for root in self.roots for p in root.parameters()]
        return [p for p in {id(p): p for p in found}.values() if p.requires_grad]

    @property
    def device(self) -> Any:
        """That of the first parameter."""
        return next((p.device for p in self.parameters), self.torch.device("cpu"))

    @property
    def device_type(self) -> str:
        return str(self.device.type)

    @property
    def in_pieces(self) -> bool:
        """The script calls parts of its model one by one, so there is no module whose forward is the whole."""
        return len(self.roots) > ROOTS_THAT_MAKE_SENSE

    @staticmethod
    def without_ranks(root: Any) -> Any:
        """The module inside a wrapper that averages gradients with other ranks: what may be called by one rank alone."""
        return root.module if type(root).__name__ == "DistributedDataParallel" else root

    @property
    def ddp_modules(self) -> list[Any]:
        """torch's DistributedDataParallel modules of the script that train: root modules, or inside of one."""
        found = {id(module): module for root in self.roots for module in root.modules() if type(module).__name__ == "DistributedDataParallel"}
        return [module for module in found.values() if type(module).__module__ == "torch.nn.parallel.distributed"]

    def has_layer(self, *names: str) -> bool:
        """Whether a root holds a layer whose class, or a base of it, has one of these names (a prefix will do). torch.jit keeps the names."""
        modules = [module for root in self.roots for module in root.modules()]
        kinds = {kind.__name__ for module in modules for kind in type(module).__mro__} | {str(getattr(module, "original_name", "")) for module in modules}
        return any(name.startswith(names) for name in kinds)

    def data_is_random(self) -> bool:
        """Whether fetching a sample of the first map-style data set draws random numbers; True where it cannot be told."""
        return self._loaders.data_is_random()

    def change_loaders(self, change: Callable[[Any, dict[str, Any]], dict[str, Any]], ledger: Ledger) -> None:
        """From now on DataLoaders are made with ``change(dataset, arguments)``, until the ledger is restored."""
        rule = LoaderRule(change)
        self._loaders.rules.append(rule)
        ledger.call("loader rule", lambda: self._loaders.rules.remove(rule))

    def feed_loaders(self, rule: FeedRule, ledger: Ledger) -> None:
        """From now on ``rule(loader, asked, feed)`` chooses how the batches of each iterator are made, until the ledger is restored."""
        ledger.call("feed rule", self._loaders.feed_by(rule))

    @property
    def training_loader(self) -> int | None:
        """The place in ``loaders`` of the one that most backward passes were fed from; None where no batch was heard of before one."""
        fed = self._loaders.fed
        return max(fed, key=fed.__getitem__) if fed else None

    @property
    def loaders_that_train(self) -> list[int]:
        """The places in ``loaders`` of all that a backward pass was fed from."""
        return sorted({self._loaders.first_like(number) for number in self._loaders.fed})

    @property
    def live_loaders(self) -> list[Any]:
        """The DataLoaders themselves, in the order in which they were made."""
        return list(self._loaders.alive)

    @property
    def training_loaders(self) -> list[Any]:
        """Those of ``live_loaders`` that train, as far as is known: all of them where no backward pass was fed from any."""
        train = self.loaders_that_train
        return [loader for loader in self.live_loaders if not train or self.first_loader_like(loader) in train]

    def number_of_loader(self, loader: Any) -> int | None:
        """The place of a DataLoader in ``loaders``; None for one that was made before we came."""
        return self._loaders.number.get(loader)

    def first_loader_like(self, loader: Any) -> int | None:
        """The place of the first DataLoader that was made like this one: itself, or that of an epoch before."""
        return self._loaders.alike.get(loader)

    @staticmethod
    def way_of_loader(dataset: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """What loaders have in common that are made alike."""
        return way_of(dataset, arguments)

    @staticmethod
    def samples_in(batch: Any, asked: int | None = None) -> int | None:
        """How many samples a batch has; ``asked`` as many as its loader was made for. None where it cannot be told."""
        return samples_in(batch, asked)

    @staticmethod
    def rows_of(batch: Any, samples: int, start: int, stop: int) -> Any:
        """Some samples of a batch."""
        return rows(batch, samples, start, stop)

    without_hooks = staticmethod(without_hooks)  # for who must not import this room
    compiler_off = staticmethod(compiler_off)
    variables_of = staticmethod(variables_of)

    def without_scale(self, loss: Any) -> Any:
        """The loss that a GradScaler has scaled to this one, or this one itself."""
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

    # -- entering ---------------------------------------------------------------------------------------------------

    def introduce(self, roots: Iterable[Any], optimizers: Iterable[Any], loaders: Iterable[Any], losses: Iterable[Any] = ()) -> None:
        """In the place of ``install``, for somebody who has these objects in hand: nothing is looked for, and no step is heard of."""
        self._roots = {id(root): weakref.ref(root) for root in roots}
        self._losses = {id(loss): weakref.ref(loss) for loss in losses}
        for optimizer in optimizers:
            self._optimizers.meet(optimizer)
        self.compiled_by_script = any(map(is_compiled, self.roots))
        for loader in loaders:
            self._loaders.meet(loader)

    def made_anew(self, loader: Any, ledger: Ledger) -> Any:
        """This DataLoader as the rules would have made it: itself, where none has anything to say. Feeds act on it from here on."""
        return self._loaders.made_anew(loader, ledger)

    def first_step_done(self, backwards: int) -> None:
        """For somebody who steps himself: levers may act."""
        self.steps, self.backwards, self.backwards_in_last_step = 1, backwards, backwards

    def install(self) -> None:
        """Put the hooks in place. Called once, right after torch was imported."""
        torch, ledger = self.torch, self.ledger
        self._optimizers.hear(ledger, self)
        ledger.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward))
        ledger.set(torch.autograd, "grad", self._wrap_grad(torch.autograd.grad))
        self._loaders.hear_making(ledger)
        self._scalers.hear(ledger, self)
        if self.listener.wants_phases:
            self._loaders.hear_batches(ledger, self)
        distribution = torch.distributions.Distribution
        ledger.set(distribution, "__init__", self._wrap_distribution_init(distribution.__init__))
        self._look_for_roots()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        # A child that is forked once training has begun is a loader worker or a helper: it stays inert.
        if self.steps or self.backwards:
            self.asleep = True
            self.listener = Listener()

    def listen_for(self, listener: Listener) -> None:
        """From now on for this listener alone. A compiler does not see our hooks: it would trace what they do, and break its graphs there."""
        self.listener, self._unseen = Guarded(listener), True
        for root in self.roots:
            compiled = getattr(root, "_compiled_call_impl", None)
            if compiled is not None:  # by module.compile(): hooks are inside what is compiled
                self.ledger.set(root, "_compiled_call_impl", self._heard_from_outside(root, compiled))

    def _heard_from_outside(self, root: Any, compiled: Callable) -> Callable:
        module = weakref.ref(root)

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._root_begins(module(), args, kwargs)
            return compiled(*args, **kwargs)

        return call

    def rest(self) -> None:
        """Stop listening, for good: what stays costs two flag tests a step. Levers, and rules for loaders, stay.

        The optimizer hooks are not removed: torch iterates over their dictionary while it calls us.
        """
        self.asleep = True
        self.listener = Listener()
        self._stop_looking()
        for hooks in self._root_hooks.values():
            for hook in hooks:
                hook.remove()
        self._root_hooks.clear()

    # -- root modules -----------------------------------------------------------------------------------------------

    def _look_for_roots(self) -> None:
        modules = self.torch.nn.modules.module
        self._discovery = [
            modules.register_module_forward_pre_hook(self._any_forward_begins),
            modules.register_module_forward_hook(self._any_forward_ends, always_call=True),
        ]
        # torch.compile would warn the person of hooks that are ours, and soon gone.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks", category=UserWarning)
        self._filter = warnings.filters[0]
        self.ledger.call("global forward hooks", self._stop_looking)

    @property
    def looks_for_roots(self) -> bool:
        """While it does, hooks run around every module's forward; a compiler would trace them, and compile once more when they are gone."""
        return bool(self._discovery)

    def _stop_looking(self) -> None:
        for hook in self._discovery:
            hook.remove()
        self._discovery = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]  # a list; typeshed shows it as a sequence

    def _any_forward_begins(self, module: Any, args: tuple) -> None:
        self._depth += 1
        if self._depth > 1 or not self.torch.is_grad_enabled() or self.asleep:
            return
        key = id(module)
        known = self._roots.get(key)
        if known is not None and known() is module:
            return
        if self._in_backward and any(module is part for root in self.roots for part in root.modules()):
            return  # a checkpoint computes it again
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
            self._root_begins(module, args, {})  # this very call has passed its own pre-hooks already

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
            self._under_autocast[id(module)] = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.listener.forward_begin(module, args, kwargs)
        self._do_then()

    def _root_ends(self, module: Any, args: tuple, output: Any) -> None:
        if self._unseen:  # nobody waits for the end of a forward pass
            return
        if not self.asleep and self.torch.is_grad_enabled():
            self.listener.forward_end(module, output)

    def _keep_out_of_pickles(self) -> None:
        if not self._pickles_guarded:
            self._pickles_guarded = True
            keep_out_of_pickles(self.torch, self.ledger, Scene)

    # -- backward ---------------------------------------------------------------------------------------------------

    def _wrap_backward(self, backward: Callable) -> Callable:
        scene = self

        @wraps(backward)
        def backward_heard(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if scene.asleep or scene._in_backward:  # a reentrant checkpoint calls backward inside a backward pass
                return backward(tensors, *args, **kwargs)
            if scene.boundaries.forward_or_backward_begins():
                scene._step_ended()
            scene._loaders.backward_begins()
            roots = (tensors,) if isinstance(tensors, scene.torch.Tensor) else tuple(tensors)
            scene.create_graph_seen |= _creates_graph(args, kwargs)
            scene.anomaly_seen = scene.torch.is_anomaly_enabled()
            scene._note_autocast()
            scene.listener.backward_begin(tuple(map(scene.without_scale, roots)))
            scene._do_then()
            scene._in_backward = True
            try:
                result = backward(tensors, *args, **kwargs)
            finally:
                scene._in_backward = False
            scene.backwards += 1
            scene.closure_steps |= scene._optimizers.stepping
            scene.boundaries.backward_ended()
            scene.listener.backward_end()
            return result

        return backward_heard

    def _note_autocast(self) -> None:
        """Forward passes of an evaluation do not count: another one of the same root comes before the backward pass."""
        self.autocast_seen |= any(self._under_autocast.values())
        self._under_autocast.clear()

    def _wrap_grad(self, grad: Callable) -> Callable:
        scene = self

        @wraps(grad)
        def grad_heard(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            scene.create_graph_seen |= _creates_graph(args, kwargs)
            scene._note_autocast()
            before, scene._in_backward = scene._in_backward, True
            try:
                return grad(outputs, inputs, *args, **kwargs)
            finally:
                scene._in_backward = before

        return grad_heard

    def _wrap_distribution_init(self, init: Callable) -> Callable:
        scene = self

        @wraps(init)
        def init_heard(distribution: Any, *args: Any, **kwargs: Any) -> None:
            scene.distributions_seen = True
            init(distribution, *args, **kwargs)

        return init_heard

    # -- optimizers, and the ends of steps --------------------------------------------------------------------------

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
        """A GradScaler found infinite gradients and did not call the optimizer; the cycle has ended all the same."""
        if self.boundaries.optimizer_stepped(id(optimizer)):
            self._step_ended()

    def _step_ended(self) -> None:
        if not self.steps and self.torch.utils.data.get_worker_info() is not None:
            self.asleep = True  # a loader worker that computes gradients of its own
            return
        self.steps += 1
        self.backwards_in_last_step = self.backwards - self._backwards_at_step
        self._backwards_at_step = self.backwards
        if self.steps <= 2:  # not as a root is found: its compiler would trace the question
            self.compiled_by_script |= any(map(is_compiled, self.roots))
        if self.steps == 2 and self._discovery:
            self._stop_looking()
            self._depth = 0
        self.listener.step_end()

    def _do_then(self) -> None:
        """What a listener wants done once, when all have heard: what that raises reaches the program, as the exception of a signal handler does."""
        if self.then is not None:
            then, self.then = self.then, None
            then()

    # -- wrapping a root's forward ----------------------------------------------------------------------------------

    def wrap_forward(self, root: Any, wrapper: Callable[[Callable], Callable], ledger: Ledger) -> Callable[[], None]:
        """Replace ``root.forward`` by ``wrapper(root.forward)`` in the instance; names, type and state_dict stay.

        The wrapper sees training and evaluation alike. Returns what takes it off again (it must be the outermost then).
        """
        self._keep_out_of_pickles()
        wrapped = wrapper(root.forward)
        wrapped.flatout = True  # type: ignore[attr-defined]
        mark = ledger.mark()
        ledger.set(root, "forward", wrapped)
        return lambda: ledger.restore(mark)


def _creates_graph(args: tuple, kwargs: dict) -> bool:
    """Whether a call of ``backward`` or ``grad`` wants to differentiate again; Tensor.backward passes it by position."""
    return bool(kwargs.get("create_graph", len(args) > 2 and args[2]))
