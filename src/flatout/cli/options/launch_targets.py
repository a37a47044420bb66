"""`flatout run` on other machines: several nodes, Slurm, a Ray cluster, Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.options.grouped import machines_option, survival_option
from flatout.cli.options.ranks import RankOptions
from flatout.launch.command import Command
from flatout.schema.errors import NodesApart, ProgramFailed, UsageError

if TYPE_CHECKING:
    from flatout.launch.nodes import Nodes

# Every `flatout run` imports this file for its options. The modules that start remote runs take 50 ms to
# import (measured), so they are imported only when needed.

OPTIONS = (
    machines_option(
        "--nodes",
        default=None,
        metavar="N|MIN:MAX",
        help="Number of machines; start the same command on each of them.",
    ),
    machines_option(
        "--node-rank",
        default=None,
        type=int,
        help="Number of this node; node 0 serves the rendezvous. The default follows from the address.",
    ),
    machines_option(
        "--rendezvous",
        default=None,
        metavar="HOST:PORT",
        help="Address of the rendezvous; the same on each node.",
    ),
    survival_option(
        "--restarts",
        default=None,
        type=int,
        help="Restarts from the last checkpoint after a rank or a node fails.",
    ),
    machines_option("--slurm", is_flag=True, help="Write a Slurm batch script and submit it."),
    machines_option(
        "--slurm-options",
        default=None,
        help="Options for sbatch, as one argument: '--partition=gpu --time=4:00:00'.",
    ),
    machines_option(
        "--ray",
        default=None,
        metavar="ADDRESS",
        help="Run the ranks on a running Ray cluster: HOST:PORT, or auto.",
    ),
    machines_option("--k8s", is_flag=True, help="Print a manifest for `kubectl apply -f -`."),
    machines_option("--image", default=None, help="Image that contains the program and flatout, for --k8s."),
    machines_option(
        "--limits", default=None, help="Resource limits of a node, for --k8s: cpu=16,memory=64Gi."
    ),
    machines_option("--kind", default=None, help="Kubernetes resource for --k8s: PyTorchJob or TrainJob."),
    machines_option("--job-name", default=None, help="Name of the job, for --slurm or --k8s."),
)
CLUSTERS = ("slurm", "ray", "k8s")  # options of this name choose one
SUBMITTED = ("slurm", "k8s")  # flatout writes a script or manifest, and runs nothing here
NAMES = (
    "nodes",
    "node_rank",
    "rendezvous",
    "restarts",
    "slurm",
    "slurm_options",
    "ray",
    "k8s",
    "image",
    "limits",
    "kind",
    "job_name",
)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `flatout run` that this file reads; their parameters are NAMES."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True)
class LaunchTarget:
    """Where the program runs. ``cluster`` is slurm, ray or k8s, or empty for the agent of this node."""

    nodes: Nodes
    cluster: str
    given: Mapping[str, Any]


def place_of(given: Mapping[str, Any], ranks: RankOptions) -> LaunchTarget | None:
    """Return the place that the options name, or None for a run on this machine alone.

    Raises UsageError if they contradict each other."""
    if all(value is None or value is False for value in given.values()):
        return None
    from flatout.launch.nodes import nodes_of

    clusters = [name for name in CLUSTERS if given[name]]
    if len(clusters) > 1:
        raise UsageError(
            f"{' and '.join(f'--{name}' for name in clusters)} exclude each other. Give one of them."
        )
    cluster = clusters[0] if clusters else ""
    for name, needs in (
        ("slurm_options", ("slurm",)),
        ("image", ("k8s",)),
        ("limits", ("k8s",)),
        ("kind", ("k8s",)),
        ("job_name", ("slurm", "k8s")),
    ):
        if given[name] is not None and cluster not in needs:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} {given[name]} is for {' or '.join(f'--{need}' for need in needs)}, which is missing. Give both, or remove the option."
            )
    procs, gpus = (None, ranks.procs) if ranks.gpus else (ranks.procs if ranks.several else None, None)
    nodes = nodes_of(
        given["nodes"],
        given["node_rank"],
        given["rendezvous"],
        procs,
        gpus,
        given["restarts"],
        f"--{cluster}" if cluster else None,
    )
    return LaunchTarget(nodes, cluster, dict(given)) if nodes else None


def go(
    place: LaunchTarget,
    command: Command,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    folder: Path = Path("."),
) -> int:
    """Submit, print or run the program at ``place``; return the exit code. Not for the agent of this node.

    ``environment`` is the environment that the program would have here. ``options`` are the options of
    `flatout run` that the nodes need (--plan). Raises UsageError, ProgramFailed or NodesApart.
    """
    if place.cluster == "ray":
        return _on_ray(place, command, environment)
    from flatout.launch.kubernetes import KINDS, Pods, manifest
    from flatout.launch.slurm import batch_script, script_name, submit

    given = place.given
    name = given["job_name"] or command.title.lower().strip("-_") or "flatout"
    if place.cluster == "k8s":
        if given["image"] is None:
            raise UsageError(
                "--k8s needs an image that contains your program and flatout: --image registry/name:tag."
            )
        pods = Pods(
            given["image"],
            name.replace("_", "-"),
            given["kind"] or KINDS[0],
            _limits(given["limits"]),
            options=options,
        )
        sys.stdout.write(manifest(place.nodes, command.typed, pods))
        return 0
    script = batch_script(place.nodes, command.typed, given["slurm_options"] or "", name, options)
    sys.stdout.write(submit(script, (folder / script_name(command.typed)).resolve()) + "\n")
    return 0


def _on_ray(place: LaunchTarget, command: Command, environment: Mapping[str, str]) -> int:
    from flatout.launch.ray_cluster import run_ranks, work

    def show(part: bytes) -> None:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()

    for left in range(place.nodes.restarts, -1, -1):
        try:
            return run_ranks(
                place.given["ray"],
                work(command.argv, environment),
                place.nodes.most * place.nodes.procs,
                place.nodes.gpus,
                show=show,
            )
        except (ProgramFailed, NodesApart) as error:
            if not left:
                raise
            sys.stderr.write(
                f"flatout: {error}\nflatout: restarting from the program's last checkpoint; {left - 1} restarts left\n"
            )
    return 0


def _limits(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    if any(not name or not value for name, _, value in pairs):
        raise UsageError(
            f"--limits {text} is not a list of resource limits. Write --limits cpu=16,memory=64Gi."
        )
    return {name: value for name, _, value in pairs}
