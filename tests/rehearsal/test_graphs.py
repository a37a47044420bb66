"""Steps recorded as CUDA graphs give the plain program's lines.

The cards are a stand-in, whose graphs compute with its own kernels.
"""

import json
import re
from pathlib import Path

import pytest
from cards import PROGRAMS, SMALL_GPT, info, needed, on_cards, printed_by

pytestmark = [needed(), pytest.mark.processes]
HERE = Path(__file__).parent
RUNS = {
    "accumulation, clipping, a schedule by epochs": ["--accumulate", "3"],
    "two models on the second card, one of them called twice a step": [
        "--optimizer",
        "AdamW",
        "--second",
        "--device",
        "cuda:1",
    ],
    "a forward pass that reads a value": ["--read"],
    "a GPT that counts positions on the card": [*SMALL_GPT, "--epochs", "2"],
}
MOVING = ["--optimizer", "Adam", "--every-step"]
PENALTY = ["--penalty", "5"]


def program(arguments):
    own = arguments[0].endswith(".py")
    return arguments if own else [str(PROGRAMS / "recorded.py"), "--epochs", "4", *arguments]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The output of each program without flatout."""
    everything = [*RUNS.values(), MOVING, PENALTY]
    parts = printed_by(tmp_path_factory.mktemp("plain"), map(program, everything))
    return {" ".join(arguments): info(part) for arguments, part in zip(everything, parts, strict=True)}


def recorded(tmp_path, arguments):
    """Its lines with the step recorded, the numbers of graphs and replays, and flatout's messages."""
    done = on_cards(
        tmp_path,
        "flatout",
        "run",
        "--with",
        "graphs",
        "python",
        str(HERE / "counted.py"),
        *program(arguments),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = re.search(r"graphs: (\d+) recorded, (\d+) replayed", done.stderr)
    return info(done.stdout), int(counts[1]), int(counts[2]), done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_step_changes_no_line(name, plain, tmp_path):
    lines, graphs, replays, said = recorded(tmp_path, RUNS[name])
    assert lines == plain[" ".join(RUNS[name])]
    if "--read" in RUNS[name]:
        assert "the forward pass reads a value of the device" in said
        assert graphs <= 3  # of the update alone
    else:
        assert "graphs:" not in re.sub(r"graphs: \d+ recorded.*", "", said)
        assert replays > 60 > 4 * graphs


def values(line):
    return [float.fromhex(each) for each in line.split(": ")[1].split()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [MOVING, PENALTY],
    ids=["a rate that moves in every step", "a gradient that is differentiated now and then"],
)
def test_different_rounding_stays_close(arguments, plain, tmp_path):
    lines, graphs, replays, _ = recorded(tmp_path, arguments)
    assert replays > 60 > 4 * graphs
    for line, other in zip(lines, plain[" ".join(arguments)], strict=True):
        assert values(line) == pytest.approx(values(other), rel=1e-3, abs=1e-4)


CASES = re.findall(r"^@c.*?\ndef (\w+)", (HERE / "graph_cases.py").read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    done = on_cards(tmp_path_factory.mktemp("cases"), "python", str(HERE / "graph_cases.py"), cards=1)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_module_does_what_its_plain_copy_does(name, came):
    assert came[name] == ""
