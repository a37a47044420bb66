"""Attaching to a process: only where a job is named, only after torch, and never to the program's harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s
from programs import STEPS_BY_HAND

import flatout

pytestmark = pytest.mark.processes

SITE = Path(flatout.__file__).parent / "agent" / "site"

ENTRY = """
import os, sys
def attach(job):
    torch = sys.modules["torch"]
    assert torch.nn.Linear  # torch has been executed to its end
    with open(job["note"], "a") as note:
        note.write(f"{os.getpid()}\\n")
def broken(job):
    raise KeyError("no such thing")
"""
STAND_IN = "nn = type('nn', (), {'Linear': 1})\nseeds = []\nmanual_seed = seeds.append\n"


@pytest.fixture
def enter(tmp_path):
    """``enter(source)`` runs a script with the site folder first on PYTHONPATH; returns the process and the
    processes that were entered.
    """
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    note = tmp_path / "note"

    def run(
        source, *, job=None, options=(), real_torch=False, torch=STAND_IN, env=(), more_path=(), arguments=()
    ):
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(source)
        if not real_torch:
            (folder / "torch.py").write_text(torch)
        written = {"entry": "entry_of_test:attach", "note": str(note), **(job or {})}
        (tmp_path / "job.json").write_text(json.dumps(written))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT")}
        environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *map(str, more_path), str(tmp_path)])
        if job is not False:
            environment["FLATOUT_JOB"] = str(tmp_path / "job.json")
        done = subprocess.run(
            [sys.executable, *options, "script.py", *arguments],
            cwd=folder,
            env={**environment, **dict(env)},
            capture_output=True,
            text=True,
            timeout=hang_s(60),
        )
        entered = [int(line) for line in note.read_text().split()] if note.exists() else []
        return done, entered

    return run


def test_without_a_job_nothing_is_done(enter):
    done, entered = enter(
        "import sys, torch\nprint([m for m in sys.modules if m.startswith('flatout')], len(sys.meta_path))",
        job=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("[] ")
    assert done.stderr == ""
    assert entered == []


def test_the_entry_is_called_once_right_after_torch(enter):
    done, entered = enter(
        "import os\nprint(os.getpid())\nimport torch\nimport torch\nfrom torch import nn\nimport importlib\nimportlib.reload(torch)"
    )
    assert done.stderr == ""
    assert entered == [int(done.stdout)]


@pytest.mark.parametrize(
    "way",
    [
        "from torch import nn",
        # libraries check whether torch is installed, long before it is imported
        "import importlib.util\nfor _ in range(3): assert importlib.util.find_spec('torch') is not None\nimport torch",
        "__import__('torch')",
        "import importlib; importlib.import_module('torch')",
        "exec('import torch')",
        "import threading; t = threading.Thread(target=lambda: __import__('torch')); t.start(); t.join()",
    ],
)
def test_every_way_of_importing(enter, way):
    done, entered = enter(way)
    assert done.stderr == ""
    assert len(entered) == 1


def test_a_program_without_torch_pays_nothing(enter):
    done, entered = enter(
        "import sys, json\nprint(sorted(m for m in sys.modules if m.startswith('flatout')))\n"
        "print([m for m in ('click', 'rich', 'tomllib', 'dataclasses', 'numpy') if m in sys.modules])"
    )
    assert entered == []
    assert done.stdout.splitlines()[0] == "['flatout', 'flatout.agent', 'flatout.agent.bootstrap']"
    assert done.stdout.splitlines()[1] == "[]"
    assert done.stderr == ""


def test_a_broken_torch_raises_its_own_error(enter):
    done, entered = enter(
        "try:\n    import torch\nexcept ImportError as error:\n    print('caught', error)",
        torch="raise ImportError('libcudart.so.99')",
    )
    assert done.stdout == "caught libcudart.so.99\n"
    assert "flatout" not in done.stderr
    assert entered == []


def test_a_second_import_after_a_broken_one_is_observed(enter):
    """Some programs repair their environment and import again."""
    source = (
        "import os\ntry:\n    import torch\nexcept ImportError:\n    os.environ['MENDED'] = '1'\nimport torch"
    )
    done, entered = enter(
        source, torch="import os\nif 'MENDED' not in os.environ: raise ImportError('x')\n" + STAND_IN
    )
    assert done.returncode == 0, done.stderr
    assert len(entered) == 1


@pytest.mark.parametrize(
    "job",
    [{"entry": "entry_of_test:broken"}, {"entry": "entry_of_test:missing"}, {"entry": "no_such_module:f"}],
)
def test_an_entry_that_fails_lets_the_program_run(enter, job):
    done, _ = enter("import torch\nprint('still', torch.nn.Linear)", job=job)
    assert done.returncode == 0
    assert done.stdout == "still 1\n"
    assert done.stderr.startswith("flatout: could not attach to torch (")
    assert "the script runs without flatout" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_finished_job_prints_nothing(enter, tmp_path):
    """A process may outlive its run, or inherit its environment."""
    done, entered = enter("import torch\nprint('still')", env={"FLATOUT_JOB": str(tmp_path / "gone.json")})
    assert (done.returncode, done.stdout, done.stderr, entered) == (0, "still\n", "", [])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"entry": 5}', "\x00"])
def test_a_job_that_cannot_be_read_lets_the_program_run(enter, tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    done, _ = enter("import torch\nprint('still')", env={"FLATOUT_JOB": str(path)})
    assert done.returncode == 0
    assert done.stdout == "still\n"
    assert done.stderr.startswith("flatout: could not attach")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("job", [None, False], ids=["with a job", "without"])
def test_another_sitecustomize_is_not_hidden(enter, tmp_path, job):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('other site', __name__)\nANSWER = 42\n")
    done, entered = enter(
        "import sys, sitecustomize, torch\nprint(sitecustomize.ANSWER, sitecustomize.__file__)",
        job=job,
        more_path=[other],
    )
    assert done.stdout.splitlines() == ["other site sitecustomize", f"42 {other / 'sitecustomize.py'}"]
    assert len(entered) == (job is None)


def test_another_sitecustomize_that_fails_still_fails(enter, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    done, entered = enter("import torch\nprint('still')", more_path=[other])
    assert done.stdout == "still\n"
    assert "RuntimeError: mine" in done.stderr
    assert len(entered) == 1


BECOMES_FIRST = """
import os, sys, json
if 'AGAIN' not in os.environ:  # exec keeps the process number, so a process that becomes the program knows itself
    path = os.path.join(os.environ['FLATOUT_JOB'] + '.folder', 'job.json')
    os.mkdir(os.path.dirname(path))
    json.dump({**json.load(open(os.environ['FLATOUT_JOB'])), 'pid': os.getpid()}, open(path, 'w'))
    os.execve(sys.executable, [sys.executable, 'script.py'], {**os.environ, 'AGAIN': '1', 'FLATOUT_JOB': path})
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "never imported torch"),
        ("import torch", "never finished a training step"),
        (
            "from flatout.job.claims import REPORT, claim; print(claim(os.environ['FLATOUT_JOB'] + REPORT))",
            None,
        ),
    ],
)
def test_the_first_process_reports_where_nothing_could_act_and_cleans_up(enter, tmp_path, source, says):
    done, _ = enter(BECOMES_FIRST + source)
    assert done.stderr == (f"flatout: nothing was applied: this program {says}\n" if says else "")
    assert not (tmp_path / "job.json.folder").exists()
    assert (tmp_path / "job.json").exists()


