"""How often `flatout compare` is right about programs whose difference is known.

The program's step is the same small training step and N matrix products. B has 0, 2, 5 or 20 % more of them.
Each comparison is a run of the command with ``--gate 3%``. Reported: how often the gate fails, passes or
cannot tell, how often the interval covers the known difference, and the time. The share of a step that is not
products is measured first and enters the known difference.

    python bench/compare.py                      40 comparisons of each difference, about 2 hours
    python bench/compare.py --runs 10            fewer
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import RESULTS, SRC, read_result, stamp, write_result

from flatout.measure.statistics import median
from flatout.probe.machine import look

THEME = "compare"
MORE = (0.0, 0.02, 0.05, 0.20)
GATE = 0.03
PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
square = torch.randn(128, 128)
for step in range(10**9):
    for p in model.parameters():
        p.grad = None
    model(torch.randn(64, 64)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad
        for _ in range(int(sys.argv[1])):
            torch.mm(square, square)
"""
PRODUCTS = 300


def compare(folder: Path, words: list[str]) -> tuple[int, dict[str, Any]]:
    """Run the command in a folder; return its exit code and its record."""
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "compare", "--json", "--job", str(folder / "job"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"the comparison failed:\n{done.stderr}")
    return done.returncode, json.loads(done.stdout)


def overhead(folder: Path) -> float:
    """The rest of a step, in products: from steps with many products and with none."""
    _, record = compare(
        folder, ["--pairs", "3", "--budget", "1s", f"python train.py {PRODUCTS}", "python train.py 0"]
    )
    ratio = 1 + record["step_time"]["value"]
    return PRODUCTS * ratio / (1 - ratio)


def page(done: dict[str, Any]) -> str:
    lines = [
        "# Comparisons of programs with a known difference",
        "",
        f"`flatout compare --gate {GATE:.0%}` of a step with {PRODUCTS} matrix products and one with more of them. The rest of a step takes as long as "
        f"{done['overhead']:.1f} products, which the known difference contains.",
        "",
        "| difference | comparisons | gate failed | passed | cannot tell | interval covers it | median half width | pairs, median (most) | time, median (longest) | losses equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    covered = total = 0
    for more in MORE:
        runs = done["runs"].get(f"{more:g}", [])
        if not runs:
            continue
        truth = known(more, done["overhead"])
        inside = [run["low"] <= truth <= run["high"] for run in runs]
        covered, total = covered + sum(inside), total + len(inside)
        gates = [
            sum(run["gate"] == verdict for run in runs) for verdict in ("failed", "passed", "cannot tell")
        ]
        pairs, times = [run["n"] for run in runs], [run["seconds"] for run in runs]
        half = median([50 * (run["high"] - run["low"]) for run in runs])
        lines.append(
            f"| {100 * truth:.2f} % | {len(runs)} | {gates[0]} | {gates[1]} | {gates[2]} | {sum(inside)} | {half:.2f} points "
            f"| {median(pairs):.0f} ({max(pairs)}) | {median(times):.0f} s ({max(times):.0f} s) | {sum(run['losses'] == 'same bits' for run in runs)} |"
        )
    if total:
        low, high = wilson(covered, total)
        lines += [
            "",
            f"Intervals cover the known difference in {covered} of {total}, {low:.0%} to {high:.0%} (goal: 93 to 97 %).",
        ]
    busy = [run["note"] for runs in done["runs"].values() for run in runs if run["note"]]
    lines += ["", f"Beside other programs: {len(busy)} comparisons." if busy else "The machine was quiet."]
    return "\n".join(lines)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a proportion. Source: Wilson, Journal of the ASA 22, 1927."""
    z = 1.96
    centre, root = hits + z * z / 2, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return (centre - root) / (n + z * z), (centre + root) / (n + z * z)


def known(more: float, rest: float) -> float:
    return (PRODUCTS * (1 + more) + rest) / (PRODUCTS + rest) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="comparisons of each difference (default 40)")
    parser.add_argument(
        "--only", default=",".join(f"{more:g}" for more in MORE), help="only these differences: 0,0.05"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    made = stamp(look())
    done = {
        "overhead": None,
        "runs": {},
        **{k: v for k, v in read_result(THEME, made, args.out).items() if k in ("overhead", "runs")},
    }
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
        if done["overhead"] is None:
            done["overhead"] = overhead(folder)
        for number in range(args.runs):
            for more in map(float, args.only.split(",")):
                runs = done["runs"].setdefault(f"{more:g}", [])
                if len(runs) > number:
                    continue
                products = round(PRODUCTS * (1 + more))
                code, record = compare(
                    folder,
                    ["--gate", f"{GATE:.0%}", f"python train.py {PRODUCTS}", f"python train.py {products}"],
                )
                step = record["step_time"]
                runs.append(
                    {
                        **{key: step[key] for key in ("value", "low", "high", "n")},
                        "gate": record["gates"][0]["verdict"],
                        "exit_code": code,
                        "losses": record["losses"]["verdict"],
                        "seconds": record["seconds"],
                        "pairs": [round(pair, 5) for pair in record["pairs"]],
                        "note": "; ".join(record["notes"]),
                    }
                )
                print(
                    f"{more:.0%}: {step['value']:+.2%} ({step['low']:+.2%} to {step['high']:+.2%}, n={step['n']}): {runs[-1]['gate']}",
                    flush=True,
                )
                write_result(THEME, made, page(done), done, {str(SRC): "src"}, args.out)
    write_result(THEME, made, page(done), done, {str(SRC): "src"}, args.out)
    print(page(done))


if __name__ == "__main__":
    main()
