"""N ranks of one program on this machine: started, watched and ended as one. Also a program: ``python -m flatout.launch.gang --procs N -- COMMAND``.

Rank 0 has the terminal; the others read nothing, and what they print is kept. They meet at a file in the private folder of the launch, so no port is
opened. The first rank that fails decides: the others are told to end at once, what is left is killed, and the launch ends with that rank's exit code.
No torch is imported here. Linux only: signals and ends are heard through signalfd and epoll, which gives events in the order in which they happened.
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
from flatout.launch.environment import heard
from flatout.launch.failure import ENDED, FAILING, LEAVING, Sign, exit_code, first_of, headline, shown
from flatout.launch.hearing import ASKING_TO_END, Heard, Signals, end_like, hold, in_foreground
from flatout.launch.identity import cores_here, cuda_devices, one_each, rank_environment
from flatout.launch.keeper import Keeper, end_members
from flatout.launch.rank import Rank
from flatout.plan.errors import FlatoutError, StorageError, UsageError

KILL_S = 1.5  # from the first failure on: with what killing takes, all is gone within two seconds
SECOND_LOOK_S = 0.25  # for a cause, where the first to be heard has only lost another rank
SILENCE_S = 30.0  # of ranks that go on without rank 0
ONE_PRESS_S = 0.4  # `timeout` sends its signal twice
STUCK_S = 5.0
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
        self.signs: list[Sign] = []
        self.failed: int | None = None
        self.ended_by: int | None = None
        self._asked: int | None = None  # the signal by which a person has asked for the end
        self._passed: set[int] = set()
        self._may_insist = self._failing = self._ending = self._stuck = False

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
                self._start(signals)
                self._watch(signals)
                code = self._verdict()
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

    def _start(self, signals: Signals) -> None:
        self._shares_group = in_foreground()
        for number in range(self.procs):
            self.ranks.append(Rank(number, self.command.argv, self._environment_of(number), not self._shares_group, signals.give_back))
        for rank in self.ranks:
            rank.keep(self.folder)

    def _environment_of(self, number: int) -> dict[str, str]:
        device = None if self.devices is None else self.devices[number]
        own = rank_environment(self.environment, rank=number, local_rank=number, world=self.procs, local_world=self.procs, cores=self.cores,
                               meeting=f"file://{self.folder}/meeting", gang=str(self.folder), device=device)
        return {**own, "FLATOUT_LAUNCHER": str(os.getpid()), "FLATOUT_TOLD": str(self.folder / "told"), "FLATOUT_FIRST": ""}

    # -- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, signals: Signals) -> None:
        ends = {rank.end: rank for rank in self.ranks if rank.end >= 0}
        with select.epoll() as events:
            for descriptor in (signals.descriptor, self._bell.descriptor, *ends):
                events.register(descriptor, select.EPOLLIN)
            while self._living() and not self._stuck:
                for descriptor, _ in events.poll():
                    if descriptor in ends:
                        events.unregister(descriptor)
                        self._ended(ends[descriptor])
                    elif descriptor == signals.descriptor:
                        for each in signals.take():
                            self._heard(each)
                    else:
                        for line in self._bell.lines():
                            self._rung(*line)

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives]

    def _rung(self, word: str = "", number: str = "", pid: str = "", first: str = "") -> None:
        """A rank has said something, or one of the programs that it has started; or a time is over."""
        if word == "timer":
            self._timed(number)
        if not number.isdigit() or int(number) >= self.procs:
            return
        rank = self.ranks[int(number)]
        own = pid == str(rank.process.pid)
        if word == FAILING or (word == LEAVING and own):
            before = [at for at, sign in enumerate(self.signs) if first and sign.kind == FAILING]  # it was, but did not ring as fast
            self.signs.insert(min(before, default=len(self.signs)), Sign(rank.number, word, own=own, told=rank.told))
        elif word == "words" and own and not rank.told:
            self._failure_seen(rank)

    def _heard(self, heard: Heard) -> None:
        if heard.number == signal.SIGCHLD:
            for rank in self._living():
                if rank.end < 0:
                    self._ended(rank)
            return
        if not (heard.typed and self._shares_group):
            self._send(heard.number)
        if heard.number == signal.SIGTSTP:
            hold()
            self._send(signal.SIGCONT)
            return
        self._passed.add(heard.number)
        if heard.number in ASKING_TO_END and not self._failing:
            if self._asked is None:
                self._asked = heard.number
                self._bell.after(ONE_PRESS_S, "insist")
            elif self._may_insist:
                self._kill()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _ended(self, rank: Rank) -> None:
        code = rank.process.poll()
        if code is None:
            return
        self.signs.append(Sign(rank.number, ENDED, code, told=rank.told, killed=rank.killed))
        if -code in self._passed and not self._failing and self._asked is None:
            self._asked = -code  # a signal that it did not handle was meant to end it
        if code != 0 and not rank.told:
            self._failure_seen(rank)
        if rank.number == 0 and not self._failing:
            self._bell.after(SILENCE_S, "silence")

    def _failure_seen(self, rank: Rank) -> None:
        """The first one ends the launch. One that has only lost another rank may be heard before the one that was lost, which then has a moment left."""
        if self._asked is not None or self._ending:
            return
        if not self._failing:
            self._failing = True
            self._bell.after(KILL_S, "kill")
        if rank.lost_another(self.folder):
            self._bell.after(SECOND_LOOK_S, "end")
        else:
            self._end_others()

    def _end_others(self) -> None:
        """Those who are on their way out by themselves have until the kill: how they end is what we want to know."""
        if self._ending:
            return
        self._ending = True
        leaving = {sign.rank for sign in self.signs}
        for rank in self._living():
            if rank.number not in leaving:
                rank.told = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # one that is held would not hear of it

    def _kill(self) -> None:
        for rank in self._living():
            rank.told = rank.killed = True
            rank.signal(signal.SIGKILL)
        self._bell.after(STUCK_S, "stuck")

    def _timed(self, word: str) -> None:
        if word == "end":
            self._end_others()
        elif word == "kill":
            self._kill()
        elif word == "insist":
            self._may_insist = True
        elif word == "silence" and not self._failing:
            self.say(f"flatout: rank 0 has ended {SILENCE_S:.0f} s ago, and {self._titles()} still run. Waiting for them; Ctrl-C ends them.")
        elif word == "stuck":
            self._stuck = True
            self.say(f"flatout: {self._titles()} cannot be killed: the kernel holds them, mostly for a driver or a file system. "
                     "`ps -o pid,stat,wchan` shows where.")

    def _titles(self) -> str:
        return ", ".join(rank.title for rank in self._living())

    # -- the end ----------------------------------------------------------------------------------------------------

    def _verdict(self) -> int:
        codes = [-signal.SIGKILL if rank.process.returncode is None else rank.process.returncode for rank in self.ranks]
        if not any(codes):
            return 0
        end_members(str(self.folder))
        if self._asked is not None:
            code = exit_code(next(code for code in codes if code))
            self.ended_by = self._asked if code == 128 + self._asked else None
            return code
        first = first_of(self.signs, lambda number: self.ranks[number].lost_another(self.folder))
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
