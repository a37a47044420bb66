"""`flatout tune` on a small program: its files, its results, and continuing after an interruption."""

import json
import re

import pytest

from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.plan import Plan
from flatout.schema.session import SessionRecord

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

# Anomaly detection is on, so at least one lever has an effect here.
WITH_ANOMALY = "import torch\ntorch.autograd.set_detect_anomaly(True)\n"


@pytest.fixture(scope="module")
def tuned(flatout_in, tmp_path_factory, tiny):
    """One session of 25 seconds, shared by every test of this file."""
    cli = flatout_in(tmp_path_factory.mktemp("tuned"))
    (cli.folder / "train.py").write_text(WITH_ANOMALY + tiny)
    options = ["--effects", "exact,rounding", "--levers", "debug_off,gc_pause,fused_optimizer,autocast"]
    done = cli("tune", "--budget", "25s", *options, "--json", "python", "train.py", timeout=200)
    return cli, done, next((cli.folder / ".flatout").glob("*/"))


@pytest.fixture(scope="module")
def session(tuned):
    return json.loads((tuned[2] / "session.json").read_text())


@pytest.mark.processes
def test_it_ends_well_and_leaves_nothing_running(tuned):
    _, done, _ = tuned
    assert done.code == 0, done.err
    assert done.left == []
    assert "Traceback" not in done.err


def test_it_prints_the_session_alone(tuned, session):
    assert json.loads(tuned[1].out) == session


def test_its_files(tuned, session):
    cli, _, job = tuned
    certificate = {"flatout.certificate.json"} if session["certificate"] else set()
    assert {path.name for path in cli.folder.iterdir()} == {
        "train.py",
        "flatout.toml",
        ".flatout",
        *certificate,
    }
    assert {path.name for path in job.iterdir()} == {
        *certificate,
        "lock",
        "session.json",
        "flatout.toml",
        "report.html",
        "trials",
    }
    assert (
        cli.folder / ".flatout" / ".gitignore"
    ).read_text() == "*\n"  # so that records of runs are not committed by accident
    assert job.stat().st_mode & 0o777 == 0o700
    assert (cli.folder / "train.py").read_text().startswith(WITH_ANOMALY)
    for trial in (job / "trials").iterdir():
        assert {"spec.json", "result.json", "stdout.log", "stderr.log"} <= {
            path.name for path in trial.iterdir()
        } | {"result.json"}
        assert not (trial / "saved").exists()


def test_the_session_has_every_promised_field(session):
    assert session["schema"] == 1
    assert session["status"] == "done"
    assert session["message"]
    assert session["command"] == ["python", "train.py"]
    assert set(session["key"]) == {"command", "script", "machine", "versions", "python", "sources"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", session["created"])
    assert session["budget_s"] == 25
    assert session["spent_s"] > 0
    for side in ("baseline", "best"):
        assert session[side]["step_ms"] > 0
        assert session[side]["unit"] == "step"
    assert set(session["guard"]) >= {"verdict", "why", "checks"}
    assert session["guard"]["verdict"] in ("same", "equivalent", "failed", "not checked")
    assert session["guard"]["why"]
    assert "payback_steps" in session
    assert "noise_floor" in session
    assert session["machine"]["cores"] >= 1
    assert set(session["versions"]) >= {"python", "torch", "flatout"}
    assert SessionRecord.from_json(session).to_json() == session


def test_every_lever_ended_with_a_reason_or_a_ratio(session):
    assert [lever["name"] for lever in session["levers"]] == [lever.name for lever in TABLE]
    for lever in session["levers"]:
        assert set(lever) >= {"name", "value", "status", "ratio", "low", "high", "reason"}
        assert lever["status"] in ("applied", "rejected", "skipped")
        if lever["status"] != "applied":
            assert len(lever["reason"].split()) >= 2, lever
        if lever["ratio"] is not None:
            assert 0 < lever["low"] <= lever["ratio"] <= lever["high"]
            assert lever["n"] >= 1
    levers = {lever["name"]: lever for lever in session["levers"]}
    not_asked = levers["threads"]["reason"]
    assert "not among the requested levers" in not_asked or "OMP_NUM_THREADS" in not_asked
    assert session["effects"] == ["exact", "rounding"]
    assert (levers["autocast"]["effect"], levers["autocast"]["status"]) == ("precision", "skipped")
    if {"amx_bf16", "avx512_bf16"} & set(look().cpu_flags):
        assert levers["autocast"]["reason"] == "its effect here is precision, which was not requested"


def test_the_parts_agree(tuned, session):
    """The applied levers are those of the plan, a plan exists exactly where the outcome says so, and the promise
    holds.
    """
    cli, done, job = tuned
    plan = Plan.from_toml((job / "flatout.toml").read_text())
    assert (cli.folder / "flatout.toml").read_text() == (job / "flatout.toml").read_text()
    assert {choice.name for choice in plan} == {
        lever["name"] for lever in session["levers"] if lever["status"] == "applied"
    }
    assert {choice["name"] for choice in session["best"]["plan"].get("choices", ())} == {
        choice.name for choice in plan
    }
    assert (session["outcome"] == "faster") == (len(plan) > 0)
    assert not (session["speedup"] and session["disturbance"])
    if session["speedup"]:
        assert session["speedup"]["low"] > 1.0
        assert session["guard"]["verdict"] in ("same", "equivalent")
        assert session["payback_steps"] is not None
    assert dict(plan.made_for) == session["key"]
    assert all(choice.evidence for choice in plan)
    assert (
        session["message"].split("x")[0] in done.err
        or "plain" in session["message"]
        or session["undecided"]
        or session["disturbance"]
    )


def test_the_report_is_one_self_contained_file(tuned):
    text = (tuned[2] / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?:""", text)
    assert "Content-Security-Policy" in text


@pytest.mark.processes
def test_the_plan_it_found_is_used_by_run(tuned):
    cli, _, job = tuned
    plan = Plan.from_toml((job / "flatout.toml").read_text())
    done = cli("run", "python", "train.py", env={"STEPS": "12"})
    assert done.code == 0
    assert done.out.endswith("done\n")
    if len(plan):
        assert len(done.said) == 1
        assert all(choice.name in done.said[0] for choice in plan)
    else:
        assert done.said == []


def test_plan_shows_the_session(tuned):
    cli, _, job = tuned
    shown = cli.here("plan", "python", "train.py")
    assert shown.code == 0
    assert (job / "report.html").exists()
