"""`flatout run --procs N torchrun ... train.py`: torchrun starts the ranks of a script for one device.

torchrun finds the other nodes, restarts the ranks and ends them. `agent/rank_environment.py` turns each process
that it starts into a rank.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.job.temporary import temporary
from flatout.launch.command import Command, is_python, parse_command, parse_python
from flatout.launch.rank import launch_environment
from flatout.schema.errors import UsageError

# options of torchrun without a value; all others take one
FLAGS = frozenset(("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank"))
RANKS = "PET_NPROC_PER_NODE"  # torchrun reads its options from such variables, too


@dataclass(frozen=True)
class Torchrun:
    """A command of torchrun. ``program`` is what each rank runs; ``rdzv_id`` is the same on every node."""

    command: Command
    program: Command
    rdzv_id: str

    @property
    def seed(self) -> int:
        """The seed of a script that sets none. Nodes exchange nothing before torch is imported, so it is no random number."""
        text = "\0".join((*self.program.typed, self.rdzv_id))
        return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:4], "big") >> 1

    def environment(self, base: Mapping[str, str], procs: int, gpus: bool) -> dict[str, str]:
        """The environment of torchrun, which replaces this process."""
        folder = temporary("launch")
        # A failing rank writes to this file. Nothing reads it: torchrun waits for its process to exit.
        (folder / "event_fifo").touch()
        return {
            **base,
            **launch_environment(folder),
            RANKS: str(procs),
            "FLATOUT_DATA_PARALLEL": "gpus" if gpus else "procs",
        }


def torchrun_of(command: Command, procs: int) -> Torchrun | None:
    """Parse a command of torchrun, which starts ``procs`` ranks on this node; None for any other command.

    Raises UsageError if it names no program or another number of ranks, ProgramNotFound without its script."""
    words = _arguments(command.typed)
    if words is None:
        return None
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        name = name.replace("_", "-")
        options[name] = value if equals or name in FLAGS or not words else words.pop(0)
    if not words:
        raise UsageError("this torchrun command names no script. Give one: torchrun --nnodes 2 ... train.py")
    ranks = next((value for name, value in options.items() if name.startswith("--nproc")), str(procs))
    if ranks != str(procs):
        raise UsageError(
            f"--nproc-per-node {ranks} of torchrun disagrees with the {procs} ranks that flatout was asked for. Remove --nproc-per-node, or "
            "remove --procs and --gpus if the script itself calls init_process_group."
        )
    python = command.typed[0] if is_python(command.typed[0]) else "python"
    if "--no-python" not in options:
        words = [python, *(["-m"] if options.keys() & {"-m", "--module"} else []), *words]
    return Torchrun(command, parse_command(words), options.get("--rdzv-id", ""))


def _arguments(typed: tuple[str, ...]) -> list[str] | None:
    if Path(typed[0]).name == "torchrun":
        return list(typed[1:])
    line = parse_python(typed) if is_python(typed[0]) else None
    if line is None or line.kind != "module" or line.words[0] != "torch.distributed.run":
        return None
    return list(line.words[1:])
