"""`flatout explain` without an exception: a NaN in a log, a comparison, the record of a run or of a profile."""

import json
import re

import pytest
from click.testing import CliRunner
from profiles import ILL, healthy

from flatout.cli.main import flatout
from flatout.diagnose.bottleneck import name_bottleneck
from flatout.diagnose.ranking import judge
from flatout.schema.compare import Change, CompareRecord, LossVerdict, SideRecord
from flatout.schema.run_summary import RunSummary


def explain(path, text):
    path.write_text(text, encoding="utf-8")
    return CliRunner().invoke(flatout, ["explain", str(path)], standalone_mode=False)


@pytest.mark.parametrize(
    ("before", "said", "fix"),
    [
        ([2.0, 1.9, 4.0, 30.0, 900.0], "grown from 1.9 to 900: the training diverged", "flatout lr"),
        ([2.0, 1.9, 1.8, 1.7], "at once, after 1.7", "set_detect_anomaly"),
    ],
)
@pytest.mark.parametrize(
    "line", ["step {} loss {}", "epoch 1 it {} train_loss={} lr=0.1", "{{'step': {}, 'loss': {}}}"]
)
def test_the_first_nan_is_found_far_from_the_end(tmp_path, before, said, fix, line):
    values = [*[2.0] * 3000, *before, *[float("nan")] * 9000]
    text = "best_val_loss: inf\n" + "\n".join(line.format(at, value) for at, value in enumerate(values))
    done = explain(tmp_path / "train.log", text)
    assert done.return_value == 0
    assert said in done.output
    assert fix in done.output
    assert line.format(3000 + len(before), "nan") in done.output


def test_a_known_failure_comes_before_the_nan(tmp_path):
    text = 'loss: nan\nTraceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n'
    done = explain(tmp_path / "train.log", text)
    assert "FE040" in done.output
    assert "FE110" not in done.output


@pytest.mark.parametrize(
    "text", ["step 1 loss 0.5\nstep 2 loss 0.4", "best_loss inf\nloss 1.0", "loss_scale: inf"]
)
def test_a_healthy_log_shows_nothing(tmp_path, text):
    assert explain(tmp_path / "train.log", text).return_value == 1


def side(label, **versions):
    return SideRecord(label, ["python", "train.py"], versions=versions)


def test_a_slower_side_names_the_phase_and_the_package(tmp_path):
    record = CompareRecord(
        ["python", "train.py"],
        "/home/me",
        a=side("A", torch="2.13.0", numpy="2.4.6"),
        b=side("B", torch="2.14.1", numpy="2.4.6"),
        step_time=Change(0.05, 0.04, 0.06, 12),
        phases_ms={"forward": [0.1, -0.1, 0.3], "backward": [2.0, 1.5, 2.5]},
        losses=LossVerdict("same bits"),
    )
    done = explain(tmp_path / "compare.json", json.dumps(record.to_json()))
    assert done.return_value == 0
    for words in (
        "B takes 5.0 % more time",
        "most of it in backward (+2 ms)",
        "torch 2.13.0 became 2.14.1",
        "same bits",
    ):
        assert words in done.output
    assert "numpy" not in done.output
    record.step_time = Change(0.01, -0.01, 0.03, 12)
    assert explain(tmp_path / "compare.json", json.dumps(record.to_json())).return_value == 1


def test_a_run_that_waits_is_named_with_the_next_command(tmp_path):
    record = RunSummary(
        ["python", "train.py"], "/home/me", steps=100, device="cuda", gpu_busy=0.3, data_wait=0.02
    )
    done = explain(tmp_path / "rank0.json", json.dumps(record.to_json()))
    assert "the host: the GPU was busy 30% of the time" in done.output
    assert "flatout profile python train.py" in done.output
    record.gpu_busy = 0.9
    assert "nothing wrong" in explain(tmp_path / "rank0.json", json.dumps(record.to_json())).output


@pytest.mark.parametrize(
    "name", ["data_wait", "slow_fetch", "launch_bound", "host_sync_every_step", "thread_count"]
)
def test_a_profile_names_the_cause_the_line_and_the_next_command(tmp_path, name):
    changes, place = ILL[name]
    record = healthy(**changes)
    if "bound" not in changes:
        record.bound, record.bound_why = name_bottleneck(record)
    record.findings = judge(record)
    done = explain(tmp_path / "profile.json", json.dumps(record.to_json()))
    assert done.return_value == 0, done.output
    found = next(finding for finding in record.findings if finding.name == name)
    assert f"{found.rule} {found.said}" in done.output
    assert f"at     {place.sentence()}: {place.text}" in done.output
    assert re.search(r"flatout tune --levers [\w,]+ python train\.py", done.output)
    assert "COMMAND" not in done.output
    said = {
        "data_wait": "the CPU is badly used: 44% of the step is spent waiting for data",
        "slow_fetch": "the CPU is badly used: 44% of the step is spent waiting for data",
        "launch_bound": "it is idle 49% of the time",
    }
    assert said.get(name, "") in done.output


def test_a_good_profile_shows_nothing_and_one_without_a_step_says_so(tmp_path):
    path = tmp_path / "profile.json"
    assert "nothing wrong" in explain(path, json.dumps(healthy().to_json())).output
    failed = healthy(step_ms=None, step_ms_list=[], status="failed", message="it ended with code 2")
    done = explain(path, json.dumps(failed.to_json()))
    assert "no step was measured: it ended with code 2" in done.output
    assert "flatout profile python train.py" in done.output


def test_other_json_is_no_record(tmp_path):
    assert (
        explain(
            tmp_path / "other.json", '{"schema": 1, "step_time": 3, "phases_ms": [], "pairs": null}'
        ).return_value
        == 1
    )
