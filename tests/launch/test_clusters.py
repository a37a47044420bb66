"""Slurm's batch script and Kubernetes' manifest: every argument arrives, options are accepted or rejected,
and bash runs the script.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import hang_s

from flatout.launch.kubernetes import Pods, manifest
from flatout.launch.nodes import Endpoint, Nodes, endpoint
from flatout.launch.slurm import batch_script, submit
from flatout.schema.errors import ProgramFailed, UsageError

HERE = Endpoint("localhost", 0)
commands = st.lists(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12),
    min_size=1,
    max_size=5,
)


def handed_on(script: str) -> list[str]:
    """The words of srun's last argument list, as a shell reads them."""
    return shlex.split(script[script.index("exec srun") :].replace("\\\n", " "))


@given(commands)
def test_every_argument_survives_the_batch_script(command):
    words = handed_on(batch_script(Nodes(2, 2, 4, HERE, None, 3), command))
    assert words[words.index("--") + 1 :] == command
    assert words[words.index("run") + 1 : words.index("--")] == [
        "--nodes",
        "2",
        "--rendezvous",
        "$rendezvous",
        "--procs",
        "4",
        "--restarts",
        "3",
    ]


def unexpanded(word: str) -> str:
    """A word as a kubelet expands it (k8s.io/kubernetes/third_party/forked/golang/expansion): $$ is $,
    $(NAME) of a set variable is its value.
    """
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/root", word)


@given(commands, st.sampled_from(["PyTorchJob", "TrainJob"]))
def test_every_argument_survives_the_manifest(command, kind):
    made = json.loads(
        manifest(Nodes(2, 2, 4, HERE), [*command, "$(HOME)", "$$"], Pods("registry/name:tag", "mine", kind))
    )
    spec = made["spec"]
    words = [
        unexpanded(word)
        for word in (
            spec["trainer"]["command"]
            if kind == "TrainJob"
            else spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
        )
    ]
    assert words[words.index("--") + 1 :] == [*command, "$(HOME)", "$$"]
    host = "mine-node-0-0.mine" if kind == "TrainJob" else "mine-worker-0"
    assert words[: words.index("--")] == [
        "flatout",
        "run",
        "--nodes",
        "2",
        "--rendezvous",
        f"{host}:29500",
        "--procs",
        "4",
    ]


def test_a_manifest_says_how_many_and_what_they_may_take():
    made = json.loads(
        manifest(
            Nodes(1, 4, 8, HERE, None, 3, True), ["python", "train.py"], Pods("i", limits={"memory": "64Gi"})
        )
    )
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert made["spec"]["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "rdzvPort": 29500,
        "minReplicas": 1,
        "maxReplicas": 4,
        "maxRestarts": 3,
    }
    worker = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "OnFailure")
    assert worker["template"]["spec"]["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}
    }
    made = json.loads(manifest(Nodes(4, 4, 8, HERE, None, 0, True), ["train.sh"], Pods("i", kind="TrainJob")))
    assert (made["apiVersion"], made["spec"]["trainer"]["numNodes"]) == ("trainer.kubeflow.org/v1alpha1", 4)
    assert made["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}


@pytest.mark.parametrize(
    ("nodes", "pods", "said"),
    [
        (Nodes(1, 1, 1, HERE), Pods("i", "My_Job"), "--job-name"),
        (Nodes(1, 1, 1, HERE), Pods(""), "--image"),
        (Nodes(1, 1, 1, HERE), Pods("i", kind="MPIJob"), "PyTorchJob or TrainJob"),
        (Nodes(1, 4, 1, HERE), Pods("i", kind="TrainJob"), "fixed number of nodes"),
    ],
)
def test_a_manifest_that_kubernetes_would_reject_is_rejected_here(nodes, pods, said):
    with pytest.raises(UsageError) as refused:
        manifest(nodes, ["python"], pods)
    assert said in str(refused.value)


def directives(options: str, nodes: Nodes) -> list[str]:
    return [
        line.removeprefix("#SBATCH ")
        for line in batch_script(nodes, ["python"], options, "train").splitlines()
        if line.startswith("#SBATCH")
    ]


def test_sbatch_options_become_directives():
    assert directives(
        "--partition=gpu --time 4:00:00 -A 'my account' --exclusive", Nodes(2, 2, 8, HERE, gpus=True)
    ) == [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--job-name=train",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=4:00:00",
        "-A 'my account'",
        "--exclusive",
    ]
    assert directives("--job-name='a b' --gres=gpu:8", Nodes(1, 4, 8, HERE, gpus=True)) == [
        "--nodes=1-4",
        "--ntasks-per-node=1",
        "--no-kill",
        "--job-name='a b'",
        "--gres=gpu:8",
    ]
    assert directives("", Nodes(2, 2, 4, HERE))[-1] == "--cpus-per-task=4"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes=3", "is set by flatout"),
        ("-N3", "is set by flatout"),
        ("gpu", "is not an option of sbatch"),
        ("--comment='a", "cannot be read"),
        ("'--comment=a\nb'", "line break"),
    ],
)
def test_invalid_sbatch_options(options, said):
    with pytest.raises(UsageError) as refused:
        directives(options, Nodes(2, 2, 1, HERE))
    assert said in str(refused.value)


# A shell runs the script without Slurm: its two commands record their arguments.
SCONTROL = "#!/bin/sh\necho localhost\necho node2\n"
SRUN = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done > srun.words
for word in "$@"; do case $word in
    localhost:*) python3 -c "import socket, sys; socket.create_connection(('localhost', int(sys.argv[1])))" "${word#*:}" && touch reached;;
esac; done
"""


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.processes
def test_bash_runs_the_script_and_the_first_node_serves_before_the_others_start(tmp_path):
    odd = ["python", "train.py", "a b", "$HOME", "`id`", "'\"", "new\nline", "", "*", "--", "é", "\\"]
    tool(tmp_path, "scontrol", SCONTROL)
    tool(tmp_path, "srun", SRUN)
    (tmp_path / "job.sbatch").write_text(batch_script(Nodes(1, 2, 4, HERE, None, 3), odd))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=hang_s(60),
    )
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "srun.words").read_text().split("\0")[:-1]
    assert words[words.index("--") + 1 :] == odd
    where = endpoint(words[words.index("--rendezvous") + 1])
    assert words[words.index("--nodes") + 1] == "1:2"
    assert (tmp_path / "reached").exists()
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection((where.host, where.port), timeout=10),
    ):  # it ends with the script
        pass


@pytest.mark.processes
def test_a_script_is_submitted_or_its_path_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    script, path = (
        batch_script(Nodes(2, 2, 1, HERE), ["python", "train.py"]),
        tmp_path / "out" / "my job.sbatch",
    )
    assert f"sbatch '{path}'" in submit(script, path)
    assert path.read_text() == script
    tool(
        tmp_path,
        "sbatch",
        f"#!{sys.executable}\nimport sys\nprint('Submitted batch job', len(open(sys.argv[1]).read()))\n",
    )
    assert f"Submitted batch job {len(script)}" in submit(script, path)
    tool(tmp_path, "sbatch", "#!/bin/sh\necho 'invalid partition specified: gpu' >&2\nexit 1\n")
    with pytest.raises(ProgramFailed, match="invalid partition"):
        submit(script, path)
