"""Find a Kernel by name: built in, in a folder or file with a KERNEL, or a function with a reference."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from flatout.kernels import NAMES, load
from flatout.kernels.kernel import Implementation, Kernel

PARTS = {
    "reference": "the same function in plain torch, with the same arguments",
    "cases": "a function that returns a list of flatout.kernels.kernel.Case",
}


class SubjectError(LookupError):
    """The subject cannot be checked; the message says what, why, and what to do."""


def find(subject: str) -> Kernel:
    """``layer_norm``, ``folder``, ``path.py``, ``path.py:function``. Raises SubjectError."""
    if subject in NAMES:
        return load(subject)
    path_text, _, name = subject.partition(":")
    if not Path(path_text).exists():
        is_path = "/" in path_text or path_text.endswith(".py")
        hint = "Check the path." if is_path else f"The built-in kernels are {', '.join(NAMES)}."
        raise SubjectError(
            f"there is no kernel or file {path_text!r}. {hint} `flatout kernel new NAME` creates a starter folder."
        )
    module = _load(Path(path_text))
    kernel = getattr(module, name or "KERNEL", None)
    if isinstance(kernel, Kernel):
        return kernel
    if not name:
        raise SubjectError(
            f"{path_text} has no KERNEL. Name a function (`{path_text}:function`), or define KERNEL (`flatout kernel new NAME` shows how)."
        )
    if not callable(kernel):
        defined = (
            value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__
        )
        names = sorted(value.__name__ for value in defined if callable(value))
        raise SubjectError(f"{path_text} has no function {name!r}. It has {', '.join(names) or 'none'}.")
    for part, requirement in PARTS.items():
        if not callable(getattr(module, f"{name}_{part}", None)):
            raise SubjectError(
                f"{path_text} has no {part} for {name!r}. Add `{name}_{part}`: {requirement}. `flatout kernel new NAME` writes an example."
            )
    return Kernel(
        name=name,
        page=kernel.__doc__ or "",
        reference=getattr(module, f"{name}_reference"),
        implementations=(Implementation(name, kernel),),
        cases=getattr(module, f"{name}_cases"),
        wrong=getattr(module, f"{name}_wrong", {}),
        operators=getattr(module, f"{name}_operators", {}),
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
    folders = [str(path)] if path.is_dir() else None
    spec = spec_from_file_location(stem, file, submodule_search_locations=folders)
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
