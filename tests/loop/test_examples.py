"""Each template in plain PyTorch and with the Loop: the same numbers, to the last digit that is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
pytest.importorskip("sklearn")
ROOT = Path(__file__).parent.parent.parent
TEMPLATES = {"linear": ("--steps", "501"), "cnn": ("--epochs", "1"), "resnet18": ("--epochs", "1", "--batch-size", "256"), "gpt": ("--steps", "31")}


def said(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_loop_says_what_the_plain_template_says(name):
    plain = said(name, *TEMPLATES[name])
    assert plain.count("loss") >= 1
    assert said(f"{name}_loop", *TEMPLATES[name]) == plain


def test_accumulation_by_hand_and_by_name():
    """By hand it is the mean of the losses; the last one's is printed there, the whole one's here."""
    arguments = ("--steps", "21", "--accumulate", "3", "--batch-size", "4")
    losses = {name: [float(x) for x in re.findall(r"loss ([\d.]+)", said(name, *arguments))] for name in ("gpt", "gpt_loop")}
    assert len(losses["gpt"]) == len(losses["gpt_loop"]) == 3
    assert losses["gpt_loop"][-1] < losses["gpt_loop"][0] - 0.5


def test_tensors_on_a_device():
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", said("tensors"))]
    assert losses[-1] < losses[0] / 10
