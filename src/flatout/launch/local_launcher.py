"""The local launcher: start, monitor and end N ranks of one program on this machine.

Also a program: ``python -m flatout.launch.local_launcher --procs N -- COMMAND``. Rank 0 has the terminal. The other
ranks get no input, and their output is logged. The ranks meet at a file in the launch's private folder,
so no port is opened. When a rank fails, the others are asked to exit, the rest is killed, and the launch
returns the exit code of the rank that failed first. This module imports no torch. Linux only.

torchrun starts the ranks of several nodes (``torchrun``), but not those of one machine. Measured with torch
2.14: it starts in 1.7 s with 520 MB (here 0.15 s, 21 MB), and listens at two ports on every address. It looks
at its ranks every 0.1 s, so the loss of another rank may count as the first failure. Each rank has a session of
its own: Ctrl-Z stops only torchrun. SIGUSR1 and SIGKILL end torchrun, and its ranks run on.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from flatout.job.streams import open_closed_streams
from flatout.job.temporary import remove, temporary
from flatout.launch.command import Command, parse_command
from flatout.launch.environment import OFFLINE_TRACKERS, with_crash_reports
from flatout.launch.failure import end_of_output, exit_code, first_failed, headline
from flatout.launch.launcher_signals import LauncherSignals, exit_by_signal, in_foreground
from flatout.launch.rank import Rank, check_devices, cuda_devices, rank_environment
from flatout.launch.rank_monitor import EventFifo, RankMonitor
from flatout.launch.reaper import Reaper, end_members
from flatout.schema.errors import FlatoutError, UsageError

OUTPUT_S = 1.0  # for output still in the pipes


def print_stderr(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


class LocalLauncher:
    """A launch of several ranks on this machine.

    ``devices`` has one CUDA device per rank, or is None. ``cores`` are shared between the ranks, unless a
    number of threads is set. After ``run``, ``failed`` is the rank that failed first, and ``stop_signal`` is the
    signal by which the user ended the launch; None if there is none."""

    def __init__(
        self,
        command: Command,
        procs: int,
        environment: Mapping[str, str],
        devices: Sequence[str] | None = None,
        cores: int | None = None,
        report: Callable[[str], None] = print_stderr,
    ) -> None:
        if procs < 1:
            raise UsageError(f"a program needs at least one rank, not {procs}: `--procs 2`.")
        if not hasattr(select, "epoll"):
            raise UsageError(
                f"several ranks are supported on Linux only, and this is {sys.platform}. Remove --procs to run one process."
            )
        self.command, self.procs, self.report = command, procs, report
        self.devices = None if devices is None else check_devices(devices, procs)
        self.environment, self.cores = with_crash_reports(environment), cores
        self.ranks: list[Rank] = []
        self.failed: int | None = None
        self.stop_signal: int | None = None

    def run(self) -> int:
        """Run until the last rank has exited. Return 0, or the exit code as in a shell.

        Raises ProgramNotFound, StorageError. Call it from the main thread: the kernel kills the ranks when
        the thread that started them ends."""
        self.folder = temporary("launch")
        self._event_fifo = EventFifo(self.folder)
        with LauncherSignals() as signals:
            reaper = Reaper(str(self.folder))
            completed = False
            try:
                shares_group = in_foreground()
                self._start(signals, own_groups=not shares_group)
                monitor = RankMonitor(
                    self.ranks, self.folder, self._event_fifo, signals, shares_group, self.report
                )
                monitor.run()
                code = self._exit_code(monitor)
                completed = True
                return code
            finally:
                if not completed:
                    end_members(str(self.folder))
                self._event_fifo.close()
                for rank in self.ranks:
                    rank.close()
                reaper.dismiss()
                if self.failed is None:
                    remove(self.folder)

    def _start(self, signals: LauncherSignals, own_groups: bool) -> None:
        argv, unblock = self.command.argv, signals.restore_mask
        for number in range(self.procs):
            self.ranks.append(Rank(number, argv, self._environment_of(number), own_groups, unblock))
        for rank in self.ranks:
            rank.start_log(self.folder)

    def _environment_of(self, number: int) -> dict[str, str]:
        device = None if self.devices is None else self.devices[number]
        variables = rank_environment(
            self.environment, number, self.procs, self.folder, device=device, cores=self.cores
        )
        # one process reports to an experiment tracker
        return variables | (OFFLINE_TRACKERS if number else {})

    # -- the end

    def _exit_code(self, monitor: RankMonitor) -> int:
        exits = (rank.process.returncode for rank in self.ranks)
        codes = [-signal.SIGKILL if code is None else code for code in exits]
        if not any(codes):
            return 0
        end_members(str(self.folder))
        if monitor.stop_signal is not None:
            code = exit_code(next(code for code in codes if code))
            self.stop_signal = monitor.stop_signal if code == 128 + monitor.stop_signal else None
            return code
        first = first_failed(monitor.events, lambda number: self.ranks[number].lost_another(self.folder))
        if first is None:  # a rank that was exiting and did not finish
            first = next(number for number, code in enumerate(codes) if code)
        self.failed = first
        traceback = self.ranks[first].traceback(self.folder)
        # its exception was uncaught, but its exit hung
        code = 1 if self.ranks[first].killed and traceback else codes[first]
        self._report(first, code, traceback)
        return exit_code(code)

    def _report(self, first: int, code: int, traceback: str) -> None:
        printed = [rank.output(OUTPUT_S) for rank in self.ranks]
        text = end_of_output(traceback, printed[first]) if first else ""  # rank 0 has printed it itself
        host, pid = os.uname().nodename, self.ranks[first].process.pid
        self.report(f"flatout: {headline(first, host, pid, code, bool(text))}")
        if text:
            self.report(text)
        if self.procs > 1:
            self.report(
                f"flatout: output of the other ranks, until the next flatout command: {self.folder}/rank*.log"
            )


def launcher_of(command: Command, procs: int, gpus: bool = False, cores: int | None = None) -> Command:
    """The command that starts ``command`` as ranks, for a trial, which runs a single program."""
    options = ["--gpus" if gpus else "--procs", str(procs), *(["--cores", str(cores)] if cores else ())]
    words = (sys.executable, "-m", "flatout.launch.local_launcher", *options, "--", *command.argv)
    return Command(command.typed, words, command.script, command.module, command.disabled_by)


def main(words: Sequence[str] | None = None) -> int:
    open_closed_streams()
    parser = argparse.ArgumentParser(
        prog="python -m flatout.launch.local_launcher",
        description="Start one program as several ranks on this machine.",
    )
    count = parser.add_mutually_exclusive_group(required=True)
    count.add_argument("--procs", type=int, help="number of ranks on the CPU")
    count.add_argument("--gpus", type=int, help="number of ranks with one CUDA device each")
    parser.add_argument(
        "--cores",
        type=int,
        help="cores to share between the ranks (default: those available to this process)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    arguments = parser.parse_args(words)
    typed, procs, devices = arguments.command, arguments.procs, None
    try:
        command = parse_command(typed[1:] if typed[:1] == ["--"] else typed)
        if arguments.gpus is not None:
            procs, devices = arguments.gpus, cuda_devices(os.environ, arguments.gpus)
        local_launcher = LocalLauncher(command, procs, os.environ, devices, arguments.cores)
        code = local_launcher.run()
    except FlatoutError as error:
        print_stderr(f"flatout: {error}")
        return error.exit_code
    if local_launcher.stop_signal is not None:
        exit_by_signal(local_launcher.stop_signal)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
