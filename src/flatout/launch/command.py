"""Parse the command after `flatout run`: its program, its script, and Python options that disable flatout."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.job.secrets import masked
from flatout.schema.errors import ProgramNotFound, UsageError

TAKES_ARGUMENT = {"-X", "-W", "--check-hash-based-pycs"}


@dataclass(frozen=True)
class Command:
    """A parsed command.

    ``argv`` is what will be executed; ``script`` is the Python file it runs, if known."""

    typed: tuple[str, ...]
    argv: tuple[str, ...]
    script: Path | None = None
    module: str | None = None
    closed: str | None = None  # the Python option that disables flatout (-I, -E, -S)
    folder: Path | None = None  # working directory; None: the current one
    environment: tuple[tuple[str, str], ...] = ()  # variables that differ from ours

    @property
    def title(self) -> str:
        """A short name for folders: that of the script, the module or the program."""
        name = self.script.stem if self.script else self.module or Path(self.argv[0]).name
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40] or "job"

    @property
    def shown(self) -> tuple[str, ...]:
        """The typed command without its secrets, safe to store and show."""
        return tuple(masked(self.typed))

    @property
    def digest(self) -> str:
        """A digest of the current folder and the command without its secrets, which may change each time."""
        return hashlib.sha256(
            "\0".join((*self.shown, os.getcwd())).encode(errors="surrogateescape")
        ).hexdigest()[:8]

    @property
    def script_digest(self) -> str:
        try:
            return hashlib.sha256(self.script.read_bytes()).hexdigest()[:16] if self.script else ""
        except OSError:
            return ""


def understand(typed: Sequence[str], folder: Path | None = None) -> Command:
    """Parse a command line that will run in ``folder``; None is the current one.

    Raises UsageError if it is empty, ProgramNotFound if the program or script is missing."""
    return replace(_understood(typed, folder or Path()), folder=folder)


def _understood(typed: Sequence[str], here: Path) -> Command:
    if not typed:
        raise UsageError(
            "no program was given: the command line is empty. Give a script (train.py) or a command (python train.py)."
        )
    first = typed[0]
    if first.endswith(".py"):
        _must_exist(here / first)
        return Command(tuple(typed), (sys.executable, *typed), Path(first))
    if not shutil.which(first):
        near = " Did you mean `python`?" if first.startswith("pyth") else ""
        raise ProgramNotFound(
            f"there is no program {first!r} on the PATH.{near} Give a script (train.py) or a command (python train.py)."
        )
    if Path(first).name.startswith("python"):
        return _python(typed, here)
    script = next(
        (here / word for word in typed[1:] if word.endswith(".py") and (here / word).is_file()), None
    )
    if script is None and (here / first).is_file():
        script = here / first
    return Command(tuple(typed), tuple(typed), script)


def _python(typed: Sequence[str], here: Path) -> Command:
    closed, at = None, 1
    while at < len(typed) and typed[at].startswith("-") and typed[at] not in ("-", "-m", "-c"):
        option = typed[at]
        if not option.startswith("--") and option[:2] not in TAKES_ARGUMENT:
            if option.endswith("m") and len(option) > 2:
                break
            closed = closed or next((f"-{letter}" for letter in option[1:] if letter in "IES"), None)
        at += 2 if option in TAKES_ARGUMENT else 1
    rest = typed[at:]
    if not rest or rest[0] in ("-", "-c"):
        return Command(tuple(typed), tuple(typed), closed=closed)
    if rest[0].startswith("-"):  # -m, or an option cluster that ends in it
        module = rest[1] if len(rest) > 1 else None
        return Command(tuple(typed), tuple(typed), _module_file(module, rest, here), module, closed)
    script = here / rest[0]
    _must_exist(script)
    return Command(tuple(typed), tuple(typed), script, closed=closed)


def _module_file(module: str | None, rest: Sequence[str], here: Path) -> Path | None:
    """Return the file of a module below this folder, or the script of a launcher (torch.distributed.run)."""
    if module is None:
        return None
    parts = Path(*module.split("."))
    if not parts.name:  # `python -m ""`
        return None
    for candidate in (here / parts.with_suffix(".py"), here / parts / "__main__.py"):
        if candidate.is_file():
            return candidate
    return next((here / word for word in rest[2:] if word.endswith(".py") and (here / word).is_file()), None)


def _must_exist(script: Path) -> None:
    if script.is_dir() and (script / "__main__.py").is_file():
        return
    if not script.is_file():
        raise ProgramNotFound(
            f"there is no script {str(script)!r} in {os.getcwd()}. Check the path, or change to the script's folder."
        )
