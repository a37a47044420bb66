"""Where the records of a command are, and who may write there: two commands at once, folders that cannot be written."""

import json
import os
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from limits import hang_s

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]

WAITS = "import os, time\nif 'WAIT' in os.environ: time.sleep(10_000)\n"
READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD" && exec "$@"'
TRAINS = """
import torch, time
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
"""
# Anomaly detection is slow, and switching it off changes no bit.
SLOWED = """
import os, torch
torch.autograd.set_detect_anomaly(True)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
for step in range(int(os.environ.get("STEPS", 10**6))):
    model.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
"""


def wait_for(condition):
    end = time.monotonic() + hang_s(60)
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.fixture
def read_only():
    """The words before a command that see its folder as read-only."""
    prefix = ["unshare", "-Urm", "sh", "-c", READ_ONLY, "sh"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not run: this machine does not allow a private file system (unshare -Urm)")
    return prefix


@pytest.fixture
def nowhere(tmp_path):
    """The environment of a user who has no home folder."""
    (tmp_path / "temporary").mkdir()
    return {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path / "temporary")}


def test_a_second_tune_of_one_command_is_told_of_the_first(flatout, script):
    """The lock is that of a living process: after SIGKILL the next tune starts."""
    script(WAITS)
    first = flatout.start("tune", "python", "train.py", env={"WAIT": "1"})
    (lock,) = wait_for(lambda: list(flatout.folder.glob(".flatout/*/lock")))
    (shared,) = wait_for(lambda: list(flatout.folder.glob(".flatout/*/trials/shared_samples")))
    (shared / "kept").touch()
    session = (lock.parent / "session.json").read_bytes()
    second = flatout("tune", "python", "train.py")
    assert (second.code, second.out) == (4, "")
    assert second.said == [
        f"flatout: another tune of this command is running (pid {first.pid}): wait for it. --job DIR names another folder for the records."
    ]
    assert (shared / "kept").exists()
    assert (lock.parent / "session.json").read_bytes() == session
    elsewhere = flatout("tune", "--job", "other", "python", "train.py")
    assert elsewhere.code == 3
    assert "no Python process of it imported torch" in elsewhere.err
    first.send_signal(signal.SIGKILL)
    flatout.finish(first)
    after = flatout("tune", "python", "train.py")
    assert after.code == 3, after.err


def test_a_resume_in_a_read_only_folder_finds_its_checkpoints(flatout, script, read_only, nowhere):
    pytest.importorskip("torch")
    script(TRAINS)
    words = ("run", "--resume", "python", "train.py")
    first = flatout.start(*words, prefix=read_only, env=nowhere)
    places = Path(nowhere["TMPDIR"])
    wait_for(lambda: list(places.glob("flatout-*/jobs/*/train-*/rescue/step-*/manifest.json")))
    first.send_signal(signal.SIGKILL)
    done = flatout.finish(first)
    (named,) = [line for line in done.said if "; the records go to " in line]
    again = flatout.start(*words, prefix=read_only, env=nowhere)
    said = []
    for line in again.stderr:
        said.append(line.strip())
        if "resumed exactly after step" in line:
            break
    again.send_signal(signal.SIGKILL)
    flatout.finish(again)
    assert named in said
    assert "resumed exactly after step" in said[-1]
    assert [path.name for path in flatout.folder.iterdir()] == ["train.py"]
    assert stat.S_IMODE(os.stat(next(places.glob("flatout-*"))).st_mode) == 0o700


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the cache", "--job"])
def test_the_command_that_tune_prints_finds_its_plan(flatout, script, read_only, nowhere, tmp_path, where):
    pytest.importorskip("torch")
    script(SLOWED)
    named = ("--job", str(tmp_path / "my job")) if where == "--job" else ()
    done = flatout(
        "tune",
        *("--budget", "60s", "--levers", "debug_off", *named, "python", "train.py"),
        prefix=read_only,
        env=nowhere,
        timeout=200,
    )
    assert done.code == 0, done.err
    place = tmp_path / "my job" if named else next(Path(nowhere["TMPDIR"]).glob("flatout-*/jobs/*/train-*"))
    session = json.loads((place / "session.json").read_text())
    assert session["outcome"] == "faster", session["message"]
    (command,) = [line.strip() for line in done.out.splitlines() if line.startswith("  flatout run ")]
    run = flatout(*shlex.split(command)[1:], prefix=read_only, env={**nowhere, "STEPS": "5"})
    assert run.code == 0
    assert "flatout: applied debug_off" in run.said
    assert not [line for line in run.said if "no plan" in line]


def test_the_files_of_tune_have_the_mode_of_the_umask(flatout, script):
    script(WAITS)
    umask = os.umask(0o027)
    try:
        flatout("tune", "python", "train.py")
    finally:
        os.umask(umask)
    (job,) = flatout.folder.glob(".flatout/*/")
    modes = {name: stat.S_IMODE((job / name).stat().st_mode) for name in ("session.json", "report.html")}
    assert modes == {"session.json": 0o640, "report.html": 0o640}
    assert stat.S_IMODE(job.stat().st_mode) == 0o700
