"""A program in its own process group: started, listened to, stopped and continued as a whole, ended as a whole."""

from __future__ import annotations

import ctypes
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from flatout.plan.errors import ProgramNotFound

HEAD_BYTES = 1 << 20  # of a log that is kept from the start
TAIL_BYTES = 1 << 18  # and from the end
END_OF_INPUT = b"\x04" * 256  # one for each time that the program asks again


class Drain(threading.Thread):
    """Reads everything a program prints. Keeps its head and its tail, so that 100 MB of output fill no disk."""

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
                part = os.read(self._source, 1 << 16)
            except OSError:  # a terminal reports the end of its program as an error
                break
            if not part:
                break
            self.total += len(part)
            room = HEAD_BYTES - len(self._head)
            self._head += part[:room]
            self._tail += part[max(room, 0):]
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]
            if self._copy_to is not None:
                try:
                    self._copy_to.write(part)
                    self._copy_to.flush()
                except (OSError, ValueError):
                    self._copy_to = None
        os.close(self._source)
        try:
            self._log.write_bytes(self.content())
        except OSError:
            pass  # a full disk must not lose the trial; the tail stays in memory

    def content(self) -> bytes:
        left_out = self.total - len(self._head) - len(self._tail)
        gap = f"\n... {left_out:,} bytes left out ...\n".encode() if left_out > 0 else b""
        return bytes(self._head) + gap + bytes(self._tail)


def terminal_at_its_end() -> tuple[int, int]:
    """The outer and the inner side of a terminal, as large as ours if we have one: `stty size` answers, `input()` meets the end of file."""
    outside, inside = pty.openpty()
    if os.isatty(0):
        termios.tcsetwinsize(outside, termios.tcgetwinsize(0))
    os.write(outside, END_OF_INPUT)
    return outside, inside


class Program:
    """One run of a program. Its input is a terminal at its end."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], stdout_log: Path, stderr_log: Path, show: bool = False) -> None:
        self._terminal, inside = terminal_at_its_end()
        out_read, out_write = self._output(show and sys.stdout.isatty())
        err_read, err_write = self._output(show and sys.stderr.isatty())
        try:
            self.process = subprocess.Popen(list(argv), env=dict(environment), stdin=inside, stdout=out_write, stderr=err_write,
                                            start_new_session=True, preexec_fn=die_with_flatout)
        except OSError as error:
            raise ProgramNotFound(f"{argv[0]} cannot be started: {error.strerror}.") from None
        finally:
            for descriptor in (inside, out_write, err_write):
                os.close(descriptor)
        self.out = Drain(out_read, stdout_log, sys.stdout.buffer if show else None)
        self.err = Drain(err_read, stderr_log, sys.stderr.buffer if show else None)
        self.stopped = False
        self._groups: set[int] | None = None

    @staticmethod
    def _output(terminal: bool) -> tuple[int, int]:
        if not terminal:
            return os.pipe()
        outside, inside = pty.openpty()
        return outside, inside

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def stop(self, look_again: bool = False) -> None:
        """Stop the whole group: while another program is measured, neither threads nor loader workers may run.

        ``look_again`` finds processes that were started since the first stop, such as those of a compiler.
        """
        if not self.stopped and self.exit_code is None:
            self._groups = None if look_again else self._groups
            self._signal(signal.SIGSTOP)
            self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            self._signal(signal.SIGCONT)
            self.stopped = False

    def end(self, patience_s: float = 5.0) -> int | None:
        """Wait a little for the program to end by itself, then end its whole group."""
        self.go_on()
        try:
            self.process.wait(patience_s)
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
        """Launchers (torchrun) give each rank a session of its own; looked up once, when the program is first held."""
        import psutil  # here: who starts one program and watches over it needs none

        groups = {self.process.pid}
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                groups.add(os.getpgid(child.pid))
        except (psutil.Error, ProcessLookupError):
            pass
        return groups - {os.getpgrp()}


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_flatout(number: int = signal.SIGKILL) -> None:
    """Called in a child before its program begins: it gets this signal when flatout ends."""
    # A trial that is held (SIGSTOP) when flatout is killed would otherwise stay for ever. PR_SET_PDEATHSIG is 1.
    if _libc is not None:
        _libc.prctl(1, number)
