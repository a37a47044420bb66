"""Recognises programs that start their own ranks, and returns the command that starts them properly."""

import re
import shlex

from flatout.job.rank_environment import RANK_VARIABLES
from flatout.launch.command import Command, is_python, parse_python
from flatout.schema.records import TrialRecord
from flatout.trial.reference_run import BY_LAUNCHER, IN_CHILDREN

EXPLANATIONS = {
    BY_LAUNCHER: "a launcher starts it and creates the ranks",
    IN_CHILDREN: "it trains in processes that it starts itself",
}
OWN_GROUP = "it is already data-parallel (it calls torch.distributed.init_process_group)"
MISSING_VARIABLE = re.compile(
    r"environment variable (?P<name>\w+) expected, but not set|KeyError: '(?P<key>\w+)'"
)


def explain(rank_source: str) -> str:
    """The explanation, without a full stop, for how a reference run creates its ranks."""
    return EXPLANATIONS.get(rank_source, OWN_GROUP)


def missing_variable(record: TrialRecord) -> str:
    """The launcher variable whose absence made the program fail; empty if it failed otherwise."""
    lines = (record.reason or record.log_tail).strip().splitlines()
    match = MISSING_VARIABLE.search(lines[-1]) if lines else None
    name = (match["name"] or match["key"]) if match else ""
    return name if name in RANK_VARIABLES else ""


def advice_for(rank_source: str, command: Command, procs: int) -> str:
    """Say what to do instead of --procs, with the command."""
    shown = shlex.join(command.shown)
    if rank_source == BY_LAUNCHER:
        return f"Remove --procs and set the number of ranks in the launcher: flatout run {shown}"
    if rank_source == IN_CHILDREN:
        return f"Remove --procs; the program starts its own processes: flatout run {shown}"
    return f"Remove --procs and let torchrun start the ranks: flatout run torchrun --nproc-per-node {procs} {_for_torchrun(command)}"


def _for_torchrun(command: Command) -> str:
    """The program in the form torchrun expects: a script or ``-m module``, with its arguments."""
    if not is_python(command.typed[0]):
        is_script = command.typed[0].endswith(".py")
        return f"{'' if is_script else '--no-python '}{shlex.join(command.typed)}"
    line = parse_python(command.typed)
    if line.kind not in ("script", "module"):
        return f"--no-python {shlex.join(command.typed)}"
    return shlex.join([*(["-m"] if line.kind == "module" else []), *line.words])
