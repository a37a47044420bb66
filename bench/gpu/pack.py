"""Collects wheels of flatout's dependencies for a GPU machine without a network.

Run it with `python bench/gpu/pack.py --python 3.12` for the machine's Python. The machine is assumed to have
torch, torchvision, triton and numpy. There:

    python3 -m pip install --no-index --no-deps --target /tmp/site .wheels/*.whl
    PYTHONPATH=/tmp/site python3 bench/gpu/all.py --minutes 9
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
THERE = {"torch", "torchvision", "triton", "numpy", "flatout"}
EXTRAS = {"", "gpu"}
MOST_MIB = 64
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)


def needed() -> list[str]:
    """Returns the packages that flatout's core and its extra `gpu` need here, and their dependencies."""
    found: set[str] = set()
    todo = [("flatout", EXTRAS)]
    while todo:
        name, extras = todo.pop()
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue  # for another platform
        for line in lines:
            package = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower()
            extra = re.search(r"extra == ['\"]([^'\"]+)", line)
            if (extra.group(1) if extra else "") in extras and package not in found | THERE:
                found.add(package)
                todo.append((package, {""}))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="Python version of the machine (default 3.12)")
    parser.add_argument("--out", type=Path, default=ROOT / ".wheels")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = needed()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        args.python,
        *(part for platform in PLATFORMS for part in ("--platform", platform)),
        "--dest",
        str(args.out),
        *names,
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pack: some of {', '.join(names)} have no wheel for Python {args.python}")
    wheels = sorted(args.out.glob("*.whl"))
    mib = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(
        f"{len(wheels)} wheels, {mib:.1f} MiB, in {args.out}: {', '.join(wheel.name.split('-')[0] for wheel in wheels)}"
    )
    if mib > MOST_MIB:
        sys.exit(f"pack: the wheels exceed the limit of {MOST_MIB} MiB")


if __name__ == "__main__":
    main()
