# ruff: noqa: SIM115 - scripts do open files in passing
"""A trial leaves no files behind: every way of writing a file works in the file sandbox, and the folder stays
unchanged.
"""

import json
import logging
import logging.handlers
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.agent.file_sandbox import FileSandbox
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay

torch = pytest.importorskip("torch")

OLD = "what the person had\n"


def contents(folder):
    """Names, content, links and times of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = (
            os.readlink(path)
            if path.is_symlink()
            else "folder"
            if path.is_dir()
            else (path.read_bytes(), path.stat().st_mtime_ns)
        )
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The user's folder, with files in it; the system's temporary folder is another one."""
    work, system = tmp_path / "work", tmp_path / "tmp"
    for folder in (work / "runs" / "old", work / "empty", system):
        folder.mkdir(parents=True)
    for name in ("log.txt", "model.pt", "runs/old/events"):
        (work / name).write_text(OLD)
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(system))
    monkeypatch.setenv("TMPDIR", str(system))
    return work


@pytest.fixture
def sandbox(here, tmp_path):
    """A file sandbox in this process, removed when the test ends."""
    ledger = Ledger()
    (tmp_path / "trial").mkdir()
    made = FileSandbox(Overlay(str(tmp_path / "trial" / "saved")), ledger)
    before = contents(here)
    made.install()
    try:
        yield made
    finally:
        ledger.restore()
    assert contents(here) == before


# Each way writes as a script would, and checks the result. test_file_sequences.py has the calls of os and shutil.

WAYS = []


def way(function):
    WAYS.append(function)
    return function


@way
def absolute_and_relative_names_are_one_file():
    with open("a.txt", "w") as file:
        file.write("a")
    assert open(os.path.abspath("a.txt")).read() == "a"
    assert open("runs/../a.txt").read() == "a"
    assert open(b"a.txt").read() == "a"


@way
def torch_save():
    torch.save({"x": torch.ones(2)}, "model.pt")
    assert torch.load("model.pt")["x"].tolist() == [1, 1]
    torch.save(torch.zeros(1), Path("runs") / "last.pt")
    assert torch.load(Path("runs/last.pt")).item() == 0


@way
def numpy_save():
    numpy = pytest.importorskip("numpy")
    numpy.save("a.npy", numpy.ones(3))
    numpy.savez("b.npz", x=numpy.ones(2))
    assert numpy.load("a.npy").sum() == 3
    assert numpy.load("b.npz")["x"].sum() == 2


@way
def logging_to_files():
    logger = logging.getLogger("test_shelter")
    handlers = [
        logging.FileHandler("log.txt"),
        logging.handlers.RotatingFileHandler("rotating.log", maxBytes=40, backupCount=2),
    ]
    for handler in handlers:
        logger.addHandler(handler)
    for at in range(6):
        logger.warning("a line of some length %d", at)
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()
    assert open("log.txt").read().startswith(OLD)
    assert "length 5" in open("rotating.log").read()


@way
def atomic_checkpoint():
    """Written next to the old file under a temporary name, then renamed over it."""
    handle, name = tempfile.mkstemp(dir=".")
    with os.fdopen(handle, "wb") as file:
        torch.save(torch.ones(1), file)
    os.replace(name, "model.pt")
    assert torch.load("model.pt").item() == 1
    with tempfile.NamedTemporaryFile("w", dir="runs", delete=False) as other:
        other.write("b")
    os.rename(other.name, "log.txt")
    assert open("log.txt").read() == "b"


@way
def checkpoint_by_way_of_the_temporary_folder():
    handle, name = tempfile.mkstemp()
    with os.fdopen(handle, "w") as file:
        file.write("a")
    shutil.move(name, "model.pt")
    assert open("model.pt").read() == "a"


@way
def temporary_files_and_folders():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").write_text("a")
        os.mkdir(Path(folder, "b"))
        Path(folder, "b", "c").write_text("c")
        assert Path(folder, "a").read_text() == "a"
    assert not os.path.exists(folder)
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("a")
        file.seek(0)
        assert file.read() == "a"
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "a").write_text("a")
        assert Path(folder, "a").read_text() == "a"


@way
def devices_and_descriptors():
    with open(os.devnull, "w") as file:
        file.write("a")
    read, write = os.pipe()
    with open(write, "w") as file:
        file.write("a")
    with open(read) as file:
        assert file.read() == "a"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_works_and_nothing_is_left_behind(way, sandbox):
    """The fixture compares the folder before and after."""
    assert way() is None
    assert sandbox.ledger.entries()


def test_threads_share_one_view(sandbox, here):
    def work(name):
        for n in range(60):
            Path(f"{name}{n}").mkdir()
            Path(f"{name}{n}/a").write_text(name)
            os.rename(f"{name}{n}", f"runs/{name}{n}")
            assert f"{name}{n}" in os.listdir("runs")
            assert Path(f"runs/{name}{n}/a").read_text() == name
            with open("log.txt", "a") as log:
                log.write(f"{name}\n")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))
    assert len(os.listdir("runs")) == 1 + 4 * 60
    assert sorted(Path("log.txt").read_text()[len(OLD) :].split()) == sorted("abcd" * 60)


