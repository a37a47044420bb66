"""The CUDA devices that a program started here would see, asked of the driver without importing torch.

The driver is asked in a child process: a process that has initialised CUDA cannot fork children that use it, and a training program may want to.
The driver honours CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, as torch does. Functions and attribute numbers: CUDA driver API, cuda.h.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

from flatout.plan.facts import Gpu

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 30.0  # a card without persistence mode takes seconds to initialise

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
    """In the order in which torch numbers them; none without a driver, or where it cannot be initialised."""
    try:
        ctypes.CDLL(LIBRARY)  # loading it initialises nothing
    except OSError:
        return ()
    try:
        asked = subprocess.run([sys.executable, "-I", "-c", PROBE.format(library=LIBRARY)], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return tuple(Gpu(name, memory, (major, minor)) for name, memory, major, minor in json.loads(asked.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
