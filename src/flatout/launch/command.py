"""Parse the command after `flatout run`: its program, its script, and Python options that disable flatout."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from flatout.job.interpreter import program_python
from flatout.job.secrets import masked, portable
from flatout.job.trust import file_digest
from flatout.schema.errors import NothingMeasured, ProgramNotFound, UsageError

FLAG_LETTERS = "bBdEiIOPqRsStuvx"  # options of the interpreter without an argument that run something


@dataclass(frozen=True)
class PythonLine:
    """A command line as the interpreter reads it: ``words`` are the code, module or script, and its arguments.

    ``kind`` is "code", "module", "script" or "stdin"; "" is help, the version, or a line that it rejects."""

    kind: str = ""
    words: tuple[str, ...] = ()
    disables: str | None = None  # the first option that disables flatout: -I, -E or -S


MAX_SCRIPT_BYTES = 1 << 20  # larger files are data


@dataclass(frozen=True)
class Command:
    """A parsed command.

    ``argv`` is what will be executed; ``script`` is the Python file it runs, if known."""

    typed: tuple[str, ...]
    argv: tuple[str, ...]
    script: Path | None = None
    module: str | None = None
    disabled_by: str | None = None  # the Python option that disables flatout (-I, -E, -S)
    folder: Path | None = None  # working directory; None: the current one
    environment: tuple[tuple[str, str], ...] = ()  # variables that differ from ours
    piped: bool = False  # the program itself comes through a pipe, which one process alone can read

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
    def portable(self) -> list[str]:
        """The same without absolute paths. Python elsewhere is ``python``."""
        first, *words = map(portable, self.shown)
        return ["python" if first[0] in "~*" and is_python(self.typed[0]) else first, *words]

    @property
    def digest(self) -> str:
        """A digest of the current folder and the command without its secrets, which may change each time."""
        return hashlib.sha256(
            "\0".join((*self.shown, os.getcwd())).encode(errors="surrogateescape")
        ).hexdigest()[:8]

    @property
    def script_digest(self) -> str:
        """A digest of the script, or of files in another command (`bash train.sh`)."""
        folder = self.folder or Path()
        words = [self.script] if self.script else [folder / word for word in self.typed[1:]]
        return " ".join(filter(None, (file_digest(word, MAX_SCRIPT_BYTES) for word in words)))


def parse_command(typed: Sequence[str], folder: Path | None = None) -> Command:
    """Parse a command line that will run in ``folder``; None is the current one.

    Raises UsageError if it is empty, ProgramNotFound if the program or script is missing."""
    return replace(_parse(typed, folder or Path()), folder=folder)


def check_measurable(command: Command) -> Command:
    """The command. Raises NothingMeasured if no trial of it can be measured."""
    if command.disabled_by:
        raise NothingMeasured(
            f"nothing can be measured: `python {command.disabled_by}` disables flatout; remove {command.disabled_by}"
        )
    if command.piped:
        raise NothingMeasured(
            f"nothing can be measured: `{shlex.join(command.shown)}` reads its program from a pipe, which can be read "
            "only once. Save the program in a file and give that: python train.py"
        )
    return command


def is_python(program: str) -> bool:
    return Path(program).name.startswith(("python", "pypy"))


def parse_python(argv: Sequence[str]) -> PythonLine:
    """Parse a command line of Python as the interpreter does (Python/getopt.c)."""
    words, disables = list(argv[1:]), None
    while words and words[0].startswith("-") and words[0] != "-":
        letters = words.pop(0)[1:]
        if letters == "-":
            break
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cmWX" or f"{letter}{letters}" == "-check-hash-based-pycs":
                if letter == "-":
                    letters = ""
                if not (letters or words):
                    return PythonLine()
                argument, letters = letters or words.pop(0), ""
                if letter == "-" and argument not in ("default", "always", "never"):
                    return PythonLine()
                if letter in "cm":
                    return PythonLine("code" if letter == "c" else "module", (argument, *words), disables)
            elif letter not in FLAG_LETTERS:
                return PythonLine()
            elif letter in "IES":
                disables = disables or f"-{letter}"
    return PythonLine("stdin" if words[:1] in ([], ["-"]) else "script", tuple(words), disables)


def _parse(typed: Sequence[str], cwd: Path) -> Command:
    if not typed:
        raise UsageError(
            "no program was given: the command line is empty. Give a script (train.py) or a command (python train.py)."
        )
    first = typed[0]
    if first.endswith(".py") and not (len(typed) == 1 and _words_in(first)):
        must_exist(cwd / first)
        return Command(tuple(typed), (program_python(), *typed), Path(first))
    if not shutil.which(first):
        problem = (
            f"{first!r} is a folder"
            if (cwd / first).is_dir()
            else f"there is no program {first!r} on the PATH"
        )
        raise ProgramNotFound(
            f"{problem}.{_suggestion(cwd / first)} Give a script (train.py) or a command (python train.py)."
        )
    if is_python(first):
        return _python(typed, cwd)
    script = next((cwd / word for word in typed[1:] if word.endswith(".py") and (cwd / word).is_file()), None)
    if script is None and (cwd / first).is_file():
        script = cwd / first
    return Command(tuple(typed), tuple(typed), script)


def _python(typed: Sequence[str], cwd: Path) -> Command:
    line = parse_python(typed)
    command = Command(tuple(typed), tuple(typed), disabled_by=line.disables)
    if line.kind == "module":
        name = line.words[0]
        return replace(command, script=_module_file(name, line.words, cwd), module=name)
    if line.kind != "script":
        return replace(command, piped=line.kind == "stdin")
    script = cwd / line.words[0]
    if script.is_fifo() or script.is_char_device() or script.parts[:2] == ("/", "dev"):
        return replace(command, piped=True)
    must_exist(script)
    return replace(command, script=script)


def _module_file(module: str, rest: Sequence[str], cwd: Path) -> Path | None:
    parts = Path(*module.split("."))
    if not parts.name:  # `python -m ""`
        return None
    for candidate in (cwd / parts.with_suffix(".py"), cwd / parts / "__main__.py"):
        if candidate.is_file():
            return candidate
    return next((cwd / word for word in rest[1:] if word.endswith(".py") and (cwd / word).is_file()), None)


def must_exist(script: Path) -> None:
    """Raise ProgramNotFound, with what was probably meant, if Python cannot run this file or folder."""
    if script.is_dir() and (script / "__main__.py").is_file():
        return
    if not script.is_file():
        problem = (
            f"{str(script)!r} is a folder"
            if script.is_dir()
            else f"there is no script {str(script)!r} in {os.getcwd()}"
        )
        raise ProgramNotFound(
            f"{problem}.{_suggestion(script)} Check the path, or change to the script's folder."
        )


def _words_in(word: str) -> list[str]:
    """The words of a command line that was given as one word, whose first names a program; [] for others."""
    try:
        words = shlex.split(word)
    except ValueError:
        return []
    is_line = len(words) > 1 and not Path(word).exists()
    return words if is_line and (shutil.which(words[0]) or Path(words[0]).is_file()) else []


def _suggestion(missing: Path) -> str:
    word = str(missing)
    if words := _words_in(word):
        return f" The quotes make one word of a command line; did you mean {shlex.join(words)}?"
    if (missing / "__main__.py").is_file():
        return f" Did you mean `python {shlex.quote(word)}` (its __main__.py)?"
    folder = missing if missing.is_dir() else missing.parent
    try:
        scripts = sorted(missing.name for missing in folder.glob("*.py"))
    except OSError:
        scripts = []
    if missing.is_dir():
        matches = get_close_matches("train.py", scripts, 1) or scripts[:1]
    else:
        matches = get_close_matches(missing.name, [*scripts, "python", "torchrun"], 1)
    suggestion = next(iter(matches), "")
    return (
        f" Did you mean `{shlex.quote(str(folder / suggestion) if suggestion in scripts else suggestion)}`?"
        if suggestion
        else ""
    )
