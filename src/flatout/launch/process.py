"""A program in its own process group: start it, log its output, stop, continue and end the whole group."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from flatout.job.parent_exit import die_with_parent
from flatout.schema.errors import ProgramNotFound
from flatout.schema.machine_snapshot import CommandResult

# Run other programs in parallel, each with a time limit, and collect their output.
#
# A program that hangs, crashes or is missing gives a result too.

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


HEAD_BYTES = 1 << 20  # kept from the start of a log
TAIL_BYTES = 1 << 18  # and from its end
END_OF_INPUT = b"\x04" * 256  # one for each time that the program reads input


class Drain(threading.Thread):
    """A thread that reads a program's output and keeps its head and tail, so that it cannot fill the disk."""

    def __init__(self, source: int, log: Path, copy_to: BinaryIO | None) -> None:
        super().__init__(daemon=True)
        self._source, self._log, self._copy_to = source, log, copy_to
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                chunk = os.read(self._source, 1 << 16)
            except OSError:  # a terminal reports the exit of its program as an error
                break
            if not chunk:
                break
            self.total += len(chunk)
            space = HEAD_BYTES - len(self._head)
            self._head += chunk[:space]
            self._tail += chunk[max(space, 0) :]
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]
            if self._copy_to is not None:
                try:
                    self._copy_to.write(chunk)
                    self._copy_to.flush()
                except (OSError, ValueError):
                    self._copy_to = None
        os.close(self._source)
        try:
            self._log.write_bytes(self.content())
        except OSError:
            pass  # a full disk must not fail the trial; the tail stays in memory

    def content(self) -> bytes:
        omitted = self.total - len(self._head) - len(self._tail)
        gap = f"\n... {omitted:,} bytes left out ...\n".encode() if omitted > 0 else b""
        return bytes(self._head) + gap + bytes(self._tail)


def pty_at_eof() -> tuple[int, int]:
    """Return both ends of a pseudo-terminal at end of file, with the size of ours, if any.

    `stty size` works in it, and `input()` raises EOFError."""
    master, slave = pty.openpty()
    if os.isatty(0):
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(master, termios.TIOCSWINSZ, size)
    os.write(master, END_OF_INPUT)
    return master, slave


class ProgramRun:
    """One run of a program. Its input is a terminal at end of file."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdout_log: Path,
        stderr_log: Path,
        show: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._terminal, slave = pty_at_eof()
        out_read, out_write = (pty.openpty if show and sys.stdout.isatty() else os.pipe)()
        err_read, err_write = (pty.openpty if show and sys.stderr.isatty() else os.pipe)()
        try:
            self.process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                cwd=folder,
                stdin=slave,
                stdout=out_write,
                stderr=err_write,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise ProgramNotFound(f"{argv[0]} cannot be started: {error.strerror}.") from None
        finally:
            for descriptor in (slave, out_write, err_write):
                os.close(descriptor)
        self.out = Drain(out_read, stdout_log, sys.stdout.buffer if show else None)
        self.err = Drain(err_read, stderr_log, sys.stderr.buffer if show else None)
        self.stopped = False
        self._groups: set[int] | None = None

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def stop(self, rescan: bool = False) -> None:
        """Stop the whole group, so that no thread or loader worker runs while another program is measured.

        ``rescan`` also finds processes started since the first stop, such as those of a compiler."""
        if not self.stopped and self.exit_code is None:
            self._groups = None if rescan else self._groups
            self._signal(signal.SIGSTOP)
            self.stopped = True

    def resume(self) -> None:
        if self.stopped:
            self._signal(signal.SIGCONT)
            self.stopped = False

    def end(self, timeout_s: float = 5.0) -> int | None:
        """Give the program a moment to exit by itself, then kill its whole group."""
        self.resume()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        code = self.exit_code
        self._signal(signal.SIGKILL)
        self.process.wait()
        for drain in (self.out, self.err):
            drain.join(2.0)
        try:
            os.close(self._terminal)
        except OSError:
            pass
        return code

    def _signal(self, number: int) -> None:
        if self._groups is None or number == signal.SIGKILL:
            self._groups = (self._groups or set()) | self._descendant_groups()
        for group in self._groups:
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _descendant_groups(self) -> set[int]:
        import psutil  # here, because the supervisor does not need it

        groups = {self.process.pid}
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                groups.add(os.getpgid(child.pid))
        except (psutil.Error, ProcessLookupError):
            pass
        return groups - {os.getpgrp()}
