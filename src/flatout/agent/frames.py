"""Finds the user's own line on a stack, past torch, other libraries, Python itself and flatout."""

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from flatout.schema.findings import SourceLocation

FLATOUT_DIR = str(Path(__file__).resolve().parents[1]) + "/"
STDLIB_DIRS = tuple(
    {
        str(Path(path)) + "/"
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib")
    }
)
PACKAGE_DIRS = ("/site-packages/", "/dist-packages/")
Line = tuple[CodeType, int]  # a function's code, and the line in its file


@lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether a file is the user's own source, not that of a library, Python, flatout or generated code."""
    return bool(filename) and not (
        filename.startswith(("<", FLATOUT_DIR))
        or any(part in filename for part in PACKAGE_DIRS)
        or filename.startswith(STDLIB_DIRS)
        or is_installed(filename)
    )


def user_modules() -> Iterator[ModuleType]:
    """The imported modules of the user, the script included."""
    for name, module in list(sys.modules.items()):
        entry = _MODULES.get(name)
        if entry is None or entry[0] is not module:  # cached: there are thousands, and saving must be fast
            file = getattr(module, "__file__", None)
            users = isinstance(file, str) and os.path.isabs(file) and is_user_file(file)
            entry = _MODULES[name] = module, isinstance(module, ModuleType) and (name == "__main__" or users)
        if entry[1]:
            yield module


_MODULES: dict[str, tuple[Any, bool]] = {}


def user_sources() -> set[str]:
    """The absolute paths of the user's own files that are imported, the script included."""
    files = {os.path.abspath(getattr(module, "__file__", None) or "") for module in user_modules()}
    return set(filter(is_user_file, files))


def is_installed(filename: str) -> bool:
    """Whether a file lies where packages were installed under an unusual path: `pip install --target`."""
    return any(
        filename.startswith(f"{folder}/") and _holds_packages(folder)
        for folder in sys.path
        if folder.startswith("/")
    )


@lru_cache(maxsize=256)
def _holds_packages(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


@lru_cache(maxsize=4096)
def is_torch(filename: str) -> bool:
    return (
        "/site-packages/torch/" in filename
        or "/dist-packages/torch/" in filename
        or filename.startswith(FLATOUT_DIR)
    )


def user_line(frame: FrameType | None) -> Line | None:
    """Return the innermost user line on the stack; without one, a line of a library other than torch."""
    library: Line | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            return frame.f_code, frame.f_lineno
        if library is None and not is_torch(filename) and not filename.startswith(("<", *STDLIB_DIRS)):
            library = frame.f_code, frame.f_lineno
        frame = frame.f_back
    return library


def place_of(line: Line | None) -> SourceLocation | None:
    return place_at(*location_parts(line)) if line is not None else None


def location_parts(line: Line) -> tuple[str, int, str]:
    code, number = line
    return code.co_filename, number, "" if code.co_name == "<module>" else qualified_name(code)


def qualified_name(code: CodeType) -> str:
    """Return the name of a function with that of its class; Python 3.10 knows the function's only."""
    return getattr(code, "co_qualname", code.co_name)


def place_at(filename: str, line: int, function: str = "") -> SourceLocation:
    return SourceLocation(filename, line, 0, function, linecache.getline(filename, line).strip())
