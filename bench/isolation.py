"""Measures what it costs a program that a trial keeps its files apart.

Each program runs in fresh processes that take turns, plainly and with the file sandbox of a trial; the order
reverses every second time. The cost is the difference of a pair. The A/A difference is that of two plain
processes. Each figure is the median over pairs with a 95 % bootstrap interval.

`--against SRC` also compares whole trials of this source with those of another source tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overhead import interval, spell
from provenance import SRC, markdown_table, stamp, write_result

from flatout.agent.file_sandbox import FILES_VARIABLE
from flatout.launch.environment import with_hook

TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
PROGRAMS = {
    "start of Python": "",
    "1 GB in 16 files": """
import os
os.mkdir("out")
for name in range(16):
    with open(f"out/{name}", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))""",
    "2,000 files made, listed and removed": """
import os, shutil
os.mkdir("out")
for name in range(2000):
    with open(f"out/{name}", "w") as file:
        file.write("x")
assert len(os.listdir("out")) == 2000
shutil.rmtree("out")""",
    "20,000 files inspected, nothing changed": """
import os
for _ in range(20000):
    os.stat(os.__file__)""",
    "20,000 files inspected after a change": """
import os
os.mkdir("out")
for _ in range(20000):
    os.stat(os.__file__)""",
}
TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
while True:
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
"""


def run(program: str, apart: bool, home: Path) -> float:
    """Returns the seconds of a program; of an empty one, those of the whole process."""
    folder = Path(tempfile.mkdtemp(dir=home))
    (folder / "work").mkdir()
    environment = with_hook(dict(os.environ))
    if apart:
        trial = folder / "trials" / "1"
        trial.mkdir(parents=True)
        environment |= {FILES_VARIABLE: str(trial / "files"), "TMPDIR": str(folder)}
    begin = time.perf_counter()
    words = [sys.executable, "-c", TIMED.format(program)]
    done = subprocess.run(words, env=environment, cwd=folder / "work", capture_output=True, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"isolation: {done.stderr[-2000:]}")
    if apart and any((folder / "work").iterdir()):
        raise SystemExit("isolation: the program is not kept apart")
    shutil.rmtree(folder)
    return float(done.stdout) if program else took


def trial(source: Path, home: Path) -> float:
    """Returns the seconds of `flatout trial --steps 1`."""
    (home / "train.py").write_text(TRAINING, encoding="utf-8")
    words = [sys.executable, "-m", "flatout", "trial", "--steps", "1", sys.executable, "train.py"]
    begin = time.perf_counter()
    subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(source)}, cwd=home, capture_output=True, check=True
    )
    return time.perf_counter() - begin


def pairs(one: Any, other: Any, count: int) -> dict[str, Any]:
    """Returns the times of ``one``, ``other`` and ``one`` again, in turns."""
    rounds = []
    for at in range(count):
        turn = [("plain", one), ("apart", other), ("again", one)]
        rounds.append({name: run() for name, run in (turn if at % 2 else turn[::-1])})
    return {
        "rounds": rounds,
        "plain": interval([[r["plain"]] for r in rounds]),
        "cost": interval([[r["apart"] - (r["plain"] + r["again"]) / 2] for r in rounds]),
        "same": interval([[r["again"] - r["plain"]] for r in rounds]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    args = parser.parse_args()
    made, found = stamp(), {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # on a disk, as a project is
        home = Path(folder)
        for name, program in PROGRAMS.items():
            print(f"  {name}", file=sys.stderr)
            found[name] = pairs(
                lambda program=program: run(program, False, home),
                lambda program=program: run(program, True, home),
                args.pairs,
            )
        if args.against:
            print("  whole trials", file=sys.stderr)
            found["a trial of one step, against the version before"] = pairs(
                lambda: trial(args.against.resolve(), home), lambda: trial(SRC, home), args.pairs
            )
    rows = [
        (
            name,
            f"{1000 * x['plain']['median']:.0f}",
            spell({key: 1000 * value for key, value in x["cost"].items()}, 1),
            spell({key: 1000 * value for key, value in x["same"].items()}, 1),
            args.pairs,
        )
        for name, x in found.items()
    ]
    table = markdown_table(["program", "plain, ms", "kept apart, ms more", "A/A, ms", "pairs"], rows)
    page = f"# What it costs that a trial keeps files apart\n\nBaseline: the same program without the file sandbox.\n\n{table}\n"
    paths = write_result("isolation", made, page, json.loads(json.dumps(found)))
    print(page)
    print("written: " + ", ".join(path.name for path in paths))


if __name__ == "__main__":
    main()
