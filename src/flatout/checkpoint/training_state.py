"""What a running script trains, and its complete state, by the names that the script uses.

No function of the script is called: its own ``state_dict`` may do anything, and flatout may have wrapped
parts of it. Modules, optimizers and similar objects are held weakly. For a module, the dictionaries of its
layers are also held until the module is gone, so that its final state is still available.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.names import names_of, snake_case, visible_objects
from flatout.agent.schedulers import Schedulers
from flatout.checkpoint.metadata import SavedObject
from flatout.checkpoint.random_states import random_states

if TYPE_CHECKING:
    from torch.nn import Module

    from flatout.schema.program import TrainingContext

WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
NON_WORD = re.compile(r"\W+")
STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def unwrapped(module: Module) -> Any:
    """The script's own module, inside the wrappers of torch."""
    while type(module).__name__ in WRAPPERS and type(module).__module__.startswith("torch."):
        module = getattr(module, WRAPPERS[type(module).__name__])
    return module


class TrackedObject:
    """One object of the script. ``name`` is the name of its state, ``code`` its spelling in the script."""

    def __init__(
        self, kind: str, thing: object, name: str, code: str, on_deleted: Callable[[], None]
    ) -> None:
        self.kind, self.name, self.code, self.type = kind, name, code, type(thing).__name__
        self.ref: Callable[[], Any] = weakref.ref(thing, lambda _: self._deleted(on_deleted))
        self.parts: Any = None

    def refresh(self) -> Any:
        """The object; None when it is gone."""
        thing = self.ref()
        if thing is not None and self.kind == "modules":
            self.parts = list(_layers(thing, ""))
        elif thing is not None and self.kind == "optimizers":
            self.parts = thing.param_groups, thing.state
        return thing

    def _deleted(self, on_deleted: Callable[[], None]) -> None:
        if self.kind in ("modules", "optimizers"):
            on_deleted()
        self.parts = None


