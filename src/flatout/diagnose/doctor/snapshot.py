"""Takes the machine snapshot. All access to the machine is here; the checks only read the snapshot."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from flatout import __version__
from flatout.diagnose.doctor.torch_child import DESCRIBE
from flatout.job.folder import json_lines
from flatout.job.interpreter import is_flatout_python, program_python
from flatout.job.temporary import remove, temporary
from flatout.launch.environment import ENTERED, EXPLAIN, module_command, with_hook
from flatout.launch.process import TimedCommand
from flatout.measure.clock import seconds, utc_now
from flatout.probe.snapshot import gather
from flatout.schema.machine_snapshot import MachineSnapshot

TORCH_LIMIT_S = 60.0  # a first import from a network folder takes this long, from a local disk two seconds
PROGRAM_LIMIT_S = 10.0  # without persistence mode, nvidia-smi has to load the driver first
HOOK = "start-up hook"
SHOW_REPORT = f"import os; print(open(os.environ['{ENTERED}']).read())"
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # missing from the path of some shells
PROGRAMS = {
    "nvidia-smi": ("nvidia-smi", "-q", "-x"),
    "c++": ("g++", "--version"),
}


class SnapshotTaker:
    """Examines this machine. A child begins to import torch at once; leaving the context ends every child."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._folder = temporary("doctor")
        self._records_file = self._folder / "torch.jsonl"
        # -m puts the working folder first on the path, as for a script, so files that hide torch there are
        # found.
        python, child = program_python(), "flatout.diagnose.doctor.torch_child"
        self._torch = TimedCommand(
            [python, *_switches(), "-m", child, str(self._records_file)]
            if is_flatout_python(python)
            else module_command(python, child, str(self._records_file), DESCRIBE)
        )
        entered = self._folder / "entered"
        entered.touch()
        self._programs = {name: TimedCommand(command) for name, command in _programs().items()}
        self._programs[HOOK] = TimedCommand(
            [python, "-c", SHOW_REPORT],
            {**with_hook(os.environ), "FLATOUT_EXPLAIN": EXPLAIN, ENTERED: str(entered)},
        )

    def __enter__(self) -> SnapshotTaker:
        return self

    def __exit__(self, *_: object) -> None:
        for command in (*self._programs.values(), self._torch):
            command.end()
        remove(self._folder)

    def take(self, torch_limit_s: float = TORCH_LIMIT_S) -> MachineSnapshot:
        """Reads files below the root, then waits for the programs and the torch import up to their limits."""
        snapshot = gather(MachineSnapshot(flatout=__version__, created=utc_now()), self._root)
        until = seconds() + PROGRAM_LIMIT_S
        snapshot.command_results = {
            name: command.result(max(until - seconds(), 0.1)) for name, command in self._programs.items()
        }
        snapshot.command_results["import torch"] = self._torch.result(torch_limit_s)
        snapshot.torch = {
            str(record.pop("stage")): record for record in json_lines(self._records_file) if "stage" in record
        }
        if interpreter := snapshot.torch.pop("interpreter", None):  # the program's, if it is not flatout's
            snapshot.python, snapshot.packages = interpreter["python"], interpreter["packages"]
        return snapshot


def _switches() -> list[str]:
    """The interpreter switches that affect where packages are found: the child gets the same ones."""
    flags = (("-S", sys.flags.no_site), ("-s", sys.flags.no_user_site), ("-E", sys.flags.ignore_environment))
    return [switch for switch, on in flags if on]


def _programs() -> dict[str, tuple[str, ...]]:
    """The programs to run. CXX is the compiler that torch.compile calls."""
    programs, compiler = dict(PROGRAMS), os.environ.get("CXX", "").strip()
    if compiler:
        programs["c++"] = (compiler, "--version")
    if shutil.which("nvidia-smi") is None and os.path.isfile(WSL_NVIDIA_SMI):
        programs["nvidia-smi"] = (WSL_NVIDIA_SMI, *PROGRAMS["nvidia-smi"][1:])
    return programs
