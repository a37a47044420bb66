"""One rank of a launch on this machine: its process, its output and its crash report."""

import glob
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment, launcher_variables
from flatout.launch.failure import LOST_ANOTHER
from flatout.launch.process import Drain, TimedCommand, pty_at_eof
from flatout.measure.cores import usable_cores
from flatout.schema.errors import ProgramNotFound, UsageError

DEVICES = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_S = 20.0  # without persistence mode, nvidia-smi wakes every GPU first


def rank_environment(
    environment: Mapping[str, str],
    rank: int,
    procs: int,
    folder: Path,
    *,
    device: str | None = None,
    cores: int | None = None,
) -> dict[str, str]:
    """Return ``environment`` for one of ``procs`` ranks of this machine, which meet at a file in ``folder``.

    ``device`` is the one CUDA device that this rank sees. ``cores`` are shared between the ranks."""
    hidden = launcher_variables(environment)
    variables = {name: value for name, value in environment.items() if name not in hidden}
    variables |= RankEnvironment(rank, rank, procs, procs, f"file://{folder}/rendezvous").environment()
    variables |= launch_environment(folder) | share_of_cores(environment, procs, cores)
    return variables if device is None else variables | {DEVICES: device}


def launch_environment(folder: Path) -> dict[str, str]:
    """The variables of every rank that this process starts. ``folder`` is that of the launch."""
    return {
        "FLATOUT_LAUNCHER": str(os.getpid()),
        "FLATOUT_LAUNCH": str(folder),
        "FLATOUT_CRASH_REPORTS": str(folder / "info"),
        "FLATOUT_FIRST": "",
    }


def share_of_cores(environment: Mapping[str, str], procs: int, cores: int | None = None) -> dict[str, str]:
    """The number of threads of a rank, unless the user has set one. By default all cores are shared."""
    if environment.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max((usable_cores() if cores is None else cores) // procs, 1))}


def cuda_devices(environment: Mapping[str, str], procs: int) -> list[str]:
    """One device for each of ``procs`` ranks.

    Takes those that CUDA_VISIBLE_DEVICES lists (numbers, UUIDs, parts of a GPU), otherwise all. Raises
    UsageError."""
    listed = environment.get(DEVICES)
    gpu_count = _gpus()
    devices = list(map(str, range(gpu_count))) if listed is None else _listed(listed, gpu_count)
    if len(devices) >= procs:
        return devices[:procs]
    count = "is one CUDA device" if len(devices) == 1 else f"are {len(devices) or 'no'} CUDA devices"
    where = "on this machine" if listed is None else f"in {DEVICES}={listed!r}"
    advice = "`--procs N` runs the ranks on the CPU; `flatout doctor` says why no GPU is available"
    if devices:
        advice = f"`--gpus {len(devices)}`{'' if listed is None else f', or list more in {DEVICES}'}"
    raise UsageError(f"there {count} {where}, and {procs} ranks need one each. {advice}.")


def _listed(text: str, gpu_count: int) -> list[str]:
    """The listed devices. CUDA stops at the first invalid entry: `0,1,-1,2` shows two devices.

    Source: CUDA programming guide, environment variables. ``gpu_count`` is the number of GPUs of the machine; 0
    means unknown, because device files and nvidia-smi may be missing."""
    devices: list[str] = []
    for entry in (word.strip() for word in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))) or entry in devices:
            break
        if entry.isdigit() and gpu_count and int(entry) >= gpu_count:
            break
        devices.append(entry)
    return devices


def _gpus() -> int:
    files = glob.glob("/dev/nvidia[0-9]*")
    if files:
        return len(files)
    listing = TimedCommand(["nvidia-smi", "-L"]).result(NVIDIA_SMI_S)
    return sum(line.startswith("GPU ") for line in listing.out.splitlines()) if listing.code == 0 else 0


def check_devices(devices: Sequence[str], procs: int) -> Sequence[str]:
    """Raise UsageError if there are fewer devices than ranks."""
    if len(devices) < procs:
        raise UsageError(
            f"{procs} ranks need one device each, but {len(devices)} given ({', '.join(devices) or 'none'}). Give more, or start fewer ranks."
        )
    return devices


class Rank:
    """A rank. Rank 0 has the launcher's input and output; that of the others is logged after ``start_log``.

    The others get no input. If rank 0 has a terminal, they have one too, at end of file, because some programs
    ask for its size. ``exit_fd`` becomes readable when the rank exits; -1 on kernels without pidfd (Linux <
    5.3), where the rank is polled when any child exits. ``asked_to_exit``: its exit code means nothing.
    ``killed``: by the launcher."""

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
        """The head and tail of its output; "" for rank 0. A program that it left running may hold it open."""
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