class TrainingState:
    """Finds the training state of a script.

    Calls ``on_deleted`` when a module or an optimizer of the training dies. Its state is available until then."""

    def __init__(
        self, context: TrainingContext, schedulers: Schedulers, on_deleted: Callable[[], None]
    ) -> None:
        self.context, self.torch = context, context.torch
        self.schedulers, self.on_deleted = schedulers, on_deleted
        self.notes: dict[str, str] = {}  # place -> what a checkpoint cannot restore
        self.sharded = False  # weights are sharded over several ranks
        self._tracked: dict[int, TrackedObject] = {}
        self._tensors: dict[str, Callable[[], Any]] = {}

    def find(self, frame: FrameType | None) -> None:
        """Find the training state. ``frame``: where to look for variable names."""
        named = list(visible_objects(frame))
        optimizers, scalers = self.context.optimizers, self.context.scalers
        trained = {
            id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        }
        modules = self._modules(named, trained)
        objects = [
            *(("modules", thing) for thing in modules),
            *(("optimizers", thing) for thing in optimizers),
            *(("schedulers", thing) for thing in self.schedulers.outermost),
            *(("scalers", thing) for thing in scalers),
        ]
        wrappers = self._wrappers(named, modules)
        names = names_of([*(thing for _, thing in objects), *wrappers], named)
        names = {id(unwrapped(wrapper)): names[id(wrapper)] for wrapper in wrappers} | names
        self._tracked = {
            key: tracked
            for key, tracked in self._tracked.items()
            if tracked.ref() is not None and any(thing is tracked.ref() for _, thing in objects)
        }
        for kind, thing in objects:
            if id(thing) not in self._tracked:
                name, code = self._name_of(thing, names)
                self._tracked[id(thing)] = TrackedObject(kind, thing, name, code, self.on_deleted)
                self._note(kind, thing, name)
        for tracked in self._tracked.values():
            tracked.refresh()
        covered = {id(p) for module in modules for p in _parameters(module)}
        self.sharded = any(hasattr(p, "_local_tensor") for module in modules for p in _parameters(module))
        self._tensors = self._free_tensors(
            named, {key: p for key, p in trained.items() if key not in covered}, covered
        )

    @property
    def live(self) -> bool:
        """Whether any trained object still exists."""
        return bool(self.context.roots or self.context.optimizers) or any(
            ref() is not None for ref in self._tensors.values()
        )

    def state(self) -> dict[str, Any]:
        """The present state of everything found: the script's own tensors, in new dictionaries."""
        state: dict[str, Any] = {kind: {} for kind in ("modules", "optimizers", "schedulers", "scalers")}
        for tracked in self._tracked.values():
            thing = tracked.refresh()
            if tracked.kind == "modules" and tracked.parts is not None:
                state["modules"][tracked.name] = _module_state(tracked.parts)
            elif tracked.kind == "optimizers" and tracked.parts is not None:
                state["optimizers"][tracked.name] = _optimizer_state(self.torch, *tracked.parts)
            elif thing is not None:
                state[tracked.kind][tracked.name] = self._own_state(tracked.kind, thing)
        tensors = {
            name: tensor.detach() for name, ref in self._tensors.items() if (tensor := ref()) is not None
        }
        return {**state, "tensors": tensors, "random": random_states(self.torch)}

    def contents(self, state: dict[str, Any]) -> tuple[SavedObject, ...]:
        """The content of a state, as a list for users."""
        contents = []
        for tracked in self._tracked.values():
            if tracked.name in state[tracked.kind]:
                module = state["modules"].get(tracked.name) if tracked.kind == "modules" else None
                numel = sum(t.numel() for t in module["state"].values()) if module is not None else 0
                contents.append(SavedObject(tracked.kind, tracked.name, tracked.code, tracked.type, numel))
        for name, tensor in state["tensors"].items():
            contents.append(SavedObject("tensors", name, name, "Tensor", tensor.numel()))
        return tuple(contents)

    # -- finding

    def _modules(self, named: list[tuple[str, Any]], trained: dict[int, Any]) -> list[Any]:
        roots = _outermost([unwrapped(root) for root in self.context.roots])
        kind = self.torch.nn.Module
        others = _outermost([unwrapped(value) for _, value in named if isinstance(value, kind)])
        covered = {id(p) for root in roots for p in _parameters(root)}
        for other in others:
            inner = set(map(id, _tree(other)))
            parts = [root for root in roots if id(root) in inner and root is not other]
            missing = [p for p in _parameters(other) if id(p) in trained and id(p) not in covered]
            if missing or len(parts) > 1:
                roots = [root for root in roots if id(root) not in inner] + [other]
                covered |= {id(p) for p in _parameters(other)}
        kinds = {type(root) for root in roots}
        copies = [
            other
            for other in others
            if (type(other) in kinds or type(getattr(other, "module", None)) in kinds)
            and not any(id(p) in covered for p in _parameters(other))
        ]
        return roots + copies

    def _wrappers(self, named: list[tuple[str, Any]], modules: list[Any]) -> list[Any]:
        wanted = set(map(id, modules))
        return [
            value
            for _, value in named
            if isinstance(value, self.torch.nn.Module)
            and id(value) not in wanted
            and id(unwrapped(value)) in wanted
        ]

    def _name_of(self, thing: object, names: dict[int, str]) -> tuple[str, str]:
        code = names.get(id(thing), "")
        taken = {tracked.name for tracked in self._tracked.values()} | {"random", "tensors"}
        stem = NON_WORD.sub("_", code).strip("_") or snake_case(type(thing).__name__)
        name, number = stem, 2
        while name in taken:
            name, number = f"{stem}{number}", number + 1
        return name, code or name

    def _free_tensors(
        self, named: list[tuple[str, Any]], uncovered: dict[int, Any], covered: set[int]
    ) -> dict[str, Callable[[], Any]]:
        tensor_class = self.torch.Tensor
        tensors = dict(uncovered)
        if not tensors and not covered:
            for _, value in named:
                items = value.values() if type(value) is dict else value
                for item in (value, *(items if type(value) in (dict, list, tuple) else ())):
                    if isinstance(item, tensor_class) and item.is_leaf and item.requires_grad:
                        tensors[id(item)] = item
        names = names_of(tensors.values(), named)
        return {
            names.get(key, f"weight_{i}"): weakref.ref(value)
            for i, (key, value) in enumerate(tensors.items())
        }

    # -- custom state

    def _note(self, kind: str, thing: Module, name: str) -> None:
        if kind == "modules":
            base = self.torch.nn.Module
            custom = {
                type(module).__name__
                for module in _tree(thing)
                if any(getattr(type(module), method) is not getattr(base, method) for method in STATE_METHODS)
                or module._state_dict_hooks
                or module._state_dict_pre_hooks
            }
        elif kind == "optimizers":
            is_own = type(thing).state_dict is not self.torch.optim.Optimizer.state_dict
            custom = {type(thing).__name__} if is_own else set()
        else:
            is_own = kind == "schedulers" and not type(thing).__module__.startswith("torch.")
            custom = {type(thing).__name__} if is_own else set()
        if custom:
            names = ", ".join(sorted(custom)[:3])
            self.notes[name] = f"additions and changes by the custom state_dict of {names}"

    def _own_state(self, kind: str, thing: Any) -> dict[str, Any]:
        if type(thing).__module__.startswith("torch."):  # torch's own methods only read
            return dict(thing.state_dict())
        return {name: value for name, value in vars(thing).items() if name not in ("optimizer", "_optimizer")}


def _outermost(modules: Iterable[Any]) -> list[Any]:
    once = list({id(module): module for module in modules}.values())
    parts = {id(part) for module in once for part in list(_tree(module))[1:]}
    return [module for module in once if id(module) not in parts]


def _tree(module: Module) -> Iterator[Any]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _tree(child)


def _parameters(module: Module) -> Iterator[Any]:
    return (p for child in _tree(module) for p in child._parameters.values() if p is not None)


def _layers(module: Module, prefix: str) -> Iterator[tuple[str, Any, Any, Any, Any]]:
    yield prefix, module._parameters, module._buffers, module._non_persistent_buffers_set, module._version
    for name, child in module._modules.items():
        if child is not None:
            yield from _layers(child, f"{prefix}{name}.")


def _module_state(layers: list[tuple[str, Any, Any, Any, Any]]) -> dict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict()
    versions = {}
    for prefix, parameters, buffers, non_persistent, version in layers:
        versions[prefix[:-1]] = version
        state.update(
            (prefix + name, value.detach()) for name, value in parameters.items() if value is not None
        )
        state.update(
            (prefix + name, value.detach())
            for name, value in buffers.items()
            if value is not None and name not in non_persistent
        )
    return {"state": state, "versions": versions}


def _optimizer_state(
    torch: ModuleType, groups: list[dict[str, Any]], state: Mapping[Any, Any]
) -> dict[str, Any]:
    numbers: dict[int, int] = {}
    packed = []
    for group in groups:
        for p in group["params"]:
            numbers.setdefault(id(p), len(numbers))
        packed.append(
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [numbers[id(p)] for p in group["params"]],
            }
        )
    packed_state = {
        (numbers.get(id(key)) if isinstance(key, torch.Tensor) else key): value
        for key, value in state.items()
    }
    packed_state.pop(None, None)
    return {"state": packed_state, "param_groups": packed}
