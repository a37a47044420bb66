"""Find a Kernel by name: built in, in a folder or file with a KERNEL, or a function with a reference."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.kernels import NAMES, load
from flatout.kernels.kernel import Implementation, Kernel


class SubjectError(LookupError):
    """The subject cannot be checked; the message says what, why, and what to do."""


def find(subject: str) -> Kernel:
    """``layer_norm``, ``folder``, ``path.py``, ``path.py:function``. Raises SubjectError."""
    if subject in NAMES:
        return load(subject)
    place, _, name = subject.partition(":")
    path = Path(place)
    if not path.exists():
        hint = (
            f"The built-in kernels are {', '.join(NAMES)}."
            if "/" not in place and not place.endswith(".py")
            else "Check the path."
        )
        raise SubjectError(
            f"there is no kernel or file {place!r}. {hint} `flatout kernel new NAME` creates a starter folder."
        )
    module = _load(path)
    if name and name != "KERNEL":
        return _of_function(module, path, name)
    found = getattr(module, "KERNEL", None)
    if not isinstance(found, Kernel):
        raise SubjectError(
            f"{place} has no KERNEL. Name a function (`{place}:function`), or define KERNEL (`flatout kernel new NAME` shows how)."
        )
    return found


def _of_function(module: ModuleType, path: Path, name: str) -> Kernel:
    """The Kernel of a function ``NAME``.

    Requires ``NAME_reference`` (or ``reference``) and ``NAME_cases`` (or ``cases``). ``NAME_wrong`` or
    ``wrong`` is an optional mapping of functions.
    """
    function = getattr(module, name, None)
    if isinstance(function, Kernel):
        return function
    if not callable(function):
        there = sorted(
            each
            for each, value in vars(module).items()
            if callable(value)
            and not each.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
        )
        raise SubjectError(f"{path} has no function {name!r}. It has {', '.join(there) or 'none'}.")
    parts: dict[str, Any] = {}
    for part, what in (
        ("reference", "the same function in plain torch, with the same arguments"),
        ("cases", "a function that returns a list of flatout.kernels.kernel.Case"),
    ):
        parts[part] = getattr(module, f"{name}_{part}", None) or getattr(module, part, None)
        if not callable(parts[part]):
            raise SubjectError(
                f"{path} has no {part} for {name!r}. Add `{name}_{part}`: {what}. `flatout kernel new NAME` writes an example."
            )
    wrong = getattr(module, f"{name}_wrong", None) or getattr(module, "wrong", None) or {}
    operators = getattr(module, f"{name}_operators", None) or getattr(module, "operators", None) or {}
    return Kernel(
        name=name,
        page=function.__doc__ or "",
        reference=parts["reference"],
        implementations=(Implementation(name, function),),
        cases=parts["cases"],
        wrong=dict(wrong),
        operators=dict(operators),
    )


def _load(path: Path) -> ModuleType:
    """Import a file, or a folder with an ``__init__.py``, under its own name.

    Its folder is on the path, as for a script.
    """
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file():
        raise SubjectError(
            f"{path} is a folder without an __init__.py. Name a file in it, or add one with a KERNEL."
        )
    stem = path.resolve().name.removesuffix(".py")
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location(
        stem, file, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} is not a Python file. Name one, as in `path.py:function`.")
    module = module_from_spec(spec)
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SubjectError(
            f"{path} cannot be imported: {type(error).__name__}: {error}. Run `python {file}` to see where."
        ) from error
    return module
