"""docs/doctor.md, made from the checks themselves; docs/generate.py writes it."""

from __future__ import annotations

from flatout.diagnose.doctor.check import SECTIONS, MachineCheck
from flatout.diagnose.doctor.checks import TABLE, THEMES
from flatout.diagnose.doctor.versions import versions

HEAD = """# What `flatout doctor` looks at

Made by `docs/generate.py` from the checks themselves. [Is my machine set up?](../howto/machine.md) tells how to use it.

A check ends as *problem* (training will not start, not use the GPU, or die), *warning* (it costs time, or breaks under load), *note* (worth
knowing, and may be meant), *ok*, or *not checked*: what could not be looked at is never called fine. Checks of the GPUs are left out where there is none.
"""


def page() -> str:
    parts = [
        HEAD,
        _contents(),
        *(f"## {theme}\n\n" + "\n".join(_entry(q) for q in TABLE if q.theme == theme) for theme in THEMES),
        _versions(),
    ]
    return "\n".join(parts)


def _contents() -> str:
    rows = [
        f"| [{q.code}](#{q.code.lower()}-{q.name.replace('_', '-')}) | {q.theme} | {q.title} |" for q in TABLE
    ]
    return "\n".join(["| code | theme | what must hold |", "|---|---|---|", *rows, ""])


def _entry(asked: MachineCheck) -> str:
    paragraphs = [f"### {asked.code} {asked.name.replace('_', ' ')}", f"{asked.title}."]
    paragraphs += [f"*{name}.* {' '.join(asked.section(name).split())}" for name in SECTIONS]
    return "\n\n".join(paragraphs) + "\n"


def _versions() -> str:
    table = versions()
    rows = [
        "## What fits what",
        "",
        "| torch | Python | glibc of its wheels | CUDA builds (cuDNN, NCCL) | compute capabilities on x86-64 |",
        "|---|---|---|---|---|",
    ]
    for release in table.releases:
        builds = "; ".join(
            f"{b.cuda} ({b.cudnn or 'unknown'}, {b.nccl or 'unknown'})" for b in release.builds
        )
        capabilities = "; ".join(
            f"{b.cuda}: {', '.join(b.capabilities)}" if b.capabilities else f"{b.cuda}: unknown"
            for b in release.builds
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
