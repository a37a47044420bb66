"""cuDNN's algorithm search is on before the first step, because an ATen plan made without it stays."""

import os
import subprocess
import sys

import pytest
from cuda_driver import made
from limits import hang_s
from programs import STEPS_BY_HAND

pytestmark = pytest.mark.processes

pytest.importorskip("torch")

PROGRAM = f"""{STEPS_BY_HAND}
print("first step:", torch.backends.cudnn.benchmark, flush=True)
steps(20)
"""


@pytest.mark.timeout(60)
def test_the_flag_is_set_before_the_first_step(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "plan.toml").write_text("schema = 1\n\n[levers.cudnn_benchmark]\nvalue = true\n")
    for environment, said in (
        ({"LD_LIBRARY_PATH": str(made(tmp_path))}, "first step: True"),
        ({}, "first step: False"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "flatout", "run", "--plan", "plan.toml", sys.executable, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=hang_s(50),
            check=True,
            env={**os.environ, **environment},
        )
        assert said in ran.stdout, ran.stderr
    assert "no CUDA device was found on this machine" in ran.stderr
