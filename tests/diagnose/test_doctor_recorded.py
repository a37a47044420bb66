"""Snapshots recorded on real machines, with folder and host names changed, get the verdicts they got there.

virtual_machine             2 cores, no GPU, torch 2.14.1 for CUDA 13.0, cgroups v1
limited_container           the same with 64 MiB of /dev/shm, a memory limit of 2 GB, one core,
                            1,024 open files
library_missing             torch's links to NVIDIA's libraries are broken
torch_of_another_python     a Python 3.12 that finds the packages of a Python 3.11
"""

import json
from pathlib import Path

import pytest

from flatout.diagnose.doctor.checks import run_checks
from flatout.schema.machine_snapshot import MachineSnapshot

HERE = Path(__file__).parent / "recorded"
BUSY = "top -o %CPU"  # other programs ran while the snapshots were taken


@pytest.mark.parametrize(
    ("name", "alarms"),
    [
        ("virtual_machine", {"FD066": BUSY}),
        (
            "limited_container",
            {
                "FD064": "export OMP_NUM_THREADS=1",
                "FD066": BUSY,
                "FD070": "docker run --memory 32g ...",
                "FD071": "docker run --shm-size=8g ...",
                "FD080": "echo '* - nofile 65536' | tee /etc/security/limits.d/flatout.conf",
            },
        ),
        ("library_missing", {"FD010": "pip install --force-reinstall torch==2.14.1", "FD066": BUSY}),
        ("torch_of_another_python", {"FD010": "unset PYTHONPATH", "FD066": BUSY}),
    ],
)
def test_a_recorded_machine(name, alarms):
    checks = {
        check.code: check
        for check in run_checks(
            MachineSnapshot.from_json(json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")))
        )
    }
    assert {
        code: check.fix for code, check in checks.items() if check.verdict in ("problem", "warning")
    } == alarms
    assert checks["FD020"].verdict == "note"  # no GPU, and nothing wrong with that
    assert not [check for check in checks.values() if "bug in flatout" in check.observed]


def test_every_recording_is_judged():
    assert {path.stem for path in HERE.iterdir()} == {
        "virtual_machine",
        "limited_container",
        "library_missing",
        "torch_of_another_python",
    }
