"""The available CUDA devices, from a driver library compiled here with the functions of cuda.h that are
called.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from cuda_driver import made
from limits import hang_s

pytestmark = pytest.mark.processes

LARGE, SMALL = ["Large Card", 150323855360, [9, 0]], ["Small Card", 8589934592, [7, 5]]
LOOK = """
import dataclasses, json, sys
from flatout.probe.machine import look
facts = look()
print(json.dumps([facts.cuda, [[gpu.name, gpu.memory_bytes, list(gpu.capability)] for gpu in facts.gpus], "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return made(tmp_path_factory.mktemp("driver"))


def seen(driver, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    asked = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**clean, "LD_LIBRARY_PATH": str(driver), **environment},
        capture_output=True,
        text=True,
        timeout=hang_s(60),
        check=True,
    )
    return json.loads(asked.stdout)


def test_every_device_of_the_driver_with_its_memory_and_capability_and_without_torch(driver):
    assert seen(driver) == [True, [LARGE, SMALL], False]


def test_only_the_devices_that_a_program_would_see_count_in_the_order_it_numbers_them(driver):
    assert seen(driver, CUDA_VISIBLE_DEVICES="1") == [True, [SMALL], False]
    assert seen(driver, CUDA_VISIBLE_DEVICES="1,0") == [True, [SMALL, LARGE], False]
    assert seen(driver, CUDA_VISIBLE_DEVICES="") == [False, [], False]


def test_a_driver_that_cannot_be_initialised_is_no_gpu(driver):
    assert seen(driver, BROKEN_DRIVER="1") == [False, [], False]


def test_no_driver_is_no_gpu(tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    assert seen(tmp_path) == [False, [], False]
