"""The Python of the program, which may be another than flatout's own (uv tool, pipx, another environment)."""

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache

TIMEOUT_S = 60.0  # a first start from a network folder
VERSIONS_SCRIPT = """
import json, platform, sys
found = {}
try:
    from importlib.metadata import PackageNotFoundError, version
    for name in sys.argv[1:]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
except ImportError:
    pass
print(json.dumps([platform.python_version(), found]))
"""


def leave_uvx() -> None:
    """Take the environment of `uvx flatout` off the PATH, where `python` would be flatout's own, without torch."""
    first, _, rest = os.environ.get("PATH", "").partition(os.pathsep)
    activated = os.environ.get("VIRTUAL_ENV") == sys.prefix
    if "UV" in os.environ and not activated and first == os.path.dirname(sys.executable) and not _has_torch():
        os.environ["PATH"] = rest


def _has_torch() -> bool:
    return any(os.path.isdir(os.path.join(folder or ".", "torch")) for folder in sys.path)


def program_python() -> str:
    """Return the Python for a script that is named without one: the first on the PATH if flatout's own has no torch."""
    if _has_torch():
        return sys.executable
    return next(filter(None, map(shutil.which, ("python", "python3"))), sys.executable)


def python_of(argv: Sequence[str]) -> str:
    """Return the Python that a command starts: itself, that of its first line (#!), or `program_python()`."""
    path = shutil.which(argv[0]) if argv else None
    if path is None:
        return program_python()
    if os.path.basename(path).startswith("python"):
        return path
    try:
        with open(path, "rb") as file:
            line = file.readline(512).decode(errors="replace")
    except OSError:
        line = ""
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    found = next((word for word in words if os.path.basename(word).startswith("python")), None)
    return (shutil.which(found) if found else None) or program_python()


def is_flatout_python(python: str) -> bool:
    """Whether a Python belongs to flatout's own environment. Links count as different: a venv's leads to its base."""
    return os.path.dirname(os.path.abspath(python)) == os.path.dirname(os.path.abspath(sys.executable))


@cache
def versions_of(python: str, *names: str) -> tuple[str, dict[str, str]]:
    """Return the version of another Python, and those of the named distributions that it has.

    Both are empty if it gives no answer."""
    import json  # here, because most programs run in flatout's own Python
    import subprocess

    try:
        process = subprocess.run(
            [os.path.abspath(python), "-c", VERSIONS_SCRIPT, *names],
            cwd="/",  # `-c` puts the folder first on the path, where a json.py may be
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        version, found = json.loads(process.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", {}
    return str(version), dict(found)
