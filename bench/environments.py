"""Ten commands of the wheel in fresh environments: each Python of this machine, or each supported torch.

    python bench/environments.py pythons     Python 3.10 to 3.14 beside the newest torch; what is missing is not run
    python bench/environments.py torches     torch 2.11 to 2.14 on this Python

The environments are made by uv and stay in --folder, so a second run only installs the new wheel. ``--torch`` gives
the requirement of torch, for machines that must not have the newest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from provenance import ROOT, markdown_table, stamp, write_result

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14")
HERE = ".".join(map(str, sys.version_info[:3]))
NOT_REACHED = "the benchmark was stopped before it"
HANGS_S = 420  # longer than any command takes on a loaded machine
TRAIN = """
import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(2048, 64)
y = x[:, :8].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(int(sys.argv[1])):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item()!r}", flush=True)
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
CRASHES = """
import torch

model = torch.nn.Linear(8, 4)
loss = model(torch.randn(2, 9)).sum()
"""
ADDS_LOSSES = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = 0
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    total += loss
print(total)
"""


@dataclass
class Row:
    """One environment. ``failed`` gives the reason by command; ``not_run`` a reason for the whole row."""

    python: str
    torch: str
    not_run: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Failed(Exception):
    """A command did not do what it is for."""


class Environment:
    """The commands of one environment, in a folder of their own."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.python, self.folder = str(place / "bin" / "python"), folder
        # One thread, so that the other work of a machine matters less. PYTHONPATH leads to the source, not the wheel.
        self.environment = {
            **os.environ,
            "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("PYTHONPATH")
        for name, text in (("train", TRAIN), ("crashes", CRASHES), ("adds_losses", ADDS_LOSSES)):
            (folder / f"{name}.py").write_text(text.lstrip(), encoding="utf-8")
        self.plain = ""

    def call(self, *words: str, code: int = 0) -> str:
        """Return standard output and error of a command. Raises Failed for another exit code."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=HANGS_S,
            check=False,
        )
        if done.returncode != code:
            raise Failed(f"exit code {done.returncode}: {done.stdout.strip()[-400:]}")
        return done.stdout

    def flatout(self, *words: str, code: int = 0) -> str:
        return self.call("flatout", *words, code=code)

    def record(self, name: str) -> dict[str, Any]:
        paths = sorted(self.folder.glob(f".flatout/*/{name}"), key=lambda path: path.stat().st_mtime)
        if not paths:
            raise Failed(f"there is no {name}")
        return json.loads(paths[-1].read_text(encoding="utf-8"))


def expect(text: str, *parts: str) -> None:
    for part in parts:
        if part not in text:
            raise Failed(f"no {part!r} in: {text.strip()[-400:]}")


def version(env: Environment) -> None:
    expect(env.flatout("--version"), "flatout")


def doctor(env: Environment) -> None:
    """The checks of Python and of torch pass; a machine without a GPU driver has problems of its own."""
    text = env.call("sh", "-c", "flatout doctor --json 2>&1; true")
    found = {check["code"]: check for check in json.loads(text[text.index("{") :])["checks"]}
    for code in ("FD001", "FD010", "FD011"):
        if found[code]["verdict"] not in ("ok", "note"):
            raise Failed(f"{code}: {found[code]['observed']}")


def check(env: Environment) -> None:
    expect(
        env.flatout("check", "--budget", "10s", "python", "adds_losses.py", code=1), "adds_losses.py:10", "FL"
    )


def run(env: Environment) -> None:
    """The summary is shown, and weights and losses are those of the plain program, bit for bit."""
    env.plain = env.call(env.python, "train.py", "6")
    text = env.flatout("run", "--plan", "none", "python", "train.py", "6")
    expect(text, *env.plain.splitlines(), "192 steps")


def crash(env: Environment) -> None:
    expect(env.flatout("run", "python", "crashes.py", code=1), "RuntimeError", "expects 8 features and got 9")


def tune(env: Environment) -> None:
    """A plan is kept or rejected: that nothing is faster is an answer too."""
    env.flatout("tune", "--budget", "20s", "python", "train.py", "100000")
    session = env.record("session.json")
    if session["status"] != "done" or not session["comparisons"]:
        raise Failed(f"{session['status']}: {session['message']}")


def plan(env: Environment) -> None:
    expect(env.flatout("plan", "python", "train.py", "100000"), "flatout")


def profile(env: Environment) -> None:
    env.flatout("profile", "--budget", "20s", "python", "train.py", "100000")
    if not env.record("profile.json").get("step_ms"):
        raise Failed("the profile has no step time")


def memory(env: Environment) -> None:
    expect(env.flatout("memory", "--budget", "20s", "python", "train.py", "100000"), "activations", "KiB")


def resume(env: Environment) -> None:
    """A killed run is resumed, and ends with the weights and losses of the plain program."""
    words = ("flatout", "run", "--plan", "none", "--resume", "python", "train.py", "6")
    killed = subprocess.Popen(
        words,
        cwd=env.folder,
        env=env.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert killed.stdout is not None
    seen = next((line for line in killed.stdout if line.startswith("epoch 3:")), "")
    killed.send_signal(signal.SIGTERM)  # it completes the step, writes a checkpoint and ends
    killed.stdout.read()
    if not seen or killed.wait(HANGS_S) == 0:
        raise Failed("the run was not interrupted")
    text = env.call(*words)
    expect(text, env.plain.splitlines()[-1], env.plain.splitlines()[-2])
    if "epoch 0:" in text:
        raise Failed(f"it started again: {text[:400]}")


SMOKE: dict[str, Callable[[Environment], None]] = {
    "--version": version,
    "doctor": doctor,
    "check": check,
    "run": run,
    "run, a crash": crash,
    "run --resume": resume,
    "tune": tune,
    "plan": plan,
    "profile": profile,
    "memory": memory,
}


def interpreter(asked: str) -> str | None:
    """Return the newest Python of this version that uv finds: on PATH, of pyenv or its own."""
    uv = [*uv_command(), "python", "find", "--no-project", "--no-python-downloads", asked]
    done = subprocess.run(uv, capture_output=True, text=True, check=False)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    others = sorted(pyenv.glob(f"{asked}.*/bin/python"), key=lambda path: path.parts[-3])
    return done.stdout.strip() or (str(others[-1]) if others else None)


def uv_command() -> list[str]:
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise SystemExit("uv makes the environments, and is not installed; `pip install uv`")
    return [found]


def install(python: str, torch: str, place: Path, wheel: Path, cache: Path) -> None:
    """Make the environment, or bring it up to date. uv stores each wheel once and links it: 5 GB, not 5 GB each."""
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "hardlink"}
    if not (place / "bin" / "python").exists():
        subprocess.run(
            [*uv_command(), "venv", "--quiet", "--python", python, place], env=environment, check=True
        )
    words = [
        "pip",
        "install",
        "--quiet",
        "--python",
        str(place / "bin" / "python"),
        "--reinstall-package",
        "flatout",
    ]
    subprocess.run([*uv_command(), *words, f"flatout @ {wheel.as_uri()}", torch], env=environment, check=True)


def smoke(row: Row, place: Path) -> Row:
    with tempfile.TemporaryDirectory(prefix="environments-") as folder:
        env = Environment(place, Path(folder))
        row.python, row.torch = env.call(
            env.python, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"
        ).split()
        for name, command in SMOKE.items():
            start = time.monotonic()
            try:
                command(env)
            except (Failed, subprocess.TimeoutExpired) as error:
                row.failed[name] = str(error).replace(folder, "DIR").replace(str(place), "ENV")
            row.seconds[name] = round(time.monotonic() - start, 1)
            print(f"  {name}: {row.failed.get(name, 'ok')} ({row.seconds[name]} s)", flush=True)
    return row


def page(what: str, rows: list[Row]) -> str:
    ran = [row for row in rows if not row.not_run]
    cells = [
        [
            row.python,
            row.torch,
            *("*not run*" if row.not_run else "failed" if name in row.failed else "ok" for name in SMOKE),
        ]
        for row in rows
    ]
    notes = [
        f"* Python {row.python}, torch {row.torch}: *not run*, {row.not_run}." for row in rows if row.not_run
    ]
    notes += [
        f"* Python {row.python}, torch {row.torch}, `{name}`: {' '.join(why.split())}"
        for row in rows
        for name, why in row.failed.items()
    ]
    passed = sum(not row.failed for row in ran)
    return "\n\n".join(
        [
            f"# The wheel in environments of its own: {what}",
            f"All {len(SMOKE)} commands pass in {passed} of {len(ran)} environments. Each is a virtual environment with the wheel and torch, and the "
            "programs run on one thread. `run` and `run --resume` must end with the weights of the plain program, bit for bit.",
            markdown_table(["Python", "torch", *SMOKE], cells),
            "\n".join(notes),
        ]
    )


def save(what: str, made: dict[str, Any], rows: list[Row], folder: Path) -> None:
    raw = {"rows": [asdict(each) for each in rows]}
    write_result(what, made, page(what, rows), raw, {str(folder): "DIR"})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pythons", "torches"))
    parser.add_argument("--only", default="", help="versions, with commas between them")
    parser.add_argument("--torch", default="torch>=2.11", help="the requirement of torch beside each Python")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "environments")
    parser.add_argument(
        "--cache", type=Path, help="uv's cache, on the file system of the folder", default=None
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made, pythons = stamp(), args.what == "pythons"
    with tempfile.TemporaryDirectory(dir=folder) as dist:
        subprocess.run([*uv_command(), "build", "--quiet", "--wheel", "--out-dir", dist, ROOT], check=True)
        (wheel,) = Path(dist).glob("*.whl")
        asked = args.only.split(",") if args.only else PYTHONS if args.what == "pythons" else TORCHES
        rows = [Row(each, "", NOT_REACHED) if pythons else Row(HERE, each, NOT_REACHED) for each in asked]
        for each, row in zip(asked, rows, strict=True):
            python = interpreter(each) if pythons else sys.executable
            if python is None:
                row.not_run = "this machine has no such interpreter"
                continue
            print(f"Python {row.python}, torch {row.torch or args.torch}", flush=True)
            place = folder / f"{args.what}-{each}"
            try:
                torch = args.torch if pythons else f"torch=={each}.*"
                install(python, torch, place, wheel, args.cache or folder / "cache")
            except subprocess.CalledProcessError as error:
                row.not_run = f"its installation failed ({error.returncode})"
                continue
            smoke(row, place)
            row.not_run = ""
            save(args.what, made, rows, folder)
    save(args.what, made, rows, folder)
    print(page(args.what, rows))
    return int(any(row.failed for row in rows) or all(row.not_run for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
