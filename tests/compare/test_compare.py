"""`flatout compare` on real programs: commands, revisions, baselines, gates, losses."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]

# A step sleeps, so its time is known. The optimizer is by hand: importing torch's own takes a second.
PROGRAM = """
import sys, time
import torch
import work
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
for step in range(100000):
    loss = model(torch.randn(16, 8)).square().mean() * work.scale(step)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else work.PAUSE)
"""
WORK = "PAUSE = {pause}\nHELD = None\ndef scale(step):\n    return {scale}\n"


@pytest.fixture
def project(flatout, monkeypatch):
    folder = flatout.folder
    monkeypatch.chdir(folder)  # for git
    (folder / "train.py").write_text(PROGRAM)
    (folder / "work.py").write_text(WORK.format(pause=0.004, scale="1.0"))
    return folder


def git(*words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(folder, message, **work):
    if work:
        (folder / "work.py").write_text(WORK.format(**{"pause": 0.004, "scale": "1.0", **work}))
    (folder / "log.txt").open("a").write(f"{message}\n")
    git("add", "-A")
    git("commit", "-qm", message)
    return git("rev-parse", "HEAD")


def record_of(folder, name="compare.json"):
    found = sorted(folder.glob(f".flatout/*/{name}"))
    assert len(found) == 1
    return json.loads(found[0].read_text())


def test_two_commands_a_gate_and_a_baseline(flatout, project):
    done = flatout(
        "compare", "--pairs", "3", "--budget", "1s", "--gate", "50%", "--gate-loss", "bits", "--save", "slow",
        "python train.py 0.004", "python train.py 0.04",
    )  # fmt: skip
    assert done.code == 1, done.err
    assert "B is slower" in done.out
    assert "same bits: " in done.out
    record = record_of(project)
    assert 2.0 < record["step_time"]["value"] < 9.1
    assert [gate["verdict"] for gate in record["gates"]] == ["failed", "passed"]
    assert record["b"]["steps"] <= 90  # a second is over when blocks begin: one of 9 steps for each process
    assert record["a"]["losses"]["0"][:20] == record["b"]["losses"]["0"][:20]
    assert record["a"]["losses"]["0"][:20] != record["a"]["losses"]["1"][:20]
    page = next(project.glob(".flatout/*/compare.html")).read_text()
    assert "B is slower" in page
    assert "None" not in page

    words = "--pairs 2 --budget 1s --gate 50% --baseline slow python train.py 0.012"
    done = flatout("compare", *words.split())
    assert done.code == 0, done.err
    assert "same bits: " in done.out
    stored = project / ".flatout/baselines/slow.json"
    moved = json.loads(stored.read_text())
    moved["key"]["machine"] = "a larger one"
    stored.write_text(json.dumps(moved))
    done = flatout("compare", "--baseline", "slow", "python", "train.py", "0.012")
    assert done.code == 11
    assert "another machine (a larger one" in done.err
    assert "--any-machine" in done.err


def test_revisions_import_their_own_files_and_share_untracked_data(flatout, project):
    (project / ".gitignore").write_text("data/\n.flatout/\n")
    git("init", "-q", "-b", "main")
    old = commit(project, "start", scale="1.0 + 0 * float(open('data/one').read())")
    (project / "data").mkdir()
    (project / "data" / "one").write_text("1")
    (project / "work.py").write_text(WORK.format(pause=0.004, scale="(1.0 if step < 3 else 1.0000001)"))
    words = "--pairs 2 --budget 1s --gate-loss spread --rev main.. python train.py"
    done = flatout("compare", *words.split())
    assert done.code == 0, done.err
    record = record_of(project)
    assert record["losses"]["verdict"] == "within the spread"
    assert record["losses"]["first_difference"] == 3
    assert (record["a"]["revision"], record["a"]["label"]) == (old, f"main ({old[:8]})")
    assert len(git("worktree", "list").splitlines()) == 1
    assert git("status", "--short").split() == ["M", "work.py"]


def test_the_two_words_of_one_command_can_be_stored(flatout):
    done = flatout.here("compare", "--save", "before", "python", "missing.py")
    assert "there is no script 'missing.py'" in done.err, done.err


@pytest.mark.full
def test_the_lines_of_the_guide_find_the_commit(flatout, project):
    """git tests the commits; one that does not run is skipped."""
    guide = Path(__file__).parents[2] / "docs" / "howto" / "compare.md"
    start, run, _ = guide.read_text().split("```sh\n")[1].split("```")[0].splitlines()
    (project / ".gitignore").write_text(".flatout/\n")
    git("init", "-q", "-b", "main")
    good = commit(project, "start")
    commit(project, "a comment")
    commit(project, "broken", scale="1 / 0")
    changed = commit(project, "one bit", scale="1.0000001")
    words = run.replace("--gate 3%", "--gate-loss bits --pairs 2 --budget 1s")
    lines = "\n".join([start, words]).replace("v1.2", good)
    done = subprocess.run(["sh", "-c", lines], capture_output=True, text=True, env=flatout.environment())
    assert "first bad commit could be any of" in done.stdout, (done.stdout, done.stderr)
    assert changed in done.stdout
    assert f"{good} is the first" not in done.stdout


def test_a_work_tree_of_the_user_that_is_not_mounted_stays(flatout, project):
    git("init", "-q", "-b", "main")
    commit(project, "start")
    git("worktree", "add", "-q", "../mine")
    (project.parent / "mine").rename(project.parent / "away")
    assert flatout.here("compare", "--rev", "none..", "python", "train.py").code == 2
    (project.parent / "away").rename(project.parent / "mine")
    assert git("-C", "../mine", "log", "--format=%s") == "start"


def test_what_is_measured_before_it_is_stopped_stays(flatout, project):
    words = ("compare", "--pairs", "9", "--budget", "1s", "python train.py", "python train.py")
    process = flatout.start(*words)
    assert process.stderr is not None
    while "pair 2" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert flatout.finish(process).code == 143
    record = record_of(project)
    assert record["status"] == "failed"
    assert len(record["pairs"]) == record["a"]["processes"] == 1
    assert record["losses"]["verdict"] == "same bits"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("python", "train.py"), "give two command lines in quotes"),
        (("--rev", "main..", "python", "train.py"), "not in a git repository"),
        (("--rev", "main", "python", "train.py"), "--rev takes two revisions"),
        (("--plan", "none", "python", "train.py"), "--plan takes two values"),
        (("no/python train.py", "python train.py"), "no/python"),
        (("--baseline", "none", "python", "train.py"), "there is no baseline 'none'"),
        (("--gate", "fast", "python a.py", "python b.py"), "is not a share"),
        (("--gate", "3", "python a.py", "python b.py"), "write 3% or 0.03"),
        (("--gate-memory", "5", "python a.py", "python b.py"), "write 3% or 0.03"),
        (("--save", "../a", "python", "train.py"), "is not a name for a baseline"),
        (
            ("--save", "a", "--gate", "3%", "--markdown", "b.md", "python", "train.py"),
            "--gate, --markdown would have no",
        ),
        (("--markdown", "no/b.md", "python train.py", "python train.py"), "b.md cannot be written"),
        (("--baseline", "a", "python train.py", "python train.py"), "--baseline takes one command"),
        (("--baseline", "broken", "python", "train.py"), "broken.json is damaged, or not a baseline"),
        (("--any-machine", "python train.py", "python train.py"), "no effect without --baseline"),
        ((), "`flatout compare 'python a.py' 'python b.py'`"),
        (("python 'train.py", "python b.py"), "cannot be split into words"),
        (("--rev", "a..b", "--plan", "none,none", "python", "train.py"), "cannot be compared at once"),
    ],
)
def test_mistakes_are_named(flatout, project, words, says):
    (project / ".flatout" / "baselines").mkdir(parents=True)
    (project / ".flatout" / "baselines" / "broken.json").write_text("garbage")
    done = flatout.here("compare", *words)
    assert done.code in (2, 4, 11, 127)
    assert says in done.err


def test_a_side_that_fails_is_named_with_its_error(flatout, project):
    (project / "broken.py").write_text("import torch\nraise ValueError('no such data')\n")
    done = flatout("compare", "python train.py", "python broken.py")
    assert done.code == 3  # 1 would mean that a gate failed
    assert "python broken.py fails" in done.err
    assert "no such data" in done.err
