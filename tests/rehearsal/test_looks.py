"""Measurements and reports of flatout on programs that train on a card.

The cards are a stand-in, whose kernels take a set time.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cards import LIMIT_S, PROGRAMS, needed, on_cards, surroundings
from limits import hang_s

from flatout.job.folder import TrialFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial
from flatout.trial.spec import TrialOptions

pytestmark = [needed(), pytest.mark.processes]
GAN = str(PROGRAMS / "gan.py")
LEVERS = "allocator,tf32,autocast,fused_optimizer,gc_pause,resident_data,loader,graphs"
BESIDE_A_FULL_CARD = """
import runpy, sys, torch
def on_the_first_card(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda:0")
ballast = on_the_first_card(1500)
torch.nn.modules.module.register_module_forward_hook(lambda *_: on_the_first_card(64).size(0) < 0 or None)  # for a moment, in each step
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ERRORS = r"\w+Error\b|INTERNAL ASSERT|raised|signal \d+"


def line_of(path, text):
    return next(at for at, line in enumerate(Path(path).read_text().splitlines(), 1) if text in line)


@pytest.mark.full
def test_tune_confirms_a_plan_on_a_card(tmp_path):
    """It is interrupted once the plan is confirmed."""
    command = [sys.executable, "-m", "flatout", "tune", "--no-write", "--budget", "10m", "--levers", LEVERS]
    lines = []
    with subprocess.Popen(
        [*command, "python", GAN],
        cwd=tmp_path,
        env=surroundings(kernel_us=400),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stderr:
            lines.append(line)
            if any("confirming: " in earlier for earlier in lines[:-1]):
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=hang_s(60))
    assert not re.search(ERRORS, "".join(lines)), "".join(lines)
    (record,) = tmp_path.glob(".flatout/gan-*/session.json")
    session = json.loads(record.read_text())
    assert [gpu["name"] for gpu in session["machine"]["gpus"]] == ["Stand-in card 0", "Stand-in card 1"]
    assert [c for c in session["comparisons"] if c["how"] == "fresh pairs" and c["n"] >= 4], "".join(lines)
    assert session["guard"]["verdict"] != "failed", session["guard"]


def test_a_trial_measures_an_optimizer_that_calls_its_closure(tmp_path):
    """It calls the closure for so long that its passes are measured: from the middle of the first step on, by
    the card's clock.
    """
    done = on_cards(
        tmp_path, "flatout", "trial", "--steps", "8", "python", str(PROGRAMS / "closure.py"), "--pause", "0.4"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"8 steps measured after \d+ warm-up steps, [\d.]+ ms per backward", done.stdout + done.stderr
    )


def test_memory_and_time_are_those_of_the_models_card_without_our_own_use(tmp_path, monkeypatch):
    for name, value in surroundings(kernel_us=50).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BESIDE_A_FULL_CARD)
    command = parse_command([sys.executable, "train.py", GAN, "--device", "cuda:1"])
    with Trial(
        command,
        TrialFolder(tmp_path / "trial"),
        Plan(),
        Facts(),
        TrialOptions(table="flatout.diagnose.what_ifs:TABLE"),
    ) as trial:
        assert trial.wait_ready(seconds() + LIMIT_S)["max_copies"] >= 3  # its own card, which is almost empty
        before = trial.ask({"do": "record"}, seconds() + LIMIT_S)["record"]["peak_memory_bytes"]
        assert trial.ask({"do": "replica", "choices": []}, seconds() + LIMIT_S)["replica"]["checks"]
        assert trial.switch([Choice("syncs", "all")], seconds() + LIMIT_S)["applied"]
        assert len(trial.run_ticks(4, seconds() + LIMIT_S)) == 4, (
            "the clock waits where the program no longer does"
        )
        assert trial.finish().peak_memory_bytes == before
    assert 0 < before < 2**21, "the ballast is on the other card"


@pytest.mark.full
def test_a_profile_finds_the_programs_reads_and_none_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(BESIDE_A_FULL_CARD)
    done = on_cards(
        tmp_path,
        "flatout",
        "profile",
        "--steps",
        "8",
        "--budget",
        "12s",
        "--json",
        "python",
        "train.py",
        GAN,
        "--device",
        "cuda:1",
        kernel_us=50,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    profile = json.loads(done.stdout)
    reads = {
        (Path(each["place"]["file"]).name, each["place"]["line"])
        for each in profile["synchronisations"]
        if each["kind"] == "item"
    }
    assert reads == {("gan.py", line_of(GAN, "critic_loss.item()"))}
    assert "synchronize" not in {each["kind"] for each in profile["synchronisations"]}, (
        "the clock's own wait at the end of a block"
    )
    assert 0 < profile["memory"]["peak_bytes"] < 2**21, "the second card's memory, not the first one's"
    assert not profile["tensor_growth"]["leaking"], "the losses that flatout keeps are not the program's"
    assert sum(phase["share"] for phase in profile["phases"].values()) < 1.05


@pytest.mark.full
def test_predicted_memory_matches_the_allocator(tmp_path):
    words = ("flatout", "memory", "--allocator", "cuda", "--json", "python", GAN, "--device", "cuda:1")
    done = on_cards(tmp_path, *words, CUBLAS_WORKSPACE_CONFIG=":0:0")  # the stand-in has no cuBLAS
    assert done.returncode == 0, done.stderr[-3000:]
    predicted = json.loads(done.stdout)
    assert (predicted["device"], predicted["limit_source"]) == ("cuda", "Stand-in card 1")
    measured = [point for point in predicted["points"] if point["measured_bytes"]]
    assert measured
    for point in measured:
        assert abs(point["peak_bytes"] / point["measured_bytes"] - 1) < 0.05, point


@pytest.mark.full
def test_check_observes_a_healthy_program_on_a_card(tmp_path):
    done = on_cards(tmp_path, "flatout", "check", "--json", "--budget", "5s", "python", GAN, kernel_us=50)
    record = json.loads(done.stdout)
    assert record["findings"] == [], done.stderr
    assert record["steps"] > 20
