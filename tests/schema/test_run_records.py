"""Old run records are removed, by several processes at once, and nothing else is."""

import json
import os
import subprocess
import sys

import pytest

from flatout.job.runs import remove_old, run_records

RECORD = json.dumps({"schema": 1, "rank": 0, "how": "ended", "steps": 3, "steps_per_s": 1.5})


def ended(runs, at, ranks=1):
    """The records of a run that ended after ``at`` seconds."""
    folder = runs / f"20261125T1200{at:02}-{at}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"rank{rank}.json").write_text(RECORD)
        os.utime(folder / f"rank{rank}.json", (1000 + at, 1000 + at))
    return folder


def names(runs):
    return sorted(path.name.rpartition("-")[2] for path in runs.iterdir())


def test_the_newest_runs_stay_with_all_of_their_ranks(tmp_path):
    for at in range(6):
        ended(tmp_path, at, ranks=2)
    remove_old(tmp_path, 4, "")
    assert names(tmp_path) == ["2", "3", "4", "5"]
    assert [len(files) for files in run_records(tmp_path).values()] == [2] * 4


def test_a_long_run_stays_that_started_first_and_ends_last(tmp_path):
    long, *_ = [ended(tmp_path, at) for at in range(4)]
    os.utime(long / "rank0.json", (2000, 2000))
    remove_old(tmp_path, 2, "")
    assert names(tmp_path) == ["0", "3"]
    remove_old(tmp_path, 1, tmp_path.joinpath("20261125T120003-3").name)
    assert names(tmp_path) == ["0", "3"]  # the newest, and the run itself


def test_what_is_no_run_record_stays(tmp_path):
    runs, other = tmp_path / "runs", tmp_path / "other.json"
    other.write_text(RECORD)
    kept = [other]
    for at, (name, text) in enumerate(
        {
            "rank0.jsonl": "{}\n",
            "wandb.log": "",
            "notes.json": RECORD,
            "rank0-2.json": "{",
            "rank1.json": '{"schema": 1, "rank": 1}',
        }.items()
    ):
        kept.append(ended(runs, at) / name)
        kept[-1].write_text(text)
        os.utime(kept[-1], (1000, 1000))
    (ended(runs, 10) / "rank1.json").symlink_to(other)
    kept.append(runs / "20261125T120010-10" / "rank1.json")
    (runs / "mine").mkdir()
    kept.append(runs / "mine" / "rank0.json")
    kept[-1].write_text(RECORD)
    (runs / "20261125T120011-11").symlink_to(runs / "mine")
    just_begun = runs / "20261125T110000-1"
    just_begun.mkdir()
    ended(runs, 50)
    remove_old(runs, 1, "")
    assert [path for path in kept if not path.exists()] == []
    assert just_begun.is_dir()
    assert sorted(str(path.parent.name)[-2:] for path in runs.glob("*/rank0.json")) == [
        "11",
        "50",
        "ne",
    ]  # one under a link, the newest, one of the user


@pytest.mark.processes
def test_several_processes_at_once(tmp_path):
    for at in range(60):
        ended(tmp_path, at)
    code = "import sys; from pathlib import Path; from flatout.job.runs import remove_old; remove_old(Path(sys.argv[1]), 5, '')"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [process.communicate()[1] for process in processes] == [b""] * 4
    assert names(tmp_path) == ["55", "56", "57", "58", "59"]
