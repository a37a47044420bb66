"""`flatout ui`: real runs on one page, with the records of other commands; what is broken is skipped and named."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from schemas import json_schema

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

RECORDED = Path(__file__).parent.parent / "render" / "session.json"
PROGRAM = """
import sys, time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if sys.argv[1] == "fail" and step == 20:
        raise KeyError("x")
    if sys.argv[1] == "wait" and step == 20:
        print("waits", flush=True)
        time.sleep(100)
"""


def shown(flatout, *words):
    done = flatout.here("ui", "--json", *words)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert [each.message for each in Draft202012Validator(json_schema("history")).iter_errors(data)] == []
    return data


@pytest.mark.processes
def test_real_runs_are_listed_with_their_results(flatout, script):
    script(PROGRAM)
    assert flatout("run", "python", "train.py", "end").code == 0
    assert flatout("run", "--with", "gc_pause", "python", "train.py", "fail").code == 1
    process = flatout.start("run", "python", "train.py", "wait")
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    flatout.finish(process)
    data = shown(flatout)
    runs = {job["command"][-1]: job["runs"] for job in data["jobs"]}
    assert {word: [run["result"] for run in seen] for word, seen in runs.items()} == {
        "end": ["finished"],
        "fail": ["failed"],
        "wait": ["interrupted"],
    }
    assert sorted(data["jobs"], key=lambda job: job["runs"][-1]["created"], reverse=True) == data["jobs"]
    (run,) = runs["fail"]
    assert (run["exit_reason"], run["levers"]) == ("KeyError", ["gc_pause"])
    assert "torch 2." in run["setup"]
    record = json.loads((flatout.folder / ".flatout" / run["record"]).read_text())
    assert (record["steps"], record["steps_per_s"]) == (run["steps"], run["steps_per_s"])
    done = flatout("ui")
    assert (done.code, done.out, done.err) == (0, ".flatout/index.html\n", "")
    page = (flatout.folder / ".flatout" / "index.html").read_text()
    assert f'href="{run["record"]}"' in page
    assert "failed: KeyError" in page


@pytest.fixture
def job(flatout):
    folder = flatout.folder / ".flatout" / "train-01234567"
    folder.mkdir(parents=True)
    shutil.copy(RECORDED, folder / "session.json")
    return folder


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not readable as a record"),
        ("[" * 100_000, "not readable as a record"),
        ('{"schema": 9}', "of a newer flatout (schema 9, this one reads 1)"),
        ('{"schema": 1, "command": [], "cwd": "", "data_wait": "much"}', "not of its form (TypeError"),
        ('{"schema": 1, "command": [], "cwd": "", "versions": 3}', "not of its form (AttributeError"),
    ],
)
def test_a_broken_or_newer_record_is_skipped_with_a_word(flatout, job, text, why):
    path = job / "runs" / "20261125T110836-1" / "rank0.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    data = shown(flatout)
    assert list(data["skipped"]) == [path.relative_to(job.parent).as_posix()]
    assert next(iter(data["skipped"].values())).startswith(why)
    assert data["jobs"][0]["speedup"]["median"]
    done = flatout.here("ui")
    assert (done.code, len(done.said)) == (0, 1)
    assert str(path.relative_to(flatout.folder)) in done.said[0]
    assert "rank0.json</code>" in (job.parent / "index.html").read_text()
    assert path.read_text() == text


def test_the_folder_may_be_the_project_its_records_or_one_job(flatout, job):
    (job.parent / "incidents.jsonl").write_text("{}")  # a stray record makes no job of the folder of all
    (job.parent / "runs").mkdir()
    for words in ((), (".flatout",), (".flatout/train-01234567",)):
        assert [bool(job["speedup"]) for job in shown(flatout, *words)["jobs"]] == [True], words


def test_an_empty_folder_gets_the_next_command(flatout):
    done = flatout.here("ui")
    assert (done.code, done.out) == (2, "")
    assert "`flatout run COMMAND...` records a run" in done.said[0]
    assert not (flatout.folder / ".flatout").exists()
