"""`flatout explain`: its inputs, its exit codes, its pages, and the explanation of a program ended by a
signal.
"""

import json
import os
import pty

import pytest

pytestmark = pytest.mark.timeout(120)
ERROR = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)"
UNKNOWN = "KeyError: 'lr'"


@pytest.mark.processes
@pytest.mark.parametrize("way", ["words", "several words", "file", "stdin", "no argument"])
def test_inputs(flatout, way):
    (flatout.folder / "train.log").write_text(f"step 3\n{ERROR}\n")
    words = {
        "words": [ERROR],
        "several words": ERROR.split(),
        "file": ["train.log"],
        "stdin": ["-"],
        "no argument": [],
    }[way]
    run, given = (flatout, {"stdin": ERROR}) if way in ("stdin", "no argument") else (flatout.here, {})
    done = run("explain", *words, **given)
    assert done.code == 0
    assert done.out.startswith(
        "FE020 matrix-sizes: a product of 64x512 and 256x10: 512 and 256 must be equal.\n"
    )
    assert done.err == ""


@pytest.mark.processes
def test_at_a_terminal_without_arguments_it_shows_usage(flatout):
    outside, inside = pty.openpty()
    done = flatout.finish(flatout.start("explain", stdin=inside), timeout=30)
    os.close(inside)
    os.close(outside)
    assert done.code == 2
    assert "flatout explain train.log" in done.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_unknown_failures_exit_with_1(flatout, options):
    done = flatout.here("explain", *options, UNKNOWN)
    assert done.code == 1
    assert "does not guess" in done.out or json.loads(done.out)["explanations"] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.log"], "missing.log cannot be read"),
        (["runs/3"], "cannot be read"),
        (["."], "cannot be read"),
        (["FE999"], "there is no kind FE999"),
    ],
)
def test_mistakes(flatout, words, says):
    done = flatout.here("explain", *words)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_page(flatout):
    done = flatout.here("explain", "FE040")
    assert done.code == 0
    for word in (
        "The GPU's memory is full.",
        "Why it happens:",
        "Why it happens:",
        "How to fix it:",
        "Sources:",
    ):
        assert word in done.out


def test_bytes_that_are_not_text(flatout):
    (flatout.folder / "core.log").write_bytes(b"\xff\xfe\x00" * 1000 + f"\n{ERROR}\n".encode())
    assert flatout.here("explain", "core.log").code == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "ending", "code", "says"),
    [
        ("trial", "os.kill(os.getpid(), signal.SIGKILL)", 137, "the program was killed with SIGKILL"),
        ("tune", "os.kill(os.getpid(), signal.SIGSEGV)", 139, "a segmentation fault"),
    ],
)
def test_a_program_that_a_signal_has_ended(flatout, script, tmp_path, command, ending, code, says):
    """The dead program cannot report anything, so its parent does."""
    script(f"import os, signal\n{ending}\n")
    options = ["--out", str(tmp_path / "record.json")] if command == "trial" else ["--budget", "10s"]
    done = flatout(command, *options, "python", "train.py")
    assert done.code == code
    assert any(says in line for line in done.said), done.err


@pytest.mark.processes
def test_a_program_that_dies_in_a_trial_is_explained(flatout, script, tmp_path):
    pytest.importorskip("torch")
    script("import torch\nloss = torch.ones(3).sum()\nloss.backward()\n")
    done = flatout("trial", "--out", str(tmp_path / "record.json"), "python", "train.py")
    assert done.code == 1
    assert (
        "flatout: `loss` has no autograd graph: it depends on no parameter that requires a gradient."
        in done.said
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["status"] == "failed"
    assert "has no autograd graph" in record["log_tail"]
