"""Programs that train on a card give the same lines under flatout: without a plan, with levers, after an
interruption. The cards are a stand-in.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from cards import EXAMPLES, PROGRAMS, SMALL_GPT, info, interrupted, needed, on_cards, printed_by

import flatout

pytestmark = [needed(), pytest.mark.processes]
SOURCE = Path(flatout.__file__).parent

SMALL_RESNET = [str(EXAMPLES / "tutorial.py"), "--images", "96", "--batch-size", "32", "--epochs", "2"]
RUNS = {
    "resnet": SMALL_RESNET,
    "gpt": [*SMALL_GPT, "--epochs", "1"],
    "gan": [str(PROGRAMS / "gan.py"), "--epochs", "30"],
    "second card": [str(PROGRAMS / "gan.py"), "--epochs", "30", "--device", "cuda:1"],
    "closure": [str(PROGRAMS / "closure.py"), "--epochs", "6"],
    "default device": [str(PROGRAMS / "default_device.py"), "--epochs", "3", "--device", "cuda:1"],
    "lightning": [str(PROGRAMS / "lightning_trainer.py"), "--epochs", "2"],
    "hugging face": [str(PROGRAMS / "hf_trainer.py"), "--epochs", "1"],
}
OF_TRAINERS = {"lightning": "lightning", "hugging face": "transformers"}
MISSING = {name for name, package in OF_TRAINERS.items() if importlib.util.find_spec(package) is None}
ONE_CARD = {"hugging face": 1}  # it would use both through NCCL, which has no stand-in
# Code that wraps torch's functions, or makes batches itself, where tensors are made on the card by default.
ATTACHED = {
    "default device": ["--resume", "--with", "resident_data", "--with", "loader={workers=1,pin=true}"]
}
TELLS_OF_THE_FIRST_CARD = """
import atexit, runpy, sys, torch
atexit.register(lambda: print("on the first card:", torch.cuda.max_memory_allocated("cuda:0"), "bytes", file=sys.stderr))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
EXACT = ["loader={workers=1,pin=true}", "resident_data", "gc_pause", "allocator", "recompute"]


def lines(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return info(done.stdout)


@pytest.fixture(scope="module")
def plain(chosen, tmp_path_factory):
    """The output of each compared program without flatout."""
    folder, found = tmp_path_factory.mktemp("plain"), {}
    compared = {*chosen("name")} - MISSING
    for names in filter(None, (sorted(compared - ONE_CARD.keys()), sorted(compared & ONE_CARD.keys()))):
        parts = printed_by(folder, [RUNS[name] for name in names], cards=ONE_CARD.get(names[0], 2))
        found |= {name: info(part) for name, part in zip(names, parts, strict=True)}
    assert all(found.values())
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("gan", "second card")])
def test_attaching_changes_no_line(name, plain, tmp_path):
    if name in MISSING:
        pytest.skip(f"not run: {OF_TRAINERS[name]} is not installed")
    attached = on_cards(
        tmp_path,
        "flatout",
        "run",
        *ATTACHED.get(name, ["--plan", "none"]),
        "python",
        *RUNS[name],
        cards=ONE_CARD.get(name, 2),
    )
    assert lines(attached) == plain[name]


@pytest.mark.full
@pytest.mark.parametrize("name", ["second card"])
def test_on_the_second_card_levers_act_there_and_leave_the_first_one_alone(name, plain, tmp_path):
    (tmp_path / "train.py").write_text(TELLS_OF_THE_FIRST_CARD)
    options = ["--with", "resident_data"]
    attached = on_cards(tmp_path, "flatout", "run", "--watch", *options, "python", "train.py", *RUNS[name])
    assert lines(attached) == plain[name]
    assert re.search(r"applied[^;]*\bresident_data\b", attached.stderr), attached.stderr
    assert "resident_data:" not in attached.stderr, "what it could not do, although it does it all"
    assert "on the first card: 0 bytes" in attached.stderr
    assert re.search(r", peak memory [\d.]+ (Ki|Mi)B", attached.stderr), (
        attached.stderr
    )  # the memory that the second one has held


@pytest.mark.parametrize("name", ["gan"])
def test_attaching_adds_no_wait(name, plain, tmp_path):
    """The program waits for its own reads, and flatout for nothing."""
    attached = on_cards(
        tmp_path, "flatout", "run", "--plan", "none", "python", *RUNS[name], waits=tmp_path / "waits"
    )
    assert lines(attached) == plain[name]
    waited = {
        line.split("\t")[2]: int(line.split("\t")[0])
        for line in (tmp_path / "waits").read_text().splitlines()
    }
    assert max(waited.values()) == 30 * 16 * 2  # epochs, steps, losses
    assert not [line for line in waited if str(SOURCE) in line]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "levers",
    [EXACT, ["loader={workers=0,pin=true}", "resident_data={mib=64,host=true}"]],
    ids=["on the card", "beside it"],
)
@pytest.mark.parametrize("name", ["resnet"])
def test_exact_levers_change_no_line(name, levers, plain, tmp_path):
    options = [part for lever in levers for part in ("--with", lever)]
    done = on_cards(tmp_path, "flatout", "run", *options, "python", *RUNS[name])
    assert lines(done) == plain[name]
    for lever in (each.split("=")[0] for each in levers):
        assert re.search(rf"applied[^;]*\b{lever}\b", done.stderr), done.stderr
        assert f"{lever}:" not in done.stderr, "messages about what it could not do"


@pytest.mark.full
def test_the_loop_sizes_its_batches_on_the_second_card(tmp_path):
    sized = on_cards(
        tmp_path,
        "python",
        str(PROGRAMS / "loop.py"),
        "--steps",
        "2500",
        "--device",
        "cuda:1",
        "--micro-batch",
        "auto",
    )
    assert len(lines(sized)) == 250
    assert "raised" not in sized.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["second card", "closure"])
def test_an_interrupted_run_resumes_to_the_same_lines(name, plain, tmp_path):
    command = ["run", "--plan", "none", "--resume", "python", *RUNS[name]]
    said = interrupted(tmp_path, 3, *command)
    again = on_cards(tmp_path, "flatout", *command)
    assert "resumed exactly after step" in again.stderr, again.stderr
    assert "cannot be replayed" not in again.stderr
    assert said + lines(again) == plain[name]


def test_a_program_that_does_not_fit_says_so_in_torchs_words(tmp_path):
    done = on_cards(tmp_path, "flatout", "run", "--plan", "none", "python", *SMALL_RESNET, mib=64)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert os.linesep + "flatout" in done.stderr  # and the fix
