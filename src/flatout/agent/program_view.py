"""What is known of a running training script: its live objects and facts about them. Levers see this."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.batches import rows, samples_in
from flatout.agent.compilers import compiler_off
from flatout.agent.frames import user_sources
from flatout.agent.loader_methods import wrap_loader_method
from flatout.agent.loaders import FeedRule, LoaderRule, Loaders, loader_key
from flatout.agent.names import variables_of
from flatout.agent.pickles import without_hooks
from flatout.agent.steps import StepBoundaries
from flatout.job.trust import file_digest
from flatout.schema.program import Ledger

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


class Scalers:
    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._scalers: dict[int, weakref.ref[Any]] = {}
        self._unscaled: dict[int, tuple[weakref.ref[Any], Any]] = {}

    @property
    def enabled(self) -> list[Any]:
        return [
            scaler for ref in self._scalers.values() if (scaler := ref()) is not None and scaler.is_enabled()
        ]

    def without_scale(self, loss: Tensor) -> Any:
        """Return the unscaled loss of a scaled one; other losses are returned unchanged."""
        entry = self._unscaled.get(id(loss))
        return entry[1] if entry is not None and entry[0]() is loss else loss

    def observe(self, ledger: Ledger, context: Any) -> None:
        scaler_class = self.torch.amp.GradScaler
        scale, step = scaler_class.scale, scaler_class.step

        @wraps(scale)
        def hooked_scale(scaler: object, outputs: object) -> Any:
            scaled = scale(scaler, outputs)
            self._scalers.setdefault(id(scaler), weakref.ref(scaler))
            if scaled is not outputs and isinstance(scaled, self.torch.Tensor):
                self._unscaled = {id(scaled): (weakref.ref(scaled), outputs)}
            return scaled

        @wraps(step)
        def hooked_step(scaler: Any, optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
            events_before = context.optimizer_events
            result = step(scaler, optimizer, *args, **kwargs)
            # With infinite gradients the optimizer was not called, but the cycle has ended all the same.
            if scaler.is_enabled() and context.optimizer_events == events_before and not context.paused:
                context.optimizer_skipped(optimizer)
            return result

        ledger.set(scaler_class, "scale", hooked_scale)
        ledger.set(scaler_class, "step", hooked_step)


class Optimizers:
    """Weak references to optimizers, in creation order. ``boundaries`` is told of new and deleted ones."""

    def __init__(self, boundaries: StepBoundaries) -> None:
        self._boundaries = boundaries
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._stepping: list[int] = []  # outermost first

    @property
    def alive(self) -> list[Any]:
        return [optimizer for ref in self._refs.values() if (optimizer := ref()) is not None]

    @property
    def stepping(self) -> bool:
        return bool(self._stepping)

    def observe(self, ledger: Ledger, step_hooks: Ledger, context: Any) -> None:
        """Report each outermost step to ``context`` until ``step_hooks`` is restored, new optimizers until ``ledger`` is."""
        from torch.optim import optimizer as torch_optimizer

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.paused and self._enter(optimizer):
                context.optimizer_begins(optimizer)

        def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not context.paused and self._exit(optimizer):
                context.optimizer_ends(optimizer)

        step_hooks.on_restore(
            "optimizer step hook", torch_optimizer.register_optimizer_step_pre_hook(before_step).remove
        )
        step_hooks.on_restore(
            "optimizer step hook", torch_optimizer.register_optimizer_step_post_hook(after_step).remove
        )
        ledger.set(
            torch_optimizer.Optimizer,
            "__init__",
            self._wrap_init(torch_optimizer.Optimizer.__init__, context),
        )

    def _wrap_init(self, init: Callable[..., Any], context: Any) -> Callable[..., Any]:
        @wraps(init)
        def hooked_init(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            init(optimizer, *args, **kwargs)
            if not context.paused:
                self.register(optimizer)

        return hooked_init

    def register(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        boundaries, refs = self._boundaries, self._refs

        def deleted(_: object) -> None:
            boundaries.optimizer_deleted(key)
            refs.pop(key, None)

        refs[key] = weakref.ref(optimizer, deleted)
        boundaries.optimizer_created(key)

    def _enter(self, optimizer: Optimizer) -> bool:
        self._pop(optimizer)  # a step that raised left its entry behind
        self._stepping.append(id(optimizer))
        return len(self._stepping) == 1

    def _exit(self, optimizer: Optimizer) -> bool:
        self._pop(optimizer)
        if self._stepping:  # the inner optimizer of a wrapper: only the wrapper counts
            self._boundaries.optimizer_deleted(id(optimizer))
            self._refs.pop(id(optimizer), None)
            return False
        if id(optimizer) not in self._refs:
            self.register(optimizer)
        return True

    def _pop(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def ignore_wrappers_of(self, optimizer: Optimizer) -> None:
        """Do not wait for a wrapper that shares the parameter groups: it may never step itself.

        SAM, for example, has two methods of its own, and its inner optimizer steps.
        """
        groups = {id(group) for group in optimizer.param_groups}
        for wrapper in self.alive:
            if wrapper is not optimizer and any(id(group) in groups for group in wrapper.param_groups):
                self._boundaries.optimizer_deleted(id(wrapper))


MAX_LAYER_NAMES = 32  # of layers
MAX_ROOTS = 16  # with more root modules, the script calls its model in pieces


class ProgramView:
    """The live objects of a script, as weak references: attaching keeps no model or loader alive."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
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
        self.flags_of_script: dict[str, bool] = {}  # while flatout asks for other kernels
        self.print_report: Callable[[str, str], None] | None = None  # prints such a message at once
        self.shared_samples: Any = None  # where the runs of a search pass on their cached samples
        self.data_parallel: Any = (
            None  # the installed state of `data_parallel`, for levers that act through it
        )
        self.graph_passes: list[Any] = []  # graph passes of levers, before `compile` compiles the graph
        # modules that `compile` excludes, because levers change their outputs
        self.uncompiled: list[Any] = []
        self._loaders = Loaders(torch)
        self._scalers = Scalers(torch)
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._losses: dict[int, weakref.ref[Any]] = {}
        self._optimizers = Optimizers(self.boundaries)

    @property
    def roots(self) -> list[Any]:
        return [root for ref in self._roots.values() if (root := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        return self._optimizers.alive

    @property
    def loss_modules(self) -> list[Any]:
        return [loss for ref in self._losses.values() if (loss := ref()) is not None]

    @property
    def scalers(self) -> list[Any]:
        return self._scalers.enabled

    @property
    def loaders(self) -> list[dict[str, Any]]:
        return self._loaders.descriptions

    @property
    def parameters(self) -> list[Any]:
        """Every trainable parameter, without duplicates: of the optimizers, else of the root modules."""
        from_optimizers = [
            p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        parameters = from_optimizers or [p for root in self.roots for p in root.parameters()]
        return [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]

    @property
    def device(self) -> Any:
        return next((p.device for p in self.parameters), self.torch.device("cpu"))

    @property
    def device_type(self) -> str:
        return str(self.device.type)

    @property
    def model_is_split(self) -> bool:
        return len(self.roots) > MAX_ROOTS

    @staticmethod
    def unwrap_ddp(root: Module) -> Any:
        """Return the module inside a wrapper that averages gradients: one rank alone can call it."""
        return root.module if type(root).__name__ == "DistributedDataParallel" else root

    @property
    def ddp_modules(self) -> list[Any]:
        """The script's DistributedDataParallel modules that train: root modules, or inside of one."""
        modules = {
            id(module): module
            for root in self.roots
            for module in root.modules()
            if type(module).__name__ == "DistributedDataParallel"
        }
        return [
            module
            for module in modules.values()
            if type(module).__module__ == "torch.nn.parallel.distributed"
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
        return self._loaders.data_is_random()

    def change_loaders(self, rule: LoaderRule, ledger: Ledger) -> None:
        """Make DataLoaders with ``rule(dataset, arguments)`` from now on, until the ledger is restored."""
        self._loaders.rules.append(rule)
        ledger.on_restore("loader rule", lambda: self._loaders.rules.remove(rule))

    def feed_loaders(self, rule: FeedRule, ledger: Ledger) -> None:
        """Let ``rule(loader, asked, feed)`` choose how batches are made, until the ledger is restored."""
        ledger.on_restore("feed rule", self._loaders.add_feed_rule(rule))

    @property
    def training_loader(self) -> int | None:
        """The position in ``loaders`` of the loader that fed most backward passes, or None."""
        fed = self._loaders.backward_counts
        return max(fed, key=fed.__getitem__) if fed else None

    @property
    def training_loader_numbers(self) -> list[int]:
        """The positions in ``loaders`` of all that fed a backward pass."""
        return sorted({self._loaders.first_like(number) for number in self._loaders.backward_counts})

    @property
    def live_loaders(self) -> list[Any]:
        """The living DataLoaders, in creation order."""
        return list(self._loaders.script_args)

    @property
    def training_loaders(self) -> list[Any]:
        """The loaders in ``live_loaders`` that train; all of them if no backward pass was fed from any."""
        positions = self.training_loader_numbers
        return [
            loader
            for loader in self.live_loaders
            if not positions or self.first_loader_like(loader) in positions
        ]

    def number_of_loader(self, loader: DataLoader) -> int | None:
        """Return the position of a DataLoader in ``loaders``; None if it was made before flatout attached."""
        return self._loaders.positions.get(loader)

    def first_loader_like(self, loader: DataLoader) -> int | None:
        """Return the position of the first DataLoader made like this one, e.g. in an earlier epoch."""
        return self._loaders.first_alike.get(loader)

    def wrap_loader_method(
        self, what: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], ledger: Ledger
    ) -> None:
        wrap_loader_method(self.torch, what, wrap, ledger)

    # for packages that must not import this one
    loader_key = staticmethod(loader_key)
    samples_in = staticmethod(samples_in)
    rows_of = staticmethod(rows)
    without_hooks = staticmethod(without_hooks)
    compiler_off = staticmethod(compiler_off)
    variables_of = staticmethod(variables_of)

    def without_scale(self, loss: Tensor) -> Any:
        return self._scalers.without_scale(loss)

    def kernel_flags(self) -> dict[str, bool]:
        """Which kernels the script asks for, also while flatout asks for others (`flatout.guard.deterministic`)."""
        cudnn = self.torch.backends.cudnn
        return self.flags_of_script or {
            "deterministic": self.torch.are_deterministic_algorithms_enabled(),
            "cudnn.deterministic": cudnn.deterministic,
            "cudnn.benchmark": cudnn.benchmark,
        }

    def report(self, lever: str, sentence: str) -> None:
        if self.print_report is None:
            self.reports.append((lever, sentence))
        else:
            self.print_report(lever, sentence)

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
            "threads": self.torch.get_num_threads(),
            "backwards_per_step": self.backwards_in_last_step,
            "closure_steps": self.closure_steps,
            "sources": {os.path.relpath(file): file_digest(file) for file in sorted(user_sources())},
            "boundaries": "backward" if self.boundaries.by_backward else "optimizer",
        }


def layer_counts(roots: Iterable[Any]) -> dict[str, int]:
    """Return class name -> number of modules, the most frequent first, at most 32.

    A subclass of a layer of torch counts as that layer; containers are left out. A module that two roots
    share counts once.
    """
    modules = {id(module): module for root in roots for module in root.modules()}
    counts = Counter(_layer_name(type(module)) for module in modules.values())
    return dict(
        sorted(((name, n) for name, n in counts.items() if name), key=lambda item: (-item[1], item[0]))[
            :MAX_LAYER_NAMES
        ]
    )


def _layer_name(kind: type) -> str:
    for base in kind.__mro__:
        if base.__module__ == "torch.nn.modules.module":
            break
        if base.__module__ == "torch.nn.modules.container":
            return ""
        if base.__module__.startswith("torch.nn.modules."):
            return base.__name__
    return kind.__name__
