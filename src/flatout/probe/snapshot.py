"""Collect the readable part of a machine snapshot: files below a root, this interpreter, the environment, disks.

The root is "/" except in tests, which use the files of a container below another folder.
"""

import os
import platform
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from flatout.probe.cgroup import group
from flatout.schema.machine_snapshot import Disk, MachineSnapshot

FILES = (
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/version",
    "/proc/self/limits",
    "/proc/self/status",
    "/proc/driver/nvidia/version",
    "/etc/os-release",
    "/sys/devices/system/cpu/online",
    "/.dockerenv",
    "/run/.containerenv",
)
FOLDERS = ("/sys/bus/pci/devices", "/dev")
MAX_BYTES = 1 << 18
DISPLAY_CLASS = "0x03"

# Whole prefixes, because every release adds variables. None of them holds a secret.
FAMILIES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NCCL_",
    "GLOO_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TRITON_",
    "NVIDIA_",
    "PYTHON",
    "MALLOC_",
    "MIMALLOC_",
    "TORCHELASTIC_",
    "DNNL_",
    "ONEDNN_",
)
NAMES = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "GLIBC_TUNABLES",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "SLURM_JOB_ID",
    "SLURM_CPUS_PER_TASK",
    "KUBERNETES_SERVICE_HOST",
    "container",
    "CC",
    "CXX",
)
SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|API_KEY", re.IGNORECASE)
DISTRIBUTIONS = re.compile(
    r"(torch|torchvision|torchaudio|triton|pytorch_triton|numpy|lightning|pytorch_lightning|intel_openmp|mkl|cuda_\w+|nvidia_\w+)$"
)
HEADER = "Python.h"


class Reader:
    """Reads files and folders below a root, and records each in the snapshot under its absolute path."""

    def __init__(self, snapshot: MachineSnapshot, root: Path) -> None:
        self._snapshot, self._root = snapshot, root

    def place(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        if path not in self._snapshot.files:
            try:
                with self.place(path).open("rb") as file:
                    text: str | None = file.read(MAX_BYTES).decode(errors="replace")
            except OSError:
                text = None
            self._snapshot.files[path] = text
        return self._snapshot.files[path]

    def names(self, path: str) -> list[str] | None:
        try:
            found: list[str] | None = sorted(os.listdir(self.place(path)))
        except OSError:
            found = None
        self._snapshot.folders[path] = found
        return found


def gather(snapshot: MachineSnapshot, root: Path = Path("/")) -> MachineSnapshot:
    """Fill in everything readable. Missing or forbidden parts stay None."""
    reader = Reader(snapshot, root)
    for path in FILES:
        reader.text(path)
    group(reader.text)  # reads the files with the limits of the groups
    for folder in FOLDERS:
        reader.names(folder)
    if (names := snapshot.folders["/dev"]) is not None:
        snapshot.folders["/dev"] = [name for name in names if name.startswith("nvidia")]
    for name in snapshot.folders["/sys/bus/pci/devices"] or ():
        if (reader.text(f"/sys/bus/pci/devices/{name}/class") or "").startswith(DISPLAY_CLASS):
            reader.text(f"/sys/bus/pci/devices/{name}/vendor")
    snapshot.working_folder = _here()
    snapshot.home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    snapshot.temporary_folder = _temporary()
    snapshot.environment = environment(os.environ)
    snapshot.python = python()
    snapshot.packages = packages(sys.path)
    snapshot.folders["."] = _modules_here(snapshot.working_folder)
    for name, path in (
        ("working folder", snapshot.working_folder),
        ("temporary folder", snapshot.temporary_folder),
        ("cache", snapshot.home_cache),
        ("/dev/shm", str(reader.place("/dev/shm"))),
    ):
        disk = space(path)
        if disk is not None:
            snapshot.disks[name] = disk
    return snapshot


def environment(variables: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables that affect a training program.

    Nothing else of the environment is kept, because a machine snapshot is shown and shared."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in NAMES or name.startswith(FAMILIES)) and not SECRET.search(name)
    }


def python() -> dict[str, object]:
    """Describe this interpreter, the one that flatout is installed for."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "prefix": sys.prefix,
        "path": [p for p in sys.path if p],
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "libc": list(platform.libc_ver()),
        "root": os.geteuid() == 0,
        "header": (Path(sysconfig.get_paths()["include"]) / HEADER).is_file(),
    }


def packages(path: list[str]) -> list[list[str]]:
    """Return [name, version, folder] of each relevant distribution, in the order of the path.

    Of two with the same name, Python uses the first."""
    found = []
    for folder in dict.fromkeys(path):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for entry in names:
            parts = re.fullmatch(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info", entry)
            if parts and DISTRIBUTIONS.match(name := parts[1].lower().replace("-", "_").replace(".", "_")):
                found.append([name, parts[2], folder])
    return found


def space(path: str) -> Disk | None:
    """Return the disk space below a path, or below its nearest existing folder."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    files = found.f_favail if found.f_files else None  # some file systems do not count their files
    return Disk(
        path,
        found.f_frsize * found.f_blocks,
        found.f_frsize * found.f_bavail,
        files,
        os.access(place, os.W_OK),
    )


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder has been removed
        return ""


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # no writable folder: a check reports it
        return os.environ.get("TMPDIR", "/tmp")


def _modules_here(folder: str) -> list[str] | None:
    """Return what `import` finds first in the working folder: .py files, and packages with a trailing slash."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    packages_here = [
        f"{name}/"
        for name in names
        if name.isidentifier() and os.path.isfile(os.path.join(folder, name, "__init__.py"))
    ]
    return sorted([*(name for name in names if name.endswith(".py")), *packages_here])