def test_any_other_process_prints_nothing(enter, tmp_path):
    done, _ = enter("print('child')", job={"pid": os.getpid()})
    assert (done.stdout, done.stderr) == ("child\n", "")
    assert (tmp_path / "job.json").exists()


def test_seeds(enter):
    pytest.importorskip("numpy")
    source = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.seeds)"
    first, _ = enter(source, job={"seed": 3})
    again, _ = enter(source, job={"seed": 3})
    other, _ = enter(source, job={"seed": 4})
    none, _ = enter(source, job={"seed": None})
    assert first.stdout == again.stdout != other.stdout
    assert "[3]" in first.stdout
    assert "[]" in none.stdout


# -- children, with the real torch

CHILDREN = """
import multiprocessing, os, subprocess, sys
import torch

def work(queue):
    queue.put(os.getpid())

if __name__ == "__main__":
    print("main", os.getpid(), flush=True)
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(method, queue.get(), flush=True)
        child.join()
    print("subprocess", subprocess.check_output([sys.executable, "-c", "import os, torch; print(os.getpid())"], text=True).strip(), flush=True)
    subprocess.check_call([sys.executable, "-c", "print('no torch')"])
"""


@pytest.mark.timeout(120)
def test_children_are_reached(enter):
    """Spawned children and subprocesses are entered themselves.

    A forked child has its parent's state; one without torch is left alone.
    """
    pytest.importorskip("torch")
    done, entered = enter(CHILDREN, real_torch=True)
    assert done.returncode == 0, done.stderr
    numbers = {
        line.split()[0]: int(line.split()[1])
        for line in done.stdout.splitlines()
        if line.split()[1].isdigit()
    }
    assert sorted(entered) == sorted([numbers["main"], numbers["spawn"], numbers["subprocess"]])
    assert numbers["fork"] not in entered
    assert done.stderr == ""


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_are_inert(flatout, script, tmp_path, method):
    """Loader workers of a measured program do not take part in the trial, and end with it."""
    script(
        STEPS_BY_HAND
        + f'''
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2000
    def __getitem__(self, at):
        torch.nn.Linear(1, 1)(torch.ones(1)).sum().backward()  # training of its own, in the worker
        return torch.full((4,), float(at)), os.getpid()

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="{method}")
    for batch in loader:
        steps(1)
'''
    )
    done = flatout("trial", "--steps", "5", "--out", str(tmp_path / "record.json"), "python", "train.py")
    record = json.loads((tmp_path / "record.json").read_text())
    assert done.code == 0, done.err
    assert record["status"] == "finished"
    assert record["steps"] == 5
    assert record["context"]["loaders"][0]["num_workers"] == 1
    assert done.left == []
