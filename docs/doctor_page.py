"""docs/doctor.md, made from the checks themselves; docs/generate.py writes it."""

from __future__ import annotations

import json

from flatout.diagnose.doctor.check import SECTIONS, MachineCheck
from flatout.diagnose.doctor.checks import TABLE
from flatout.diagnose.doctor.versions import TABLE_FILE, versions

HEAD = """# What `flatout doctor` looks at

Made by `docs/generate.py` from the checks themselves. [Is my machine set up?](../howto/machine.md) tells how to use it.

A check ends as *problem* (training will not start, not use the GPU, or die), *warning* (it costs time, or breaks under load), *note* (worth
knowing, and may be meant), *ok*, or *not checked*: what could not be looked at is never called fine. Checks of the GPUs are left out where there is none.
"""


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
    paragraphs += [f"*{name}.* {' '.join(check.section(name).split())}" for name in SECTIONS]
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
