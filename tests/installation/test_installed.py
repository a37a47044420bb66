"""flatout as a stranger has it: from a wheel, beside torch, with exactly the packages that the wheel requires."""

import json
import re
import signal

import pytest
from environments import environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PROGRAM = """
import sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, int(sys.argv[1]) + 1):
    optimizer.zero_grad()
    x = torch.randn(64, int(sys.argv[2]))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if step <= 60:
        print(step, loss.item().hex(), flush=True)
        time.sleep(0.02)
"""
TEST = """
import pytest

@pytest.mark.flatout(max_slowdown="3%")
def test_speed(flatout_compare):
    flatout_compare("python train.py 60 8")
"""


@pytest.fixture(scope="module")
def user(artefacts, tmp_path_factory, flatout_in):
    """``user(*words)`` runs a console command of an environment that has the wheel of `pip wheel .`, torch and pytest."""
    folder = tmp_path_factory.mktemp("user")
    python = environment(folder / "venv", wheel=artefacts.wheel, torch=True, more=["pytest"])
    cli = flatout_in(folder / "work")
    (cli.folder / "train.py").write_text(PROGRAM)
    return cli, lambda command, *words: {
        "python": [python.parent / command, *words],
        "env": {"PATH": f"{python.parent}:/usr/bin:/bin"},
    }


def test_run_shows_its_box_and_the_output_of_the_program(user):
    cli, of = user
    words = ("python", "train.py", "60", "8")
    done, plain = cli(**of("flatout", "run", *words)), cli(**of(*words))
    assert (done.code, done.out) == (0, plain.out), done.err
    assert len(done.out.splitlines()) == 60
    assert done.err.count("+-- flatout run") == 1


def test_a_crash_is_explained(user):
    cli, of = user
    done = cli(**of("flatout", "run", "python", "train.py", "60", "9"))
    assert done.code == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in done.err
    assert "FE020" in done.err


def test_an_interrupted_run_resumes_exactly(user):
    cli, of = user
    words = of("flatout", "run", "--resume", "python", "train.py", "60", "8")
    process = cli.start(**words)
    for line in process.stdout:
        if line.startswith("20 "):
            break
    process.send_signal(signal.SIGINT)
    cli.finish(process)
    again, plain = cli(**words), cli(**of("python", "train.py", "60", "8"))
    assert again.code == 0, again.err
    assert [line for line in again.said if "resumed exactly after step" in line]
    assert again.out
    assert plain.out.endswith(again.out)


def test_tune_keeps_or_rejects_a_plan(user):
    cli, of = user
    options = ("--budget", "12s", "--levers", "gc_pause,fused_optimizer", "--no-write")
    done = cli(**of("flatout", "tune", *options, "python", "train.py", "1000000", "8"), timeout=200)
    assert done.code == 0, done.err
    assert "did not train" not in done.out + done.err
    (session,) = (json.loads(path.read_text()) for path in cli.folder.glob(".flatout/*/session.json"))
    assert session["status"] == "done"
    assert session["baseline"]["step_ms"] > 0
    assert re.search(r"as fast, with|as it is", done.out), done.out


def test_doctor_finds_nothing_wrong_with_python_and_torch(user):
    cli, of = user
    done = cli(**of("flatout", "doctor", "--json"))
    checks = json.loads(done.out)["checks"]
    problems = {check["code"] for check in checks if check["verdict"] == "problem"}
    assert {code for code in problems if code < "FD020"} == set()  # what follows is of the machine


def test_pytest_has_the_plugin(user):
    cli, of = user
    (cli.folder / "test_speed.py").write_text(TEST)
    done = cli(**of("python", "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_speed.py"), timeout=200)
    assert done.code == 0, done.out
    assert "there is no baseline 'main-test_speed-" in done.out


def test_the_wheel_of_the_source_distribution_enters_a_program(artefacts, tmp_path, flatout):
    python = environment(tmp_path / "venv", wheel=artefacts.wheel_of_sdist, torch=True)
    (flatout.folder / "train.py").write_text(PROGRAM)
    done = flatout("run", str(python), "train.py", "20", "8", python=[python, "-m", "flatout"])
    assert (done.code, done.err.count("+-- flatout run")) == (0, 1), done.err
