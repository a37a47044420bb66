"""flatout in an environment of its own, without torch, for a program of another that has torch and nothing of flatout's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import environment

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAIN = """\
import sys, warnings
warnings.simplefilter("ignore")  # torch says that there is no numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

found = []
for name in ("numpy", "rich", "click", "psutil", "tomlkit"):
    try:
        __import__(name)
        found.append(name)
    except ImportError:
        pass
print(found, sys.version_info[:2] == tuple(map(int, sys.argv[1].split("."))))
torch.manual_seed(0)
x = torch.randn(512, 32)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(int(sys.argv[2])):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - labels).square().mean()
        loss.backward()
        optimizer.step()
        if epoch < 10:
            print(loss.item().hex(), flush=True)
"""
HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The Python of an environment that has torch alone."""
    return environment(tmp_path_factory.mktemp("program"), torch=True)


@pytest.fixture
def train(tmp_path, program):
    """``train(flatout, "run", epochs=3)`` runs train.py of a fresh folder by a flatout; without one, plainly."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*words, epochs=3, env=(), python=program, until=""):
        """``until``: send SIGTERM after the first line that begins with it."""
        plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        process = subprocess.Popen(
            [*words, python, "train.py", HERE, str(epochs)],
            cwd=tmp_path,
            env={**plain, "OMP_NUM_THREADS": "1", **dict(env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        before = ""
        while until and (line := process.stdout.readline()):
            before += line
            if line.startswith(until):
                process.terminate()
                break
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, before + out, err)

    return run


@pytest.fixture(scope="module")
def own(tmp_path_factory, wheel):
    """The flatout of an environment that has what the wheel declares, and no torch."""
    return environment(tmp_path_factory.mktemp("own"), wheel=wheel, torch=False).parent / "flatout"


def test_it_tunes_and_runs_with_the_same_bits(train, own, tmp_path):
    plain = train()
    assert plain.stdout.splitlines()[0] == "[] True"
    tuned = train(
        own, "tune", "--budget", "12s", "--levers", "fused_optimizer,gc_pause", "--no-write", epochs=100000
    )
    assert tuned.returncode == 0, tuned.stderr[-3000:]
    assert "guard" in tuned.stdout
    (session,) = tmp_path.glob(".flatout/*/session.json")
    record = json.loads(session.read_text())
    assert record["versions"]["torch"] == torch_version()
    assert record["status"] == "done"
    (plan,) = tmp_path.glob(".flatout/*/flatout.toml")
    for more in (("--plan", plan), ("--with", "fused_optimizer", "--with", "gc_pause", "--watch")):
        run = train(own, "run", *more)
        assert run.returncode == 0, run.stderr
        assert run.stdout == plain.stdout
        assert "flatout run --" in run.stderr
        assert "Traceback" not in run.stderr
        assert "could not" not in run.stderr


def test_its_doctor_checks_the_programs_python(own, program, tmp_path):
    path = f"{program.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        [own, "doctor", "--json"],
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads(done.stdout)
    assert record["snapshot"]["python"]["prefix"] == str(program.parent.parent)
    checks = {check["code"]: check for check in record["checks"]}
    assert checks["FD005"]["verdict"] == "ok"
    assert str(program) in checks["FD005"]["observed"]
    assert checks["FD010"]["verdict"] == "ok"


def tools():
    return Path(sys.executable).parent


def other_pythons():
    """Pythons of another minor version that flatout supports, on this machine."""
    names = [f"3.{minor}" for minor in range(10, 15) if f"3.{minor}" != HERE]
    pyenv = [str(path) for name in names for path in Path.home().glob(f".pyenv/versions/{name}.*/bin/python")]
    return [*pyenv, *filter(None, (shutil.which(f"python{name}") for name in names))]


@pytest.mark.parametrize("tool", ["uv tool", "pipx", pytest.param("uvx", marks=pytest.mark.full)])
def test_installed_as_a_tool(train, wheel, program, tool, tmp_path):
    """By uv with another minor version of Python than the program's, if this machine has one."""
    home = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin"), "PIPX_HOME": str(tmp_path / "tools"), "PIPX_BIN_DIR": str(tmp_path / "bin")}  # fmt: skip
    python = ["--python", next(iter(other_pythons()), sys.executable)]
    words = [tmp_path / "bin" / "flatout"]
    if tool == "uvx":
        words = [tools() / "uvx", *python, "--from", wheel, "flatout"]
    else:
        install = (
            [tools() / "uv", "tool", "install", *python]
            if tool == "uv tool"
            else [tools() / "pipx", "install"]
        )
        subprocess.run([*install, wheel], env={**os.environ, **home}, check=True, capture_output=True)
    plain = train()
    path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}  # as an activated environment has it
    done = train(*words, "run", "--with", "gc_pause", env=path, python="python")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "flatout: applied gc_pause" in done.stderr
    assert "+-- flatout run --" in done.stderr


def torch_version():
    import importlib.metadata

    return importlib.metadata.version("torch")
