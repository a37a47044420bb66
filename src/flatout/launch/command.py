"""Parse the command after `flatout run`: its program, its script, and Python options that disable flatout."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.job.interpreter import program_python
from flatout.job.secrets import masked
from flatout.schema.errors import ProgramNotFound, UsageError

TAKES_ARGUMENT = {"--check-hash-based-pycs"}


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
        return Command(tuple(typed), (program_python(), *typed), Path(first))
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


def parse_options(argv: Sequence[str]) -> tuple[str | None, str, tuple[str, ...]]:
    """Parse the options of a Python command as the interpreter does.

    Returns the first option that disables flatout, then "c", "m" or "" for what runs, then the remaining
    words: the code, the module or the script, and its arguments."""
    words, closed = list(argv[1:]), None
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            del words[: word in TAKES_ARGUMENT]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return closed, letter, (*filter(None, [word[at:]]), *words)
            if letter in "WX":
                del words[: not word[at:]]
                break
            if letter in "IES":
                closed = closed or f"-{letter}"
    return closed, "", tuple(words)


def disabling_option(argv: Sequence[str]) -> str | None:
    """Return the option of a Python command that disables flatout: -I, -E or -S."""
    return parse_options(argv)[0]


def _python(typed: Sequence[str], here: Path) -> Command:
    closed, runs, rest = parse_options(typed)
    if runs == "m" and rest:
        return Command(tuple(typed), tuple(typed), _module_file(rest[0], rest, here), rest[0], closed)
    if runs or not rest or rest[0] == "-":
        return Command(tuple(typed), tuple(typed), closed=closed)
    script = here / rest[0]
    _must_exist(script)
    return Command(tuple(typed), tuple(typed), script, closed=closed)


def _module_file(module: str, rest: Sequence[str], here: Path) -> Path | None:
    """Return the file of a module below this folder, or the script of a launcher (torch.distributed.run)."""
    parts = Path(*module.split("."))
    if not parts.name:  # `python -m ""`
        return None
    for candidate in (here / parts.with_suffix(".py"), here / parts / "__main__.py"):
        if candidate.is_file():
            return candidate
    return next((here / word for word in rest[1:] if word.endswith(".py") and (here / word).is_file()), None)


def _must_exist(script: Path) -> None:
    if script.is_dir() and (script / "__main__.py").is_file():
        return
    if not script.is_file():
        raise ProgramNotFound(
            f"there is no script {str(script)!r} in {os.getcwd()}. Check the path, or change to the script's folder."
        )
