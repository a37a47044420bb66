"""The lever `early_values` on a stand-in for cards: a program reads the plain program's values, and a read
waits only for its own copy.
"""

import json
import re
from pathlib import Path

import pytest
from cards import PROGRAMS, interrupted, needed, on_cards, printed_by

pytestmark = [needed(), pytest.mark.processes]
HERE = Path(__file__).parent
CASES = re.findall(r"^@case\ndef (\w+)", (HERE / "early.py").read_text(encoding="utf-8"), re.M)
WITH = ("flatout", "run", "--with", "early_values")
GAN = (str(PROGRAMS / "gan.py"), "--epochs", "8", "--device", "cuda:1")
READS = (str(PROGRAMS / "reads.py"), "--epochs", "4")
RUNS = {
    "two models on the second card": GAN,
    "many kinds of reads": READS,
    "reads among accumulated passes": (*READS, "--accumulate", "2"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    done = on_cards(folder, "python", str(HERE / "early.py"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_every_read_is_right(case, wrong):
    assert not wrong[case], wrong[case]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The output of each program without flatout, and its waits for a card, by line."""
    folder = tmp_path_factory.mktemp("plain")
    printed = printed_by(folder, RUNS.values(), waits=folder / "waits")
    return dict(zip(RUNS, (part.splitlines() for part in printed), strict=True)), waits_in(folder / "waits")


def waits_in(path):
    """(call, file, line) -> count"""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return {(call, *place.rpartition(":")[::2]): int(count) for count, call, place in rows}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in RUNS if RUNS[name] is not GAN])
def test_no_line_changes(name, plain, tmp_path):
    done = on_cards(tmp_path, *WITH, "python", *RUNS[name], waits=tmp_path / "waits", kernel_us=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == plain[0][name]
    assert "applied early_values" in done.stderr
    assert "early_values:" not in done.stderr
    own = sum(
        count
        for (call, _, _), count in waits_in(tmp_path / "waits").items()
        if call == "cudaEventSynchronize"
    )
    assert own >= 4 * (4 * 5 - 4), "the loss and three other values, in all steps but the first ones"


def test_reads_wait_only_for_their_copies(plain, tmp_path):
    done = on_cards(tmp_path, *WITH, "python", *GAN, waits=tmp_path / "waits", kernel_us=100)
    assert done.stdout.splitlines() == plain[0]["two models on the second card"]
    reads = sum(
        count
        for (call, file, _), count in plain[1].items()
        if call == "cudaStreamSynchronize" and file == GAN[0]
    )
    assert reads == 8 * 16 * 2  # epochs, steps, losses
    waited = waits_in(tmp_path / "waits")
    whole = sum(
        count
        for (call, file, _), count in waited.items()
        if call == "cudaStreamSynchronize" and not file.endswith("nn/modules/module.py")
    )
    own = sum(count for (call, _, _), count in waited.items() if call == "cudaEventSynchronize")
    assert own >= reads - 8, waited  # all but those of the first steps
    assert whole <= 8 + 2 * reads.bit_length(), (
        waited
    )  # those, and of each loss the reads number 1, 2, 4, 8, ..., which are made in both ways


@pytest.mark.full
def test_an_interrupted_run_resumes_to_the_same_lines(plain, tmp_path):
    command = (*WITH[1:], "--resume", "python", *GAN)
    said = interrupted(tmp_path, 2, *command)
    again = on_cards(tmp_path, "flatout", *command, waits=tmp_path / "waits")
    assert "resumed exactly after step" in again.stderr, again.stderr
    assert said + again.stdout.splitlines() == plain[0]["two models on the second card"]
    assert (
        sum(
            count
            for (call, _, _), count in waits_in(tmp_path / "waits").items()
            if call == "cudaEventSynchronize"
        )
        > 64
    )  # also after it has resumed
