"""Run other programs in parallel, each with a time limit, and collect their output.

A program that hangs, crashes or is missing gives a result too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from flatout.job.parent_exit import die_with_parent
from flatout.schema.machine_snapshot import CommandResult

MAX_BYTES = 1 << 20


class TimedCommand:
    """A started program. ``result`` waits for it, and kills its process group after the time limit."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | None = None
    ) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        # Files, not pipes: a program that fills its pipe would block while we wait for another program.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._start_error = ""
        path = shutil.which(command[0])
        if path is None:
            return
        # The output is parsed in English; another locale would translate it.
        variables = {**(os.environ if environment is None else environment), "LC_ALL": "C"}
        try:
            self._process = subprocess.Popen(
                [path, *command[1:]],
                env=variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:  # another architecture's binary, no memory for a process
            self._start_error = f"{path}: {error.strerror}"

    def result(self, limit_s: float) -> CommandResult:
        if self._process is None:
            return CommandResult(self._command, err=self._start_error, installed=bool(self._start_error))
        timed_out = False
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            self.end()
        return CommandResult(
            self._command,
            None if timed_out else self._process.returncode,
            _text(self._out),
            _text(self._err),
            timed_out=timed_out,
        )

    def end(self) -> None:
        """Kill the program and its process group, if they still run."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel, as with a broken driver


def _text(file: BinaryIO) -> str:
    file.seek(0)
    text = file.read(MAX_BYTES).decode(errors="replace")
    file.close()
    return text
