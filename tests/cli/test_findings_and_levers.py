"""Tuning tries the findings of a profile first, and records the outcome next to each predicted gain."""

import json
import signal

import pytest
from click.testing import CliRunner
from profiles import healthy

from flatout.cli import main
from flatout.cli.tune import tune
from flatout.diagnose.stored_profile import load_profile
from flatout.job.folder import write_json
from flatout.launch.command import understand
from flatout.schema.findings import Finding, Severity
from flatout.schema.records import Ratio
from flatout.schema.session import LeverRecord
from flatout.tune.goal import Goal
from flatout.tune.plan_files import job_folder
from flatout.tune.session import load_session

WORDS = ("python", "train.py")
SLOW = Finding(
    "FL150",
    "data_wait",
    Severity.TIME.value,
    "it waits",
    levers=["loader", "threads"],
    predicted=Ratio(1.8, 1.6, 2.0, 20),
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of a profiled program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    folder = job_folder(understand(WORDS)).make()
    write_json(folder.profile, healthy(findings=[SLOW]).to_json())
    before = signal.getsignal(signal.SIGTERM)
    yield folder
    signal.signal(signal.SIGTERM, before)


def searched(monkeypatch, levers):
    """Tuning without programs: the hints that the search got, and levers with the given outcomes."""
    hints = []

    def search(tuning):
        hints.append(tuning.goal.first)
        tuning.session.levers = levers

    monkeypatch.setattr("flatout.cli.tune.search", search)
    return hints


def test_findings_drive_levers_and_record_their_outcome(job, monkeypatch):
    hints = searched(
        monkeypatch,
        [
            LeverRecord("loader", {"workers": 1}, "applied", 1.5, 1.4, 1.6, 9),
            LeverRecord("gc_pause", True, "applied", 3.0, 2.9, 3.1, 9),
        ],
    )
    session, *_ = tune(WORDS, Goal(60.0), beside=False)
    assert hints == [("loader", "threads")]
    assert [(p.name, p.lever, p.predicted.median, p.measured.median) for p in session.predictions] == [
        ("data_wait", "loader", 1.8, 1.5)
    ]
    profile = load_profile(job)
    assert profile is not None
    assert profile.findings[0].measured == Ratio(1.5, 1.4, 1.6, 9)
    for page in (job.report, job.profile_page):
        text = page.read_text(encoding="utf-8")
        assert "1.80x (1.60–2.00)" in text
        assert "1.50x (1.40–1.60)" in text


TOMORROWS = json.dumps({**healthy(findings=[SLOW]).to_json(), "schema": 99})


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"schema": 1, "command": 3}', TOMORROWS],
    ids=["empty", "table", "list", "half", "tomorrow's"],
)
def test_a_file_that_is_not_a_profile_is_ignored(job, monkeypatch, text):
    job.profile.write_text(text, encoding="utf-8")
    hints = searched(monkeypatch, [])
    session, *_ = tune(WORDS, Goal(60.0), beside=False)
    assert hints == [()]
    assert session.predictions == []


def test_report_writes_the_page_of_a_profile(job):
    done = CliRunner().invoke(main.flatout, ["report"], catch_exceptions=False)
    assert done.output.split() == [str(job.profile_page)]
    assert "Data wait" in job.profile_page.read_text(encoding="utf-8")


def test_ctrl_c_keeps_the_record_of_the_finished_session(job, monkeypatch, capsys):
    searched(monkeypatch, [LeverRecord("gc_pause", True, "applied", 3.0, 2.9, 3.1, 9)])
    tune(WORDS, Goal(60.0), beside=False)
    finished = load_session(job)

    def interrupted(tuning):
        tuning.session.blocks = [{}]
        raise KeyboardInterrupt

    monkeypatch.setattr("flatout.cli.tune.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(WORDS, Goal(60.0), beside=False)
    assert load_session(job) == finished
    assert f"1 measured blocks are saved in {job.unfinished}; the same command" in capsys.readouterr().err
    found = []
    monkeypatch.setattr("flatout.cli.tune.search", lambda tuning: found.extend(tuning.session.blocks))
    tune(WORDS, Goal(60.0), beside=False)
    assert found == [{}]


def test_the_end_names_the_plan_beside_the_script_where_it_was_written(job, monkeypatch):
    searched(monkeypatch, [])
    words = ["tune", "--budget", "60s", *WORDS]
    done = CliRunner().invoke(main.flatout, words, catch_exceptions=False)
    assert done.stdout.endswith(f"report: {job.report}\nplan:   flatout.toml\n")
    done = CliRunner().invoke(main.flatout, [*words, "--fast"], catch_exceptions=False)
    other = job_folder(understand([*WORDS, "--fast"]))
    assert done.stdout.endswith(f"plan:   {other.plan}\n")
    assert done.stderr.endswith(
        f"flatout: the plan is in {other.plan}; flatout.toml stays, because it was made for `python train.py`\n"
    )
    done = CliRunner().invoke(main.flatout, ["tune", "--no-write", *WORDS], catch_exceptions=False)
    assert done.stdout.endswith(f"plan:   {job.plan}\n")
