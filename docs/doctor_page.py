"""docs/doctor.md, made from the checks themselves; docs/generate.py writes it."""

from __future__ import annotations

import json

from flatout.diagnose.doctor.check import MachineCheck
from flatout.diagnose.doctor.checks import TABLE
from flatout.diagnose.doctor.versions import TABLE_FILE, versions

HEAD = """# What `flatout doctor` looks at

Made by `docs/generate.py` from the checks themselves. [Is my machine set up?](../howto/machine.md) tells how to use it.

A check ends as *problem* (training will not start, not use the GPU, or die), *warning* (it costs time, or breaks under load), *note* (worth
knowing, and may be meant), *ok*, or *not checked*: what could not be looked at is never called fine. Checks of the GPUs are left out where there is none.
"""

FIXES = {
    "FD001": ("Create a virtual environment with a supported Python: `python3.12 -m venv .venv`."),
    "FD003": ("Rename the file and remove its compiled copy: `mv torch.py my_torch.py`."),
    "FD005": ("Install flatout again: `pip install --force-reinstall --no-deps flatout`."),
    "FD010": (
        "The command depends on the cause and is given with it; usually `pip install --force-reinstall "
        "torch`."
    ),
    "FD011": ('`pip install "torch>=2.11"`.'),
    "FD012": (
        "Install a CUDA build that the driver supports: `pip install --force-reinstall torch --index-url "
        "https://download.pytorch.org/whl/cu126`."
    ),
    "FD018": (
        "Remove the folder of the other library from LD_LIBRARY_PATH; a folder with libcuda.so, the "
        "driver's library, must stay in it. Keep a single OpenMP."
    ),
    "FD020": (
        "Install or reload the driver on the host (`sudo modprobe nvidia`). Start a container with "
        "`docker run --gpus all`."
    ),
    "FD021": (
        "Install a build of the same torch for an older CUDA (with the given command), or a newer driver."
    ),
    "FD022": ("`unset CUDA_VISIBLE_DEVICES`, or name GPUs that `nvidia-smi -L` lists."),
    "FD024": (
        "Fix what the other checks of the driver report. If they report nothing, torch's own warning "
        "names the cause."
    ),
    "FD030": ("Find the process with `nvidia-smi`. End it, or use another GPU with CUDA_VISIBLE_DEVICES."),
    "FD040": ("`apt-get install g++`, or in conda `conda install -c conda-forge gxx`."),
    "FD041": ("`apt-get install python3-dev` (Fedora: `dnf install python3-devel`)."),
    "FD050": (
        'Use a container with its own glibc: `docker run --rm -it -v "$PWD":/work -w /work '
        "pytorch/pytorch bash`. Do not replace the system's glibc."
    ),
    "FD060": (
        "Set the number of threads with `export OMP_NUM_THREADS=N`. `flatout tune` finds the best number."
    ),
    "FD064": (
        "`unset OMP_NUM_THREADS`, or use `flatout tune`, which measures the best number for your program."
    ),
    "FD066": ("`top -o %CPU` shows the programs."),
    "FD070": ("Give the container more memory with `docker run --memory 32g`, or use fewer loader workers."),
    "FD071": (
        "Start the container with `--shm-size=8g` or `--ipc=host`. On a machine use `sudo mount -o "
        "remount,size=8g /dev/shm`."
    ),
    "FD080": (
        "`ulimit -n 65536` in the shell that starts the training; in a container `docker run --ulimit "
        "nofile=65536:65536`."
    ),
    "FD090": (
        "`du -xh . | sort -h | tail` shows the largest folders. TMPDIR and XDG_CACHE_HOME name other folders."
    ),
    "FD100": ("`unset` the named variable."),
}


def page() -> str:
    parts = [
        HEAD,
        _contents(),
        *(
            f"## {theme}\n\n" + "\n".join(_entry(check) for check in TABLE if check.theme == theme)
            for theme in dict.fromkeys(check.theme for check in TABLE)
        ),
        _versions(),
    ]
    return "\n".join(parts)


def _contents() -> str:
    rows = [
        f"| [{check.code}](#{check.code.lower()}-{check.name.replace('_', '-')}) | {check.theme} | {check.title} |"
        for check in TABLE
    ]
    return "\n".join(["| code | theme | what must hold |", "|---|---|---|", *rows, ""])


def _entry(check: MachineCheck) -> str:
    paragraphs = [f"### {check.code} {check.name.replace('_', ' ')}", f"{check.title}."]
    paragraphs += [
        f"*Why it matters.* {check.why}",
        f"*How to fix it.* {FIXES[check.code]}",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _versions() -> str:
    table = versions()
    rows = [
        "## What fits what",
        "",
        "| torch | Python | glibc of its wheels | CUDA builds (cuDNN, NCCL) | compute capabilities on x86-64 |",
        "|---|---|---|---|---|",
    ]
    for release, row in zip(table.releases, json.loads(TABLE_FILE.read_text())["torch"], strict=True):
        builds = "; ".join(f"{b['cuda']} ({b['cudnn']}, {b['nccl']})" for b in row["builds"])
        known = {b["cuda"]: b["capabilities_x86_64"] for b in row["builds"]}
        capabilities = "; ".join(
            f"{cuda}: {names if isinstance(names, str) else ', '.join(names)}"
            for cuda, names in known.items()
        )
        python = f"{'.'.join(map(str, release.python_min))} to {'.'.join(map(str, release.python_max))}"
        rows.append(
            f"| {release.torch} | {python} | {'.'.join(map(str, release.glibc_min)) if release.glibc_min else 'unknown'} | {builds} | {capabilities} |"
        )
    rows += ["", "| CUDA | oldest driver on Linux |", "|---|---|"]
    rows += [
        f"| {major}.x | {'.'.join(map(str, least))} |"
        for major, least in sorted(table.drivers.items(), reverse=True)
    ]
    return "\n".join(
        [*rows, "", "Sources and dates stand in each row of `src/flatout/diagnose/doctor/versions.json`.", ""]
    )
