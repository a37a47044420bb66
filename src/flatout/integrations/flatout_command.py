"""Runs the `flatout` command in a process of its own, with the interpreter of this one."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Jupyter and CI set these for colours. The command would also redraw its progress, as in a terminal.
TERMINAL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS")


@dataclass(frozen=True)
class CommandResult:
    """How the command ended. ``err`` is empty if it was joined with ``out``."""

    code: int
    out: str
    err: str


def run_flatout(words: Sequence[str], folder: Path) -> CommandResult:
    """Run `flatout WORDS` in a folder."""
    with _start(words, folder, subprocess.PIPE) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            _stop(process)
            raise
    return CommandResult(process.returncode, out, err)


def stream_flatout(words: Sequence[str], folder: Path, on_line: Callable[[str], None]) -> CommandResult:
    """The same; ``on_line`` receives each line of both outputs at once."""
    lines = []
    with _start(words, folder, subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                lines.append(text)
                on_line(text)
        except BaseException:
            _stop(process)
            raise
    return CommandResult(process.returncode, "".join(lines), "")


def _start(words: Sequence[str], folder: Path, errors: int) -> subprocess.Popen[str]:
    # -P: a file of the user's folder must not hide a module of flatout. -u: lines arrive as they are written.
    return subprocess.Popen(
        [sys.executable, "-u", "-P", "-m", "flatout", *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in TERMINAL_VARIABLES},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def _stop(process: subprocess.Popen[str]) -> None:
    """End the command as Ctrl-C does: it then ends the programs that it started."""
    process.terminate()
    process.wait()
