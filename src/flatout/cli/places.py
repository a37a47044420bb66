"""Where a program runs if not here alone: on several nodes, under Slurm, on a Ray cluster, in the pods of Kubernetes. For `flatout run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flatout.cli.ranks import RanksAsked
from flatout.launch.command import Command
from flatout.plan.errors import NodesApart, ProgramFailed, UsageError

if TYPE_CHECKING:
    from flatout.launch.nodes import Nodes

# Every `flatout run` reads this file for its options; what submits, prints and supervises is imported where a run goes elsewhere (measured: 50 ms).

OPTIONS = (
    click.option("--nodes", default=None, metavar="N|MIN:MAX", help="Machines; the same command is started on each of them."),
    click.option("--node-rank", default=None, type=int, help="Which node this is; 0 serves the rendezvous. By itself: the one with its address."),
    click.option("--rendezvous", default=None, metavar="HOST:PORT", help="Where the nodes meet; the same on each."),
    click.option("--restarts", default=None, type=int, help="How often to begin again, from the program's last save, when a rank or a node fails."),
    click.option("--slurm", is_flag=True, help="Write a batch script and submit it."),
    click.option("--slurm-options", default=None, help="For sbatch, as one word: '--partition=gpu --time=4:00:00'."),
    click.option("--ray", default=None, metavar="ADDRESS", help="Run the ranks on a Ray cluster that is there: HOST:PORT, or auto."),
    click.option("--k8s", is_flag=True, help="Print a manifest for kubectl apply -f -."),
    click.option("--image", default=None, help="With --k8s: an image that has the program and flatout in it."),
    click.option("--limits", default=None, help="With --k8s: of a node, cpu=16,memory=64Gi."),
    click.option("--kind", default=None, help="With --k8s: PyTorchJob or TrainJob."),
    click.option("--job-name", default=None, help="With --slurm or --k8s."),
)
NAMES = ("nodes", "node_rank", "rendezvous", "restarts", "slurm", "slurm_options", "ray", "k8s", "image", "limits", "kind", "job_name")


def options(function: Callable) -> Callable:
    """The options of `flatout run` that this file reads; they arrive under NAMES."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True)
class Place:
    """``cluster`` is slurm, ray or k8s, or nothing for the agent of this node."""

    nodes: Nodes
    cluster: str
    given: Mapping[str, Any]


def place_of(given: Mapping[str, Any], ranks: RanksAsked) -> Place | None:
    """What the options say, or None for a run on this machine alone. Raises UsageError where they contradict each other."""
    if all(value is None or value is False for value in given.values()):
        return None
    from flatout.launch.nodes import nodes_of

    clusters = [name for name in ("slurm", "ray", "k8s") if given[name]]
    if len(clusters) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in clusters)} are different places. Give one of them.")
    cluster = clusters[0] if clusters else ""
    for name, needs in (("slurm_options", ("slurm",)), ("image", ("k8s",)), ("limits", ("k8s",)), ("kind", ("k8s",)), ("job_name", ("slurm", "k8s"))):
        if given[name] is not None and cluster not in needs:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {given[name]} is for {' or '.join(f'--{need}' for need in needs)}, which is missing. Give both, or leave it away.")
    procs, gpus = (None, ranks.procs) if ranks.gpus else (ranks.procs if ranks.several else None, None)
    nodes = nodes_of(given["nodes"], given["node_rank"], given["rendezvous"], procs, gpus, given["restarts"], f"--{cluster}" if cluster else None)
    return Place(nodes, cluster, dict(given)) if nodes else None


def go(place: Place, command: Command, environment: Mapping[str, str], options: Sequence[str] = (), folder: Path = Path(".")) -> int:
    """Submit, print or run the program where ``place`` says (not for the agent of this node); the exit code.

    ``environment`` is what the program would be started with here; ``options`` are those of `flatout run` that the nodes have to hear (--plan).
    Raises UsageError, ProgramFailed or NodesApart.
    """
    if place.cluster == "ray":
        return _on_ray(place, command, environment)
    from flatout.launch.kubernetes import KINDS, Pods, manifest
    from flatout.launch.slurm import batch_script, script_name, submit

    given = place.given
    name = given["job_name"] or command.title.lower().strip("-_") or "flatout"
    if place.cluster == "k8s":
        if given["image"] is None:
            raise UsageError("--k8s needs an image that has your program and flatout in it: --image registry/name:tag.")
        pods = Pods(given["image"], name.replace("_", "-"), given["kind"] or KINDS[0], _limits(given["limits"]), options=options)
        sys.stdout.write(manifest(place.nodes, command.typed, pods))
        return 0
    script = batch_script(place.nodes, command.typed, given["slurm_options"] or "", name, options)
    sys.stdout.write(submit(script, (folder / script_name(command.typed)).resolve()) + "\n")
    return 0


def _on_ray(place: Place, command: Command, environment: Mapping[str, str]) -> int:
    from flatout.launch.ray_cluster import run_ranks, work

    def show(part: bytes) -> None:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()

    for left in range(place.nodes.restarts, -1, -1):
        try:
            return run_ranks(place.given["ray"], work(command.argv, environment), place.nodes.most * place.nodes.procs, place.nodes.gpus, show=show)
        except (ProgramFailed, NodesApart) as error:
            if not left:
                raise
            sys.stderr.write(f"flatout: {error}\nflatout: beginning again, from the program's last save; {left - 1} more after this\n")
    return 0


def _limits(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    if any(not name or not value for name, _, value in pairs):
        raise UsageError(f"--limits {text} is no list of what a node may take. Write --limits cpu=16,memory=64Gi.")
    return {name: value for name, _, value in pairs}
