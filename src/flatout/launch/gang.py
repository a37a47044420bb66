"""N ranks of one program on this machine: started, watched and ended as one. Also a program: ``python -m flatout.launch.gang --procs N -- COMMAND``.

Rank 0 has the terminal; the others read nothing, and what they print is kept. They meet at a file in the private folder of the launch, so no port is
opened. The first rank that fails decides: the others are told to end at once, what is left is killed, and the launch ends with that rank's exit code.
No torch is imported here. Linux only.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flatout.launch.bell import Bell
from flatout.launch.command import Command, understand
from flatout.launch.environment import QUIET, heard
from flatout.launch.failure import exit_code, first_of, headline, shown
from flatout.launch.hearing import Signals, end_like, in_foreground
from flatout.launch.identity import cores_here, cuda_devices, one_each, rank_environment
from flatout.launch.keeper import Keeper, end_members
from flatout.launch.rank import Rank
from flatout.launch.watching import Watch
from flatout.plan.errors import FlatoutError, StorageError, UsageError

OUTPUT_S = 1.0  # for what is in the pipes yet


def tell(sentence: str) -> None:
    """A line for the person in front of the launch."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


class Gang:
    """``devices`` are CUDA devices, one a rank; None starts the ranks without. ``cores`` are divided between them where no number of threads is set.

    After ``run``, ``failed`` is the rank that failed first, and ``ended_by`` the signal by which a person ended the launch; None where there was none.
    """

    def __init__(self, command: Command, procs: int, environment: Mapping[str, str], devices: Sequence[str] | None = None, cores: int | None = None,
                 say: Callable[[str], None] = tell) -> None:
        """Raises UsageError for what cannot be started."""
        if procs < 1:
            raise UsageError(f"a program runs as one rank or more, not as {procs}: `--procs 2`.")
        if not hasattr(select, "epoll"):
            raise UsageError(f"several ranks are started on Linux alone so far, and this is {sys.platform}. Run the program as one: leave --procs away.")
        self.command, self.procs, self.say = command, procs, say
        self.devices = None if devices is None else one_each(devices, procs)
        self.environment, self.cores = heard(environment), cores_here() if cores is None else cores
        self.ranks: list[Rank] = []
        self.failed: int | None = None
        self.ended_by: int | None = None

    def run(self) -> int:
        """Until the last rank has ended: 0, or the exit code as a shell would say it. Raises ProgramNotFound, StorageError.

        Called from the main thread: the kernel ends ranks when the thread ends that has started them.
        """
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="flatout-gang-"))
            self._bell = Bell(self.folder)
        except OSError as error:
            raise StorageError(f"cannot make a folder in {tempfile.gettempdir()}: {error.strerror}. Name another one with TMPDIR.") from error
        with Signals() as signals:
            keeper = Keeper(str(self.folder))
            whole = False
            try:
                shares_group = in_foreground()
                self._start(signals, own_groups=not shares_group)
                watch = Watch(self.ranks, self.folder, self._bell, signals, shares_group, self.say)
                watch.until_the_end()
                code = self._verdict(watch)
                whole = True
                return code
            finally:
                if not whole:
                    end_members(str(self.folder))
                self._bell.close()
                for rank in self.ranks:
                    rank.close()
                keeper.dismiss()
                if self.failed is None:
                    shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, signals: Signals, own_groups: bool) -> None:
        for number in range(self.procs):
            self.ranks.append(Rank(number, self.command.argv, self._environment_of(number), own_groups, signals.give_back))
        for rank in self.ranks:
            rank.keep(self.folder)

    def _environment_of(self, number: int) -> dict[str, str]:
        device = None if self.devices is None else self.devices[number]
        own = rank_environment(self.environment, rank=number, local_rank=number, world=self.procs, local_world=self.procs, cores=self.cores,
                               meeting=f"file://{self.folder}/meeting", gang=str(self.folder), device=device)
        quiet = QUIET if number else {}  # one process reports to an experiment tracker
        return {**own, **quiet, "FLATOUT_LAUNCHER": str(os.getpid()), "FLATOUT_TOLD": str(self.folder / "told"), "FLATOUT_FIRST": ""}

    # -- the end ----------------------------------------------------------------------------------------------------

    def _verdict(self, watch: Watch) -> int:
        codes = [-signal.SIGKILL if rank.process.returncode is None else rank.process.returncode for rank in self.ranks]
        if not any(codes):
            return 0
        end_members(str(self.folder))
        if watch.asked is not None:
            code = exit_code(next(code for code in codes if code))
            self.ended_by = watch.asked if code == 128 + watch.asked else None
            return code
        first = first_of(watch.signs, lambda number: self.ranks[number].lost_another(self.folder))
        if first is None:  # one that was on its way out, and did not come to its end
            first = next(number for number, code in enumerate(codes) if code)
        self.failed = first
        traceback = self.ranks[first].traceback(self.folder)
        code = 1 if self.ranks[first].killed and traceback else codes[first]  # its exception had come to the top, what followed did not end
        self._report(first, code, traceback)
        return exit_code(code)

    def _report(self, first: int, code: int, traceback: str) -> None:
        printed = [rank.printed(OUTPUT_S) for rank in self.ranks]
        text = shown(traceback, printed[first]) if first else ""  # rank 0 has said so itself
        self.say("flatout: " + headline(first, os.uname().nodename, self.ranks[first].process.pid, code, bool(text)))
        if text:
            self.say(text)
        if self.procs > 1:
            self.say(f"flatout: what the ranks printed, rank 0 apart: {self.folder}/rank*.log")


def launcher_of(command: Command, procs: int, gpus: bool = False, cores: int | None = None) -> Command:
    """The command that starts ``command`` as ranks: for a trial, which runs one program."""
    divided = ("--cores", str(cores)) if cores else ()
    words = (sys.executable, "-m", "flatout.launch.gang", "--gpus" if gpus else "--procs", str(procs), *divided, "--", *command.argv)
    return Command(command.typed, words, command.script, command.module, command.closed)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flatout.launch.gang", description="Start one program as several ranks on this machine.")
    count = parser.add_mutually_exclusive_group(required=True)
    count.add_argument("--procs", type=int, help="ranks on the CPU")
    count.add_argument("--gpus", type=int, help="ranks with one CUDA device each")
    parser.add_argument("--cores", type=int, help="cores to divide between the ranks; else those that this process may run on")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    given = parser.parse_args(words)
    procs = given.procs if given.gpus is None else given.gpus
    try:
        command = understand(given.command[1:] if given.command[:1] == ["--"] else given.command)
        gang = Gang(command, procs, os.environ, None if given.gpus is None else cuda_devices(os.environ, procs), given.cores)
        code = gang.run()
    except FlatoutError as error:
        tell(f"flatout: {error}")
        return error.exit_code
    if gang.ended_by is not None:
        end_like(gang.ended_by)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
