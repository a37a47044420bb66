"""A CUDA driver library with two cards that cannot compute: compiled here, with the functions of cuda.h that
find devices.
"""

import shutil
import subprocess

import pytest
from limits import hang_s

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int asked = 0;
/* As the driver does: all devices, or those that CUDA_VISIBLE_DEVICES lists. */
static int visible(int at) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return at < 2 ? at : -1;
    for (; *list; list++)
        if (*list >= '0' && *list <= '1' && at-- == 0) return *list - '0';
    return -1;
}
int cuInit(unsigned flags) { asked = 1; return getenv("BROKEN_DRIVER") ? 100 : 0; }
int cuDeviceGetCount(int *count) { if (!asked) return 3; for (*count = 0; visible(*count) >= 0; ++*count); return 0; }
int cuDeviceGet(int *device, int at) { *device = visible(at); return *device < 0; }
int cuDeviceGetName(char *name, int room, int device) { strncpy(name, device ? "Small Card" : "Large Card", room); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = device ? 8589934592ull : 150323855360ull; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? (device ? 7 : 9) : (device ? 5 : 0); return 0; }
"""


def made(folder):
    """The folder of the library, for LD_LIBRARY_PATH. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make a driver library with")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")],
        check=True,
        timeout=hang_s(60),
    )
    return folder
