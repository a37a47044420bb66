"""Signals of a launcher: received with their origin, and forwarded so that each rank gets each one once.

Ctrl-C and Ctrl-Z reach every process of the terminal's foreground group. So if the launcher's group is in the
foreground, the ranks stay in it: rank 0 may read the terminal, Ctrl-Z stops everything, `fg` continues it,
and a shell loop sees Ctrl-C as usual. Otherwise each rank gets its own group. A signal to the launcher's
group (from `timeout`, `kill %1`, a batch system) would reach it twice if it shared the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from dataclasses import dataclass

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# SIGHUP comes from the kernel too, but only to the session leader
KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGTSTP)
SI_KERNEL = 0x80  # sigaction(2)
SIGSET_BYTES = 128
SFD_CLOEXEC, SFD_NONBLOCK = 0o2000000, 0o4000  # signalfd(2)
INFO_BYTES = 128


@dataclass(frozen=True)
class ReceivedSignal:
    """A signal, and whether it was typed at the terminal."""

    number: signal.Signals
    typed: bool


class LauncherSignals:
    """A context in which signals queue in ``descriptor`` until they are taken. Linux only."""

    def __init__(self) -> None:
        # set by nohup, and for background jobs of scripts
        ignored = {number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN}
        self.observed = {*FORWARDED, signal.SIGTSTP, signal.SIGCHLD} - ignored
        self.descriptor = -1
        self._old_mask: set[signal.Signals] = set()

    def __enter__(self) -> LauncherSignals:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise exit codes are lost
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.observed)  # type: ignore[assignment]
        mask = sum(1 << (number - 1) for number in self.observed).to_bytes(SIGSET_BYTES, "little")
        self.descriptor = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, SFD_CLOEXEC | SFD_NONBLOCK)
        if self.descriptor < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            raise OSError(ctypes.get_errno(), "signalfd")
        return self

    def __exit__(self, *_: object) -> None:
        self.take()  # pending signals were for the ranks, which have exited
        os.close(self.descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)

    def restore_mask(self) -> None:
        """Restore the signal mask. Called in a child before its program starts."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)

    def take(self) -> list[ReceivedSignal]:
        """The signals received since the last call, oldest first."""
        received: list[ReceivedSignal] = []
        while True:
            try:
                info = os.read(self.descriptor, INFO_BYTES)
            except BlockingIOError:
                return received
            number, _, code = struct.unpack_from("Iii", info)  # ssi_signo, ssi_errno, ssi_code
            received.append(
                ReceivedSignal(signal.Signals(number), code == SI_KERNEL and number in KEYBOARD_SIGNALS)
            )


def in_foreground() -> bool:
    """Whether our process group is the foreground group of the terminal."""
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


def stop_self() -> None:
    """Stop this process as Ctrl-Z does, and return when it is continued.

    In an orphaned process group, which nobody could continue, the kernel ignores the stop."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def exit_by_signal(number: int) -> None:
    """Kill this process by a signal, which also ends a shell loop (bash continues after exit code 130)."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
