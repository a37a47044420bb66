"""What flatout measures and says of programs that train on a card. The cards are a stand-in, whose kernels take a set time."""

import json
import re
from pathlib import Path

from cards import PROGRAMS, needed, on_cards

pytestmark = needed()
GAN = str(PROGRAMS / "gan.py")
LEVERS = "allocator,tf32,autocast,fused_optimizer,gc_pause,resident_data,loader"
ERRORS = r"\w+Error\b|INTERNAL ASSERT|raised|signal \d+"


def line_of(path, text):
    return next(at for at, line in enumerate(Path(path).read_text().splitlines(), 1) if text in line)


def test_tune_measures_the_levers_of_a_card(tmp_path):
    done = on_cards(tmp_path, "flatout", "tune", "--no-write", "--budget", "30s", "--levers", LEVERS, "python", GAN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(ERRORS, done.stdout), done.stdout
    (record,) = tmp_path.glob(".flatout/gan-*/session.json")
    session = json.loads(record.read_text())
    assert [gpu["name"] for gpu in session["machine"]["gpus"]] == ["Stand-in card 0", "Stand-in card 1"]
    compared = {lever["name"] for lever in session["levers"] if lever["how"] == "live"}
    assert len(compared & {"tf32", "autocast", "fused_optimizer", "gc_pause"}) >= 2


def test_a_trial_measures_an_optimizer_that_calls_its_closure(tmp_path):
    done = on_cards(tmp_path, "flatout", "trial", "--steps", "8", "python", str(PROGRAMS / "closure.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"8 steps measured after \d+ to warm up", done.stdout + done.stderr)


def test_a_profile_finds_the_programs_reads_and_none_of_its_own(tmp_path):
    done = on_cards(tmp_path, "flatout", "profile", "--steps", "8", "--budget", "12s", "--json", "python", GAN, "--device", "cuda:1", kernel_us=50)
    assert done.returncode == 0, done.stderr[-3000:]
    profile = json.loads(done.stdout)
    reads = {(Path(each["place"]["file"]).name, each["place"]["line"]) for each in profile["crossings"] if each["kind"] == "item"}
    assert reads == {("gan.py", line_of(GAN, "critic_loss.item()"))}
    assert 0 < profile["memory"]["peak_bytes"] < 2**21, "the second card's memory, not the first one's"
    assert not profile["leak"]["leaking"], "the losses that we keep are not the program's"
    assert sum(phase["share"] for phase in profile["phases"].values()) < 1.05


def test_memory_is_foretold_as_the_allocator_hands_it_out(tmp_path):
    done = on_cards(tmp_path, "flatout", "memory", "--device", "cuda", "--json", "python", GAN)
    assert done.returncode == 0, done.stderr[-3000:]
    foretold = json.loads(done.stdout)
    assert foretold["device"] == "cuda"
    measured = [point for point in foretold["points"] if point["measured_bytes"]]
    assert measured
    for point in measured:
        assert abs(point["peak_bytes"] / point["measured_bytes"] - 1) < 0.05, point


def test_check_runs_the_program_and_names_the_lines_that_wait(tmp_path):
    done = on_cards(tmp_path, "flatout", "check", "--run", "12s", "python", GAN, kernel_us=50)
    assert "FL101" in done.stdout, done.stdout + done.stderr
    assert f"gan.py:{line_of(GAN, 'critic_loss.item()')}" in done.stdout
