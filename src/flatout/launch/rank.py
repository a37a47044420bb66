"""One rank of a launch on this machine: its process, its output and its crash report."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flatout.job.parent_exit import die_with_parent
from flatout.launch.failure import LOST_ANOTHER
from flatout.launch.process import Drain, pty_at_eof
from flatout.schema.errors import ProgramNotFound


class Rank:
    """A rank. Rank 0 has the launcher's input and output; that of the others is logged after ``start_log``.

    The others get no input. If rank 0 has a terminal, they have one too, at end of file, because some programs
    ask for its size. ``exit_fd`` becomes readable when the rank exits; -1 on kernels without pidfd (Linux <
    5.3), where the rank is polled when any child exits. ``asked_to_exit``: its exit code means nothing.
    ``killed``: by the launcher.
    """

    def __init__(
        self,
        number: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        new_group: bool,
        setup: Callable[[], None],
    ) -> None:
        self.number, self.asked_to_exit, self.killed = number, False, False
        self._drain: Drain | None = None
        launcher = os.getpid()

        def set_up_child() -> None:
            if new_group:
                os.setpgid(0, 0)
            die_with_parent()
            if os.getppid() != launcher:  # the launcher was killed before the line above took effect
                os._exit(1)
            setup()

        self._output, output_fd = os.pipe() if number else (-1, None)
        self._terminal, terminal_fd = pty_at_eof() if number and os.isatty(0) else (-1, None)
        stdin = subprocess.DEVNULL if number else None
        try:
            self.process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=stdin if terminal_fd is None else terminal_fd,
                stdout=output_fd,
                stderr=output_fd,
                preexec_fn=set_up_child,
            )
        except OSError as error:
            raise ProgramNotFound(f"{argv[0]} cannot be started: {error.strerror}.") from None
        finally:
            for descriptor in (output_fd, terminal_fd):
                if descriptor is not None:
                    os.close(descriptor)
        try:
            self.exit_fd = os.pidfd_open(self.process.pid)
        except OSError:
            self.exit_fd = -1

    @property
    def title(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        if self.is_running:
            self.process.send_signal(number)

    def start_log(self, folder: Path) -> None:
        """Begin to read its output. Starts a thread, so call it after all processes have been started."""
        if self.number:
            self._drain = Drain(self._output, folder / f"rank{self.number}.log", None)

    def output(self, timeout_s: float) -> str:
        """The head and tail of its output; "" for rank 0.

        A program that it left running may hold it open."""
        if self._drain is None:
            return ""
        self._drain.join(timeout_s)
        return self._drain.content().decode(errors="replace")

    def close(self) -> None:
        for descriptor in (self.exit_fd, self._terminal):
            if descriptor >= 0:
                os.close(descriptor)

    def traceback(self, folder: Path) -> str:
        """The traceback of its uncaught exception; "" if there is none."""
        try:
            return str(
                json.loads((folder / f"rank{self.number}.failed").read_text(encoding="utf-8"))["traceback"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def lost_another(self, folder: Path) -> bool:
        """Whether its traceback says that it lost another rank."""
        return LOST_ANOTHER.search(self.traceback(folder)) is not None
