"""A manifest for a Kubernetes cluster with Kubeflow's operators.

    PyTorchJob   kubeflow.org/v1, of the Training Operator (v1.9); minimum to maximum number of nodes, with restarts
    TrainJob     trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer (v2); a fixed number of nodes, because its
                 JobSet cannot be elastic yet

Both start `flatout run --nodes` in each pod of an image that contains flatout. The manifest is JSON, which
`kubectl apply -f -` accepts like YAML and which avoids quoting problems. A kubelet expands ``$(NAME)`` in a
command and turns ``$$`` into ``$``, so each ``$`` is doubled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.launch.nodes import Endpoint, Nodes
from flatout.schema.errors import UsageError

KINDS = ("PyTorchJob", "TrainJob")
PORT = 29500  # inside the job's pods, each with its own address; the port of TrainJob's headless service
SHARED_MEMORY = {
    "name": "shared-memory",
    "emptyDir": {"medium": "Memory"},
}  # 64 MiB by default, too little for loader workers


@dataclass(frozen=True)
class Pods:
    """Settings of the pods.

    ``limits`` are those of a node, in Kubernetes notation ("cpu": "16", "memory": "64Gi")."""

    image: str
    name: str = "flatout"
    kind: str = "PyTorchJob"
    limits: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()  # further options of `flatout run`
    runtime: str = "torch-distributed"  # of a TrainJob; Kubeflow Trainer installs it


def manifest(nodes: Nodes, command: Sequence[str], pods: Pods) -> str:
    """Return the manifest for `kubectl apply -f -`.

    Raises UsageError for a name, kind or image that Kubernetes would reject."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,43}[a-z0-9])?", pods.name):
        raise UsageError(
            f"{pods.name!r} is not a valid Kubernetes job name: use at most 45 lower-case letters, digits and dashes, starting with a letter. "
            "Give another name with --job-name."
        )
    if not pods.image or any(c.isspace() for c in pods.image):
        raise UsageError(
            f"{pods.image!r} is not an image name. Give an image that contains your program and flatout: --image registry/name:tag."
        )
    if pods.kind not in KINDS:
        raise UsageError(f"--kind {pods.kind!r} is not supported. Use {' or '.join(KINDS)}.")
    if pods.kind == "TrainJob" and nodes.fewest != nodes.most:
        raise UsageError(
            f"a TrainJob has a fixed number of nodes, but {nodes.range} is a range. Give one number, or use a PyTorchJob."
        )
    made = _train_job(nodes, command, pods) if pods.kind == "TrainJob" else _pytorch_job(nodes, command, pods)
    return json.dumps(made, indent=2) + "\n"


def _pytorch_job(nodes: Nodes, command: Sequence[str], pods: Pods) -> dict[str, Any]:
    # The operator gives each pod a headless service of the same name; worker 0 serves the rendezvous there.
    container = {
        "name": "pytorch",
        "image": pods.image,
        "command": _words(nodes, command, pods, f"{pods.name}-worker-0"),
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "resources": {"limits": _limits(nodes, pods)},
        "volumeMounts": [{"name": SHARED_MEMORY["name"], "mountPath": "/dev/shm"}],
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": pods.name},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None"},
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvPort": PORT,
                "minReplicas": nodes.fewest,
                "maxReplicas": nodes.most,
                "maxRestarts": nodes.restarts,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": nodes.most,
                    "restartPolicy": "OnFailure" if nodes.restarts else "Never",
                    "template": {"spec": {"containers": [container], "volumes": [SHARED_MEMORY]}},
                }
            },
        },
    }


def _train_job(nodes: Nodes, command: Sequence[str], pods: Pods) -> dict[str, Any]:
    trainer = {
        "image": pods.image,
        "numNodes": nodes.most,
        "command": _words(nodes, command, pods, f"{pods.name}-node-0-0.{pods.name}"),
        "resourcesPerNode": {"limits": _limits(nodes, pods)},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": pods.name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": pods.runtime,
            },
            "trainer": trainer,
        },
    }


def _words(nodes: Nodes, command: Sequence[str], pods: Pods, host: str) -> list[str]:
    number = nodes.range if nodes.fewest != nodes.most else str(nodes.most)
    rendezvous = ["--rendezvous", str(Endpoint(host, PORT))] if nodes.most > 1 else []
    ranks = ["--gpus" if nodes.gpus else "--procs", str(nodes.procs)]
    ours = [
        "flatout",
        "run",
        "--nodes",
        number,
        *rendezvous,
        *ranks,
        *(["--restarts", str(nodes.restarts)] if nodes.restarts else []),
    ]
    return [word.replace("$", "$$") for word in [*ours, *pods.options, "--", *command]]


def _limits(nodes: Nodes, pods: Pods) -> dict[str, str]:
    return {**({"nvidia.com/gpu": str(nodes.procs)} if nodes.gpus else {}), **pods.limits}
