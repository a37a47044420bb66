"""List the CUDA devices that a program started here would see, without importing torch.

A child process queries the driver, because a process that has initialised CUDA cannot fork children that use
it. The driver respects CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, like torch. Functions and attribute
numbers: CUDA driver API, cuda.h.
"""

import ctypes
import json
import os
import subprocess
import sys

from flatout.schema.facts import DEVICE_VARIABLE, Gpu

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 30.0  # a GPU without persistence mode takes seconds to initialise
IMPORT_S = 120.0  # import of torch from a cold disk

PROBE = """
import ctypes, json
cuda = ctypes.CDLL({library!r})
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
def ask(function, *args):
    if getattr(cuda, function)(*args):
        raise SystemExit(f"{{function}} failed")
count, found = ctypes.c_int(), []
ask("cuInit", 0)
ask("cuDeviceGetCount", ctypes.byref(count))
for at in range(count.value):
    device, name, size, major, minor = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(device), at)
    ask("cuDeviceGetName", name, 256, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    ask("cuDeviceGetAttribute", ctypes.byref(major), MAJOR, device)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), MINOR, device)
    found.append([name.value.decode(errors="replace"), size.value, major.value, minor.value])
print(json.dumps(found))
"""


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in torch's order, or () without a driver or if it cannot be initialised."""
    try:
        ctypes.CDLL(LIBRARY)  # loading does not initialise CUDA
    except OSError:
        return ()
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", PROBE.format(library=LIBRARY)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return tuple(
            Gpu(name, memory, (major, minor)) for name, memory, major, minor in json.loads(asked.stdout)
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


DEVICES = """
import json, torch
found = {"cpu": ""}
for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    found[f"cuda:{number}"] = torch.cuda.get_device_name(number)
print(json.dumps(found))
"""


def devices_of_torch(python: str) -> dict[str, str] | None:
    """Return the devices that the torch of an interpreter sees, with their names.

    None without torch or an answer."""
    env = {name: value for name, value in os.environ.items() if name != DEVICE_VARIABLE}
    try:
        asked = subprocess.run(
            [python, "-c", DEVICES], env=env, capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
        found: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return found
