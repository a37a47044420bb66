"""The ledger of patches: only it changes foreign objects, so every change can be listed and undone."""

from __future__ import annotations

import sys

# every script under `flatout run` imports this file, and importing typing would take longest
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ABSENT = object()


class MissingTarget(AttributeError):
    """The patch target does not exist: the patch was written for another torch version."""


class Ledger:
    """Sets, lists and restores patches, last first.

    Patching something that does not exist raises an error with its name.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    def set(self, owner: object, name: str, value: object, *, new: bool = False) -> Any:
        """Set an attribute of a module, class or object; return the value it replaced.

        ``new`` allows an attribute that is missing in the owner's own dictionary (an instance attribute that
        shadows a method, for example). Undoing then deletes it again.
        """
        if not hasattr(owner, name) and not new:
            raise MissingTarget(f"{_title(owner)} has no attribute {name!r}")
        current = getattr(owner, name, None)
        own_value = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else current
        _assign(owner, name, value)
        table = _register_with_torchscript(current, value)

        def restore() -> None:
            table.pop(id(value), None)
            if own_value is _ABSENT:
                _remove(owner, name)
            else:
                _assign(owner, name, own_value)

        self._undo.append((f"{_title(owner)}.{name}", restore))
        return current

    def set_flag(self, owner: object, name: str, value: object) -> None:
        """Set a flag through its setter, which ``set`` bypasses: torch.backends' switches act there."""
        if not hasattr(owner, name):
            raise MissingTarget(f"{_title(owner)} has no attribute {name!r}")
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append((f"{_title(owner)}.{name}", lambda: setattr(owner, name, before)))

    def set_item(self, owner: Any, key: object, value: object) -> None:
        """Set an item of a dictionary (``os.environ``, a parameter group)."""
        before = owner.get(key, _ABSENT)
        owner[key] = value

        def restore() -> None:
            if before is _ABSENT:
                owner.pop(key, None)
            else:
                owner[key] = before

        self._undo.append((f"[{key!r}]", restore))

    def on_restore(self, title: str, undo: Callable[[], object]) -> None:
        """Record a change made by a call (a registered hook, a flag), with the function that undoes it."""
        self._undo.append((title, undo))

    def entries(self) -> list[str]:
        return [title for title, _ in self._undo]

    def mark(self) -> int:
        return len(self._undo)

    def restore(self, mark: int = 0) -> None:
        """Undo everything since ``mark``, last first. A failure does not prevent the other undo calls."""
        failures = []
        while len(self._undo) > mark:
            title, undo = self._undo.pop()
            try:
                undo()
            except Exception as error:
                failures.append(f"{title}: {type(error).__name__}: {error}")
        if failures:
            raise RuntimeError("could not undo " + "; ".join(failures))


def _register_with_torchscript(function: object, replacement: object) -> dict[int, str]:
    """Keep TorchScript working: it identifies torch's functions by address, not their replacements."""
    table: dict[int, str] = getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None) or {}
    if id(function) not in table or id(replacement) in table:
        return {}
    table[id(replacement)] = table[id(function)]
    return table


def _assign(owner: object, name: str, value: object) -> None:
    # nn.Module and Optimizer define their own __setattr__; a patch must bypass it.
    if isinstance(owner, type) or not hasattr(owner, "__dict__"):
        setattr(owner, name, value)
    else:
        try:
            object.__setattr__(owner, name, value)
        except TypeError:  # a module type rejects object.__setattr__
            setattr(owner, name, value)


def _remove(owner: object, name: str) -> None:
    if isinstance(owner, type):
        delattr(owner, name)
    else:
        vars(owner).pop(name, None)


def _title(owner: object) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__
