"""Recognises programs that start their own ranks, and returns the command that starts them properly."""

from __future__ import annotations

import re
import shlex

from flatout.job.rank_environment import RANK_VARIABLES
from flatout.launch.command import Command, is_python, parse_python
from flatout.schema.records import TrialRecord
from flatout.trial.reference_run import BY_LAUNCHER, IN_CHILDREN

SAYS = {
    BY_LAUNCHER: "a launcher starts it and creates the ranks",
    IN_CHILDREN: "it trains in processes that it starts itself",
}
GROUP = "it is already data-parallel (it calls torch.distributed.init_process_group)"
MISSES = re.compile(r"environment variable (?P<name>\w+) expected, but not set|KeyError: '(?P<key>\w+)'")


def how(way: str) -> str:
    """Return the explanation, without a full stop, for how a reference run creates its ranks."""
    return SAYS.get(way, GROUP)


def missing(record: TrialRecord) -> str:
    """Return the launcher variable whose absence made the program fail; empty if it failed otherwise."""
    said = (record.reason or record.log_tail).strip().splitlines()
    found = MISSES.search(said[-1]) if said else None
    name = (found["name"] or found["key"]) if found else ""
    return name if name in RANK_VARIABLES else ""


def meant(way: str, command: Command, procs: int) -> str:
    """Say what to do instead of --procs, with the command."""
    typed = shlex.join(command.shown)
    if way == BY_LAUNCHER:
        return f"Remove --procs and set the number of ranks in the launcher: flatout run {typed}"
    if way == IN_CHILDREN:
        return f"Remove --procs; the program starts its own processes: flatout run {typed}"
    return f"Remove --procs and let torchrun start the ranks: flatout run torchrun --nproc-per-node {procs} {_for_torchrun(command)}"


def _for_torchrun(command: Command) -> str:
    """Return the program in the form torchrun expects: a script or ``-m module``, with its arguments."""
    if not is_python(command.typed[0]):
        own = command.typed[0].endswith(".py")
        return f"{'' if own else '--no-python '}{shlex.join(command.typed)}"
    line = parse_python(command.typed)
    if line.runs not in ("script", "module"):
        return f"--no-python {shlex.join(command.typed)}"
    return shlex.join([*(["-m"] if line.runs == "module" else []), *line.words])
