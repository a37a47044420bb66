"""Measures what the checks of `flatout run` cost: the first 200 steps and the following 200, with and without them.

Each round starts three fresh processes of a program in a random order: with checks, and twice with `--no-checks` (the
A/A). The program times its own steps. A figure is the median of the rounds' ratios with a bootstrap interval. Two
processes differ by more than the goal, so the program also times the looks of the checks themselves: everything that they
do during the steps.

    python bench/run_checks.py                     20 rounds of three programs, about 25 minutes

Goal: at most 0.2 % of the first 200 steps, nothing afterwards.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import SRC, markdown_table, some_or_all, stamp, write_result

from flatout.measure.statistics import median, quantile

THEME, ROUNDS, DRAWS = "run_checks", 20, 2000
START = """
import json, sys, time
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
looks = []


def timed(look):
    def call():
        start = time.perf_counter()
        look()
        looks.append(time.perf_counter() - start)

    return call


if "flatout.agent.heartbeat" in sys.modules:
    at_step = sys.modules["flatout.agent.heartbeat"].AT_STEP
    at_step.update({step: timed(look) for step, look in at_step.items()})
"""
END = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
marks = []
for step in range(401):
    optimizer.zero_grad()
    loss = step_loss()
    loss.backward()
    optimizer.step()
    marks.append(time.perf_counter())
print("TIMES", json.dumps([marks[200] - marks[0], marks[400] - marks[200], looks]))
"""
PROGRAMS = {
    "mlp": """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
step_loss = lambda: F.cross_entropy(model(x), y)
""",
    "transformer": """
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Linear(16, 64), nn.TransformerEncoder(layer, 4), nn.Linear(64, 10))
x, y = torch.randn(8, 32, 16), torch.randint(0, 10, (8, 32))
step_loss = lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
""",
    "resnet18": """
from torchvision.models import resnet18
model = resnet18(num_classes=10)
x, y = torch.randn(4, 3, 48, 48), torch.randint(0, 10, (4,))
step_loss = lambda: F.cross_entropy(model(x), y)
""",
}
SIDES = {"with": (), "without": ("--no-checks",), "again": ("--no-checks",)}


def once(folder: Path, options: Sequence[str]) -> list[Any]:
    """Seconds of the steps 1 to 200 and 201 to 400, and those of each look."""
    argv = [sys.executable, "-m", "flatout", "run", "--plan", "none", *options, "python", "train.py"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.split("TIMES ")[1]))


def interval(values: Sequence[float]) -> list[float]:
    draw = random.Random(0)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(DRAWS)]
    return [median(values), quantile(medians, 0.025), quantile(medians, 0.975)]


def measured(name: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder, draw = Path(place), random.Random(name)
        (folder / "train.py").write_text(START + PROGRAMS[name] + END)
        once(folder, ())  # byte code, and the job's folder
        runs: list[dict[str, list[Any]]] = []
        for _ in range(rounds):
            order = draw.sample(list(SIDES), len(SIDES))
            runs.append({side: once(folder, SIDES[side]) for side in order})
    looks = [sum(run["with"][2]) for run in runs]
    result: dict[str, Any] = {
        "name": name,
        "rounds": rounds,
        "step_ms": median([run["without"][0] for run in runs]) * 5,
        "looks": len(runs[0]["with"][2]),
        "looks_ms": [1000 * value for value in interval(looks)],
        "looks_share": interval([run["with"][2] and sum(run["with"][2]) / run["with"][0] for run in runs]),
    }
    for part, when in enumerate(("first", "after")):
        for label, sides in (("cost", ("with", "without")), ("a_a", ("again", "without"))):
            ratios = [math.log(run[sides[0]][part] / run[sides[1]][part]) for run in runs]
            result[f"{when}_{label}"] = [math.expm1(value) for value in interval(ratios)]
    return result


def percent(values: Sequence[float]) -> str:
    middle, low, high = (100 * value for value in values)
    return f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"


def page(rows: Sequence[dict[str, Any]]) -> str:
    columns = (
        "program",
        "step",
        "rounds",
        "looks",
        "their share of steps 1-200",
        "1-200",
        "A/A",
        "201-400",
        "A/A",
    )
    table = markdown_table(
        columns,
        [
            (
                row["name"],
                f"{row['step_ms']:.3g} ms",
                row["rounds"],
                f"{row['looks']} in {row['looks_ms'][0]:.2f} ms",
                f"{100 * row['looks_share'][0]:.3f} %",
                *(
                    percent(row[f"{when}_{label}"])
                    for when in ("first", "after")
                    for label in ("cost", "a_a")
                ),
            )
            for row in rows
        ],
    )
    return (
        "# The checks of a run\n\nThe time of steps with the checks against `--no-checks`, in interleaved fresh processes; the "
        f"A/A is `--no-checks` twice. One thread.\n\n{table}"
    )


def main() -> None:
    options = some_or_all(__doc__, "programs")
    made, rows = stamp(), []
    for name in [name for name in PROGRAMS if not options.only or name in options.only]:
        rows.append(measured(name, ROUNDS))
        print(json.dumps(rows[-1], indent=1), flush=True)
        write_result(THEME, made, page(rows), {"made": made, "rows": rows}, {str(SRC): "src"}, options.out)


if __name__ == "__main__":
    main()
