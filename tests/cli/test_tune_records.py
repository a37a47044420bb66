"""What a search leaves when it ends or is interrupted, without programs."""

import signal

import pytest
from click.testing import CliRunner

from flatout.cli import main
from flatout.cli.tune import tune
from flatout.launch.command import parse_command
from flatout.schema.session import LeverRecord
from flatout.tune.goal import Goal
from flatout.tune.plan_files import job_folder
from flatout.tune.session import load_session

WORDS = ("python", "train.py")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of a program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    before = signal.getsignal(signal.SIGTERM)
    yield job_folder(parse_command(WORDS)).make()
    signal.signal(signal.SIGTERM, before)


def searched(monkeypatch, levers):
    """Tune with these outcomes of the levers."""

    def search(tuning):
        tuning.session.levers = levers

    monkeypatch.setattr("flatout.cli.tune.search", search)


def test_ctrl_c_keeps_the_record_of_the_finished_session(job, monkeypatch, capsys):
    searched(monkeypatch, [LeverRecord("gc_pause", True, "applied", 3.0, 2.9, 3.1, 9)])
    tune(WORDS, Goal(60.0), write_beside=False)
    finished = load_session(job)

    def interrupted(tuning):
        tuning.session.blocks = [{}]
        raise KeyboardInterrupt

    monkeypatch.setattr("flatout.cli.tune.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(WORDS, Goal(60.0), write_beside=False)
    assert load_session(job) == finished
    assert f"1 measured blocks are saved in {job.unfinished}; the same command" in capsys.readouterr().err
    found = []
    monkeypatch.setattr("flatout.cli.tune.search", lambda tuning: found.extend(tuning.session.blocks))
    tune(WORDS, Goal(60.0), write_beside=False)
    assert found == [{}]


def test_the_end_names_the_plan_beside_the_script_where_it_was_written(job, monkeypatch):
    searched(monkeypatch, [])
    words = ["tune", "--budget", "60s", *WORDS]
    done = CliRunner().invoke(main.flatout, words, catch_exceptions=False)
    assert done.stdout.endswith(f"report: {job.report}\nplan:   flatout.toml\n")
    done = CliRunner().invoke(main.flatout, [*words, "--fast"], catch_exceptions=False)
    other = job_folder(parse_command([*WORDS, "--fast"]))
    assert done.stdout.endswith(f"plan:   {other.plan}\n")
    assert done.stderr.endswith(
        f"flatout: the plan is in {other.plan}; flatout.toml stays, because it was made for `python train.py`\n"
    )
    done = CliRunner().invoke(main.flatout, ["tune", "--no-write", *WORDS], catch_exceptions=False)
    assert done.stdout.endswith(f"plan:   {job.plan}\n")
