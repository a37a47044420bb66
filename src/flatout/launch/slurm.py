"""A batch script for Slurm that starts one agent per node.

The agents rendezvous at a port that the first node binds before it publishes it. The sbatch options are
#SBATCH lines at the top, so the script can be kept, read and submitted again by hand.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.job.folder import write_whole
from flatout.launch.elastic import job_name
from flatout.launch.nodes import Nodes
from flatout.schema.errors import ProgramFailed, UsageError

OWN = ("nodes", "ntasks-per-node", "ntasks", "N", "n")  # the script sets these options itself


def batch_script(
    nodes: Nodes,
    command: Sequence[str],
    options: str = "",
    name: str = "flatout",
    run: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """Return the text of the script. ``options`` are for sbatch, ``run`` are more options of `flatout run`.

    Raises UsageError for sbatch options that cannot be parsed or that contradict --nodes.
    """
    return f"""#!/bin/bash
# Written by flatout. Submit it with: sbatch THIS_FILE
{_directives(nodes, options, name)}

set -eu
# The first node serves the rendezvous. It binds the port first, and keeps it until the job ends.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec {{serving}}< <(exec {shlex.quote(python)} -P -m flatout.launch.node_agent --serve "$host")
read -r rendezvous <&"$serving"

# An agent that has exited does not return: the job continues without it if --nodes allows it, or ends.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 {_on_failure(nodes)} \\
  {_agent(nodes, run, python)} -- \\
  {shlex.join(command)}
"""


def _on_failure(nodes: Nodes) -> str:
    return "--no-kill --kill-on-bad-exit=0" if nodes.fewest != nodes.most else "--kill-on-bad-exit=1"


def _agent(nodes: Nodes, run: Sequence[str], python: str) -> str:
    number = f'{nodes.fewest}:"$SLURM_JOB_NUM_NODES"' if nodes.fewest != nodes.most else str(nodes.most)
    restarts = f" --restarts {nodes.restarts}" if nodes.restarts else ""
    return (
        f'{shlex.quote(python)} -P -m flatout run --nodes {number} --rendezvous "$rendezvous" '
        f"{shlex.join(['--gpus' if nodes.gpus else '--procs', str(nodes.procs), *run])}{restarts}"
    )


def _directives(nodes: Nodes, options: str, name: str) -> str:
    given = _options(options)
    stated = {_name(option) for option in given}
    number = str(nodes.most) if nodes.fewest == nodes.most else f"{nodes.fewest}-{nodes.most}"
    ours = [
        f"--nodes={number}",
        "--ntasks-per-node=1",
        *(["--no-kill"] if nodes.fewest != nodes.most else []),
    ]
    if not stated & {"job-name", "J"}:
        ours.append(f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:64] or 'flatout'}")
    if nodes.gpus and not any(name.startswith(("gpus", "gres", "tres")) or name == "G" for name in stated):
        ours.append(f"--gpus-per-node={nodes.procs}")
    if nodes.procs > 1 and not nodes.gpus and not stated & {"cpus-per-task", "c", "exclusive"}:
        ours.append(f"--cpus-per-task={nodes.procs}")
    return "\n".join(f"#SBATCH {_directive(option)}" for option in [*ours, *given])


def _options(text: str) -> list[str]:
    """Split the options of sbatch: ``--name=value``, or a short option with its value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--slurm-options {text!r} cannot be read ({error}). Quote them as one argument: "
            "--slurm-options '--partition=gpu --time=4:00:00'."
        ) from None
    found: list[str] = []
    for word in words:
        if "\n" in word or "\r" in word:
            raise UsageError(
                f"--slurm-options: {word!r} contains a line break, which an #SBATCH line cannot hold. Remove it."
            )
        if word.startswith("-"):
            found.append(word)
        elif found and "=" not in found[-1]:
            found[-1] += f"={word}" if found[-1].startswith("--") else f" {word}"
        else:
            raise UsageError(
                f"--slurm-options: {word!r} is not an option of sbatch. Write --slurm-options '--partition=gpu --time=4:00:00'."
            )
    for option in found:
        if _name(option) in OWN:
            raise UsageError(f"--slurm-options: {option} is set by flatout. Remove it, and use --nodes.")
    return found


def _name(option: str) -> str:
    return re.split(r"[= ]", option.lstrip("-"))[0] if option.startswith("--") else option[1:2]


def _directive(option: str) -> str:
    """Quote an option for sbatch, which parses quotes like a shell and stops at an unquoted ``#``."""
    name, between, value = option.partition("=") if option.startswith("--") else option.partition(" ")
    return name + between + (shlex.quote(value) if between else "")


def submit(script: str, path: Path) -> str:
    """Write the script and submit it. Return sbatch's output, or instructions if there is no sbatch.

    Raises ProgramFailed if sbatch rejects it."""
    write_whole(path, script)
    path.chmod(0o700)
    if shutil.which("sbatch") is None:
        return f"there is no sbatch on this machine; the script is in {path}. Submit it on a machine with Slurm: sbatch {shlex.quote(str(path))}"
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise ProgramFailed(
            f"sbatch rejected {path}: {done.stderr.strip() or done.stdout.strip()}. Change the options with --slurm-options, or edit the "
            f"script and run: sbatch {shlex.quote(str(path))}",
            done.returncode,
        )
    return f"{done.stdout.strip()} ({path})"


def script_name(command: Sequence[str]) -> str:
    return f"{job_name(command)}.sbatch"
