"""One rank of a launch on this machine: its process, what it prints, what it said when it failed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flatout.launch.failure import LOST_ANOTHER
from flatout.launch.process import Drain, die_with_flatout, terminal_at_its_end
from flatout.plan.errors import ProgramNotFound


class Rank:
    """Rank 0 has the launcher's input and output. The others read nothing, and what they print is kept once ``keep`` was called. Where rank 0 reads a
    terminal, they have one too, at its end: some programs ask it for its size.

    ``end`` is a descriptor that tells when it has ended, -1 on a kernel without (Linux < 5.3): then one can only ask whenever some child has.
    ``told``: it was told to end, so how it ends says nothing any more; ``killed``: it was not asked.
    """

    def __init__(self, number: int, argv: Sequence[str], environment: Mapping[str, str], own_group: bool, before: Callable[[], None]) -> None:
        """``before`` is called in the new process. Raises ProgramNotFound."""
        self.number, self.told, self.killed = number, False, False
        self._drain: Drain | None = None
        launcher = os.getpid()

        def begin() -> None:
            die_with_flatout()
            if os.getppid() != launcher:  # it was killed before the kernel knew that we depend on it
                os._exit(1)
            before()

        self._output, inside = os.pipe() if number else (-1, None)
        self._terminal, read = terminal_at_its_end() if number and os.isatty(0) else (-1, None)
        nothing = subprocess.DEVNULL if number else None
        try:
            self.process = subprocess.Popen(list(argv), env=dict(environment), stdin=nothing if read is None else read, stdout=inside, stderr=inside,
                                            process_group=0 if own_group else None, preexec_fn=begin)
        except OSError as error:
            raise ProgramNotFound(f"{argv[0]} cannot be started: {error.strerror}.") from None
        finally:
            for descriptor in (inside, read):
                if descriptor is not None:
                    os.close(descriptor)
        try:
            self.end = os.pidfd_open(self.process.pid)
        except OSError:
            self.end = -1

    @property
    def title(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    @property
    def lives(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        if self.lives:
            self.process.send_signal(number)

    def keep(self, folder: Path) -> None:
        """Begin to read what it prints. Called when no process will be started any more: this makes a thread."""
        if self.number:
            self._drain = Drain(self._output, folder / f"rank{self.number}.log", None)

    def printed(self, patience_s: float) -> str:
        """Both streams, head and tail; "" for rank 0. A program that it has left running may hold them open."""
        if self._drain is None:
            return ""
        self._drain.join(patience_s)
        return self._drain.content().decode(errors="replace")

    def close(self) -> None:
        for descriptor in (self.end, self._terminal):
            if descriptor >= 0:
                os.close(descriptor)

    def traceback(self, folder: Path) -> str:
        """What it said when its exception reached the top; "" where it has said nothing."""
        try:
            return str(json.loads((folder / f"rank{self.number}.failed").read_text(encoding="utf-8"))["traceback"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def lost_another(self, folder: Path) -> bool:
        """Whether it failed because another rank was gone, by its own words."""
        return LOST_ANOTHER.search(self.traceback(folder)) is not None
