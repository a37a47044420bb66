"""The options of `flatout run` for remote machines, through click itself."""

from __future__ import annotations

import json
import os

import click
import pytest
from click.testing import CliRunner

from flatout.cli.options import launch_targets, ranks
from flatout.cli.options.arguments import PROGRAM, program
from flatout.launch.command import Command
from flatout.launch.elastic import agent_command, asked_of_agent
from flatout.launch.kubernetes import KINDS
from flatout.schema.errors import FlatoutError


@click.command(context_settings=PROGRAM)
@ranks.options
@launch_targets.options
@program
def run(words, **given):
    asked = ranks.ranks_asked(given)
    assert set(given) == set(launch_targets.NAMES)
    command = Command(tuple(words), tuple(words))
    try:
        place = launch_targets.place_of(given, asked)
        if place is None:
            click.echo("here")
        elif place.cluster:
            raise SystemExit(launch_targets.go(place, command, dict(os.environ), ("--plan", "my plan.toml")))
        else:
            click.echo(repr(asked_of_agent(agent_command(place.nodes, command, True)[4:])))
    except FlatoutError as error:
        click.echo(str(error))
        raise SystemExit(error.exit_code) from None


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(run, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_run_on_this_machine_is_not_remote():
    assert said("--procs", "4", "python", "train.py", "--nodes", "3") == (0, "here\n")


def test_an_agent_gets_the_given_options():
    nodes = [
        "--nodes",
        "1:2",
        "--rendezvous",
        "10.0.0.1:29400",
        "--node-rank",
        "0",
        "--restarts",
        "3",
        "--gpus",
        "8",
    ]
    code, out = said(*nodes, "--", "python", "t.py", "--", "x")
    assert code == 0
    assert out == (
        "(Nodes(fewest=1, most=2, procs=8, rendezvous=Endpoint(host='10.0.0.1', port=29400), node_rank=0, restarts=3, gpus=True), True, "
        "['python', 't.py', '--', 'x'])\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slurm --k8s", "Give one of them"),
        ("--image i", "--image i is for --k8s"),
        ("--nodes 2 --slurm-options=--time=1", "is for --slurm"),
        ("--ray auto --job-name a", "is for --slurm or --k8s"),
        ("--k8s --nodes 2", "--image registry/name:tag"),
        ("--k8s --nodes 2 --image i --limits cpu", "--limits cpu=16,memory=64Gi"),
        ("--slurm --rendezvous a:1", "--slurm knows the hosts itself"),
        ("--ray auto --node-rank 1", "--ray knows the hosts itself"),
        ("--nodes 2", "HOST:29400"),
    ],
)
def test_contradictory_options(words, message):
    code, out = said(*words.split(), "python", "train.py")
    assert code == 2
    assert message in out


def test_the_kinds_that_help_names_are_there():
    helps = [option.help or "" for option in run.params if isinstance(option, click.Option)]
    assert any(" or ".join(KINDS) in said for said in helps)


def test_a_manifest_is_printed_whole():
    code, out = said(
        "--k8s",
        "--nodes",
        "2",
        "--gpus",
        "8",
        "--image",
        "i:1",
        "--limits",
        "cpu=16,memory=64Gi",
        "python",
        "train my.py",
        "$x",
    )
    worker = json.loads(out)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert code == 0
    assert worker["command"][:8] == [
        "flatout",
        "run",
        "--nodes",
        "2",
        "--rendezvous",
        "python-worker-0:29500",
        "--gpus",
        "8",
    ]
    assert worker["command"][8:] == ["--plan", "my plan.toml", "--", "python", "train my.py", "$$x"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "16", "memory": "64Gi"}


def test_a_script_for_slurm_is_written_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    code, out = said(
        "--slurm", "--nodes", "2", "--procs", "4", "--slurm-options", "--partition=gpu", "python", "train.py"
    )
    (script,) = tmp_path.glob("*.sbatch")
    assert code == 0
    assert f"sbatch {script}" in out
    text = script.read_text()
    assert "#SBATCH --partition=gpu\n" in text
    assert "--rendezvous \"$rendezvous\" --procs 4 --plan 'my plan.toml' -- \\\n  python train.py\n" in text