def test_the_temporary_folder_is_empty_again_where_the_script_cleans_up(sandbox, tmp_path):
    temporary_files_and_folders()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_project_below_the_temporary_folder_is_sandboxed_too(tmp_path, monkeypatch):
    """Some users do keep projects in /tmp."""
    work = tmp_path / "project"
    work.mkdir()
    (work / "model.pt").write_text(OLD)
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ledger = Ledger()
    FileSandbox(Overlay(str(work / ".flatout" / "job" / "trials" / "1" / "saved")), ledger).install()
    try:
        Path("model.pt").write_text("new")
        Path("other.pt").write_text("new")
        Path(tempfile.gettempdir(), "elsewhere").write_text("x")
        assert Path("model.pt").read_text() == "new"
    finally:
        ledger.restore()
    assert Path("model.pt").read_text() == OLD
    assert not Path("other.pt").exists()
    assert (tmp_path / "elsewhere").read_text() == "x"


TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100000):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
"""
WRITES = """
import logging, os, shutil, sqlite3, subprocess, sys
os.mkdir("out")  # before torch: fails where it exists
import helper
logging.basicConfig(filename="log.txt", level=logging.INFO)
with open("out/written.py", "w") as file:
    file.write("X = 3")
sys.path.insert(0, "out")
import written
os.symlink("written.py", "out/latest")
os.rename("runs", "old")
assert sorted(os.listdir(".")) == ["helper.py", "log.txt", "model.pt", "old", "out", "train.py"], os.listdir(".")
assert os.path.realpath("out/latest").endswith("out/written.py") and open("old/1/loss").read() == "1"
shutil.rmtree("old")
database = sqlite3.connect("out/results.db")
database.execute("create table steps (loss)")
database.commit()
child = "import os; assert os.path.exists('out/results.db') and not os.path.exists('old'); open('out/child', 'w')"
subprocess.run([sys.executable, "-c", child], check=True, cwd=".")
assert os.path.exists("out/child")
os.chdir("out")
assert os.getcwd() == os.path.join(os.path.dirname(os.path.abspath(__file__)), "out")
subprocess.run(["touch", "by_another_program"], check=True)  # in a folder of the trial, so it stays there, too
assert os.path.exists("by_another_program") and os.path.exists("../out/by_another_program")
os.chdir("..")
""" + TRAINING.replace(
    "    optimizer.step()",
    """    optimizer.step()
    if step < 5:
        logging.info("step %d", step)
        torch.save(model.state_dict(), "model.pt")
        torch.save(model.state_dict(), f"out/{step}.pt")
        model.load_state_dict(torch.load("model.pt"))
        print("read back", open("log.txt").read().count("step"), flush=True)""",
)


@pytest.fixture
def trial(flatout, script, tmp_path):
    """Runs a program as a trial in a folder of a user; its record, the output, what is there before and after."""
    (tmp_path / "tmp").mkdir()
    work = flatout.folder
    (work / "runs" / "1").mkdir(parents=True)
    for name, text in {"log.txt": OLD, "model.pt": OLD, "helper.py": "", "runs/1/loss": "1"}.items():
        (work / name).write_text(text)
    options = ("trial", "--steps", "5", "--out", str(tmp_path / "record.json"), "python", "train.py")
    environment = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": ""}

    class Trial:
        def start(self, text):
            script(text)
            self.before = contents(work)
            return flatout.start(*options, env=environment)

        def finish(self, process):
            done = flatout.finish(process)
            return done, json.loads((tmp_path / "record.json").read_text())

        def run(self, text):
            return self.finish(self.start(text))

        def after(self):
            assert not list((tmp_path / "tmp").glob("flatout-*"))
            return {name: what for name, what in contents(work).items() if ".flatout" not in name}

    return Trial()


@pytest.mark.processes
def test_a_whole_trial_leaves_nothing_behind(trial):
    """A real trial in its own processes: folders, links, databases, modules, byte code, checkpoints, logs."""
    done, record = trial.run(WRITES)
    assert done.code == 0, done.err
    assert record["status"] == "finished"
    assert "read back 5" in done.out
    assert trial.after() == trial.before
    assert done.left == []


@pytest.mark.processes
def test_two_trials_at_once(trial, flatout):
    one = trial.start(WRITES)
    two = trial.start(WRITES)
    assert [trial.finish(process)[1]["status"] for process in (one, two)] == ["finished"] * 2
    assert trial.after() == trial.before


@pytest.mark.processes
def test_a_killed_trial_leaves_the_folder_as_it_was(trial, flatout):
    process = trial.start(WRITES.replace("if step < 5", "if True"))
    while "read back 3" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert trial.run(WRITES)[1]["status"] == "finished"
    assert trial.after() == trial.before
    assert not list(flatout.folder.glob(".flatout/*/trials/*/flatout-*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "change",
    [
        "import posix; posix.mkdir('made')",
        "import io; io.FileIO('log.txt', 'w')",
        "import posix; posix.rename('log.txt', 'x')",
        "import posix, os; posix.open('made', os.O_CREAT | os.O_WRONLY)",
    ],
)
def test_a_change_that_goes_around_the_sandbox_ends_the_trial_before_it_happens(trial, change):
    _, record = trial.run(f"{change}\n{TRAINING}")
    assert record["status"] == "failed"
    assert "train.py:1" in record["reason"]
    assert "could not keep apart" in record["reason"]
    assert trial.after() == trial.before


@pytest.mark.processes
def test_what_another_program_changes_is_said(trial):
    done, record = trial.run(f"import subprocess; subprocess.run(['mkdir', 'made'])\n{TRAINING}")
    assert record["status"] == "finished"
    assert "made changed in" in done.err
    assert trial.run(TRAINING)[0].err.count("changed in") == 0
