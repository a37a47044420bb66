"""The programs of the pages are real: each runs to its end.

The bad ones do too, which is why nobody notices them.
"""

import subprocess
import sys

import pytest
from limits import hang_s

from flatout.diagnose.rules import TABLE

pytestmark = pytest.mark.processes

# All of them run in one process, each with fewer steps and no workers; programs that need a GPU or NCCL are
# left out.
RUN = """
import contextlib, io, os, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
MEET = 'init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=0, world_size=1)'
from flatout.diagnose.rules import TABLE

def prepare():
    model = torch.nn.Linear(4, 1)
    torch.save(model.state_dict(), "model.pt")
    torch.save({"model": model.state_dict(), "epoch": 0, "optimizer": torch.optim.Adam(model.parameters()).state_dict()}, "last.pt")

for rule in [rule for rule in TABLE if rule.check_source]:  # the others' pages show single lines
    for kind in ("Bad", "Good"):
        code = rule.section(kind)
        if not code or "nccl" in code or "cuda" in code and "is_available" not in code:
            continue
        for long, short in (("range(100)", "range(3)"), ("range(10)", "range(2)"), ("num_workers=2", "num_workers=0"), ("num_workers=4", "num_workers=0"),
                            (", persistent_workers=True", ""), ('init_process_group("gloo")', MEET)):
            code = code.replace(long, short)
        prepare()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("import os\\n" + code, rule.code + kind, "exec"), {"__name__": "__main__"})
        except Exception as error:
            print(rule.code, kind, type(error).__name__, error)
        else:
            print("ran")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if os.path.exists("meet"):
            os.remove("meet")
        torch.autograd.set_detect_anomaly(False)
"""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_every_program_runs_to_its_end(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=hang_s(110)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if line != "ran"]
    assert said == []
    assert done.stdout.count("ran") > len([rule for rule in TABLE if rule.check_source]), (
        "most of them need no GPU"
    )
