"""The signals of a launcher: heard one by one with who sent them, and passed on so that each rank gets each of them once.

What is typed at a terminal (Ctrl-C, Ctrl-Z) reaches every process of the foreground group by itself. So the ranks stay in the launcher's group where that
is the foreground of a terminal: rank 0 may read it, a stop holds everything, `fg` continues it, and a shell loop around sees its Ctrl-C as ever.
Elsewhere each rank has a group of its own: what is sent to the launcher's group (by `timeout`, `kill %1`, a queue) would else reach it twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from dataclasses import dataclass

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ASKING_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TYPED = (signal.SIGINT, signal.SIGTSTP)  # a hangup comes from the kernel, too, but to the leader of the session alone
BY_THE_KERNEL = 0x80  # SI_KERNEL; sigaction(2)
SIGSET_BYTES = 128
CLOSE_ON_EXEC, NEVER_WAIT = 0o2000000, 0o4000  # SFD_CLOEXEC, SFD_NONBLOCK; signalfd(2)
INFO_BYTES = 128


@dataclass(frozen=True)
class Heard:
    """A signal, and whether it was typed at the terminal."""

    number: signal.Signals
    typed: bool


class Signals:
    """While this is entered, signals wait in ``descriptor`` until they are taken. Linux only."""

    def __init__(self) -> None:
        ignored = {number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN}  # by nohup, and in the background of scripts
        self.heard = {*PASSED_ON, signal.SIGTSTP, signal.SIGCHLD} - ignored
        self.descriptor = -1
        self._before: set[signal.Signals] = set()

    def __enter__(self) -> Signals:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nobody can say how a rank has ended
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self.heard)  # type: ignore[assignment]
        mask = sum(1 << (number - 1) for number in self.heard).to_bytes(SIGSET_BYTES, "little")
        self.descriptor = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, CLOSE_ON_EXEC | NEVER_WAIT)
        if self.descriptor < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            raise OSError(ctypes.get_errno(), "signalfd")
        return self

    def __exit__(self, *_: object) -> None:
        self.take()  # what came meanwhile was meant for the ranks, and they are gone
        os.close(self.descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def give_back(self) -> None:
        """Called in a child before its program begins: signals reach it as they would have reached the launcher."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def take(self) -> list[Heard]:
        """What has come since the last time, oldest first."""
        found: list[Heard] = []
        while True:
            try:
                info = os.read(self.descriptor, INFO_BYTES)
            except BlockingIOError:
                return found
            number, _, code = struct.unpack_from("Iii", info)  # ssi_signo, ssi_errno, ssi_code
            found.append(Heard(signal.Signals(number), code == BY_THE_KERNEL and number in TYPED))


def in_foreground() -> bool:
    """Whether our group is the one that the terminal belongs to."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def hold() -> None:
    """Stop this process, as a terminal's Ctrl-Z would; returns when it is continued. At once where nobody could continue it: the kernel knows that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def end_like(number: int) -> None:
    """End this process by a signal, so that a shell's loop around it ends too (bash goes on after an exit code of 130)."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
