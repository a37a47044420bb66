"""Programs that divide themselves over processes: how they are seen, and the command that starts them as they are meant."""

from __future__ import annotations

import re
import shlex

from flatout.launch.command import Command
from flatout.launch.identity import OF_RANKS
from flatout.plan.records import TrialRecord
from flatout.trial.witness import BY_LAUNCHER, IN_CHILDREN

SAYS = {
    BY_LAUNCHER: "it is started by a launcher, which makes ranks of it by itself",
    IN_CHILDREN: "it trains in processes that it starts itself",
}
GROUP = "it divides itself (it has called torch.distributed.init_process_group)"
MISSES = re.compile(r"environment variable (?P<name>\w+) expected, but not set|KeyError: '(?P<key>\w+)'")


def how(way: str) -> str:
    """The sentence, without its stop, for what a witness has told."""
    return SAYS.get(way, GROUP)


def missing(record: TrialRecord) -> str:
    """The variable of a launcher that a program died for want of; nothing where it died otherwise."""
    said = (record.reason or record.log_tail).strip().splitlines()
    found = MISSES.search(said[-1]) if said else None
    name = (found["name"] or found["key"]) if found else ""
    return name if name in OF_RANKS else ""


def meant(way: str, command: Command, procs: int) -> str:
    """What to do in place of --procs: a sentence with the command."""
    typed = shlex.join(command.shown)
    if way == BY_LAUNCHER:
        return f"Leave --procs away, and tell the launcher how many it shall start: flatout run {typed}"
    if way == IN_CHILDREN:
        return f"Leave --procs away, and it starts as many as it means to: flatout run {typed}"
    return f"Leave --procs away, and let torchrun start its ranks: flatout run torchrun --nproc-per-node {procs} {_for_torchrun(command)}"


def _for_torchrun(command: Command) -> str:
    """The program as torchrun takes it: a script or ``-m module``, with its arguments."""
    words = list(command.typed)
    name = str(command.script) if command.script is not None and command.module is None else "-m"
    return shlex.join(words[words.index(name):]) if name in words else f"--no-python {shlex.join(words)}"
