"""Measures complete trainings, plain and tuned: the final metric, and the wall-clock time to reach a metric.

DIR holds ``set.json`` as open_set.py reads it. An entry with ``to_end`` is measured here, and so are the
programs of OWN:
    "to_end": {"argv": [...], "metric": {"name", "pattern", "better": "lower" or "higher", "start", "target"}}
``argv`` has {seed} in place of the script's own seed, {home} for DIR and {bench} for the folder of this file.
``pattern`` is a regular expression with one group, the metric, that matches a line of the script's output.
``start`` matches the line at which training starts (default: the first line of the output). The metric is
reached at ``target``; without one, at the best value that every run reached, plain and tuned.

Each program runs once plain; then `flatout tune --no-write` finds its plan, with the length of that run as
the horizon. Then runs with three seeds alternate between plain and `flatout run` with that plan, one at a
time: plain, tuned, tuned, plain, plain, tuned. The benchmark records the time of each line of output.

Checked for each program
* The final metric: the means of the two sides differ by no more than the plain runs do among themselves.
* The time from the start of training to the metric: the median over seeds of plain over tuned is at least the
  speed-up of the tuner's verdict, less 10 %.
The tuner's verdict applies to training steps, so evaluation between them and compilation count against it. A
program whose plan stays plain does not run again. Baseline: the plain script. n: seeds of each side. The
spread is the range over seeds. A restart in the same month skips the finished programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_set import tune
from pairs import standing_in
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result
from time_to_accuracy_chart import chart

from flatout.cli.options.arguments import Duration
from flatout.job.folder import write_atomically
from flatout.measure.clock import seconds
from flatout.measure.statistics import median
from flatout.probe.machine import look
from flatout.tune.session import plan_of

SEEDS = (0, 1, 2)
WITHIN = 0.10  # of the promised speed-up
OWN: tuple[dict[str, Any], ...] = (
    {
        "name": "hf_trainer",
        "cwd": ".",
        "env": {},
        "to_end": {
            "argv": [
                "python",
                "{bench}/programs/hf_trainer.py",
                "--data",
                "{home}/wikitext2_small",
                "--steps",
                "400",
                "--every",
                "40",
                "--seed",
                "{seed}",
            ],
            "metric": {"name": "evaluation loss", "pattern": r"'eval_loss': '?([0-9.]+)", "better": "lower"},
        },
    },
)


@dataclass
class Run:
    """One run of a program to its end.

    Times are in seconds since its process started; ``points`` are (time, metric).
    """

    side: str
    seed: int
    points: list[tuple[float, float]] = field(default_factory=list)
    training_s: float | None = None
    wall_s: float = 0.0
    failure: str = ""

    @property
    def final(self) -> float:
        return self.points[-1][1]

    def reached_s(self, target: float, sign: float) -> float | None:
        """Returns the time of the first metric at least as good as ``target``.

        ``sign`` is 1 where lower is better, else -1.
        """
        return next((at for at, value in self.points if sign * value <= sign * target), None)

    def to_target_s(self, target: float, sign: float) -> float | None:
        """Returns the same time, counted from the start of training."""
        reached = self.reached_s(target, sign)
        return None if reached is None else reached - (self.training_s or 0.0)


def command_of(program: dict[str, Any], seed: int, home: Path) -> list[str]:
    """Returns the command line of the program with this seed."""
    words = {"{seed}": str(seed), "{home}": str(home), "{bench}": str(HERE)}
    found = []
    for word in program["to_end"]["argv"]:
        for placeholder, value in words.items():
            word = word.replace(placeholder, value)
        found.append(word)
    return found


def run_to_end(side: str, seed: int, argv: list[str], metric: dict[str, Any], limit_s: float) -> Run:
    """Runs a command in the current folder and records when each value of the metric appears.

    The run ends after ``limit_s`` at the latest.
    """
    run, pattern = Run(side, seed), re.compile(metric["pattern"])
    begins, last, began_s = re.compile(metric.get("start", "")), "", seconds()
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    limit = threading.Timer(limit_s, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            now_s, last = seconds() - began_s, line.strip() or last
            if run.training_s is None and begins.search(line):
                run.training_s = now_s
            if found := pattern.search(line):
                run.points.append((now_s, float(found[1])))
        process.wait()
    finally:
        limit.cancel()
        process.kill()  # no effect if it has ended by itself
        process.wait()
    run.wall_s = seconds() - began_s
    if run.wall_s >= limit_s:
        run.failure = f"not finished after {limit_s:.0f} s"
    elif process.returncode:
        run.failure = f"exit code {process.returncode}: {last[:200]}"
    if not run.failure and not run.points:
        run.failure = (
            f"no line of its output has the metric ({metric['pattern']!r}); the last one: {last[:100]!r}"
        )
    return run


def order_of(seeds: tuple[int, ...]) -> list[tuple[str, int]]:
    """Yields plain 0, tuned 0, tuned 1, plain 1, plain 2, tuned 2, ..."""
    turns = []
    for at, seed in enumerate(seeds):
        turns += [(side, seed) for side in (("plain", "tuned") if at % 2 == 0 else ("tuned", "plain"))]
    return turns


def measure_program(
    program: dict[str, Any], home: Path, budget_s: float | None, seeds: tuple[int, ...], limit_s: float
) -> dict[str, Any]:
    """Tunes a program and runs it to its end on both sides; a failure is reported in ``why``."""
    metric, place = program["to_end"]["metric"], Path(tempfile.mkdtemp(prefix="to-end-"))
    found: dict[str, Any] = {
        "made": stamp(),
        "budget_s": budget_s,
        "metric": {key: value for key, value in metric.items() if key not in ("pattern", "start")},
    }
    try:
        with standing_in(home / program["cwd"], program.get("env")):
            first = run_to_end("plain", seeds[0], command_of(program, seeds[0], home), metric, limit_s)
            if first.failure:
                return {**found, "status": "failed", "why": f"the plain program: {first.failure}"}
            print(f"    plain {seeds[0]}: {first.wall_s:.0f} s, {metric['name']} {first.final:g}", flush=True)
            session, failure = tune(
                command_of(program, seeds[0], home), budget_s, place / "tune", horizon_s=first.wall_s
            )
            if session is None or failure:
                return {**found, "status": "failed", "why": failure}
            plan = plan_of(session)
            found |= {
                "plan": plan.describe(),
                "promised": session.speedup.to_json() if session.speedup else None,
                "guard": session.guard.verdict,
                "tuning_s": round(session.spent_s, 1),
            }
            if not len(plan) or session.speedup is None:
                return {**found, "status": "plain", "runs": [asdict(first)]}
            write_atomically(place / "plan.toml", plan.to_toml())
            runs = [first]
            for side, seed in order_of(seeds)[1:]:
                argv = command_of(program, seed, home)
                under = (
                    []
                    if side == "plain"
                    else [sys.executable, "-m", "flatout", "run", "--plan", str(place / "plan.toml")]
                )
                runs.append(run := run_to_end(side, seed, [*under, *argv], metric, limit_s))
                if run.failure:
                    return {**found, "status": "failed", "why": f"{side}, seed {seed}: {run.failure}"}
                print(f"    {side} {seed}: {run.wall_s:.0f} s, {metric['name']} {run.final:g}", flush=True)
        return {**found, "status": "measured", "runs": [asdict(run) for run in runs]}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def judged(runs: list[Run], metric: dict[str, Any], promised: float) -> dict[str, Any]:
    """Returns the finals, the times to the metric and the two checks.

    ``ratio`` is plain over tuned of one seed, from the start of training; ``wall_ratio`` from the start of
    the process.
    """
    sign = 1.0 if metric["better"] == "lower" else -1.0
    plain, tuned = ([run for run in runs if run.side == side] for side in ("plain", "tuned"))
    target = metric.get("target")
    if target is None:
        target = sign * max(min(sign * value for _, value in run.points) for run in runs)
    finals = {"plain": [run.final for run in plain], "tuned": [run.final for run in tuned]}
    spread = max(finals["plain"]) - min(finals["plain"])
    apart = abs(sum(finals["tuned"]) / len(tuned) - sum(finals["plain"]) / len(plain))
    times = {
        name: {
            "plain": [of(run) for run in plain],
            "tuned": [of(run) for run in sorted(tuned, key=lambda run: run.seed)],
        }
        for name, of in (
            ("training", lambda run: run.to_target_s(target, sign)),
            ("wall", lambda run: run.reached_s(target, sign)),
        )
    }
    found = {
        "target": target,
        "finals": finals,
        "spread": spread,
        "apart": apart,
        "final_ok": apart <= spread,
        "times": times,
        "time_ok": False,
    }
    if any(value is None for sides in times.values() for values in sides.values() for value in values):
        return {
            **found,
            "missed_by": [f"{run.side} {run.seed}" for run in runs if run.reached_s(target, sign) is None],
        }
    ratios = {
        name: [a / b for a, b in zip(sides["plain"], sides["tuned"], strict=True)]
        for name, sides in times.items()
    }
    return {
        **found,
        "ratio": summary(ratios["training"]),
        "wall_ratio": summary(ratios["wall"]),
        "time_ok": median(ratios["training"]) >= (1 - WITHIN) * promised,
    }


def summary(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values), "n": len(values)}


def spelled(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def rows_of(programs: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for name, entry in programs.items():
        if entry["status"] != "measured":
            rows.append(
                (
                    name,
                    "plain stays" if entry["status"] == "plain" else f"failed: {entry['why'][:160]}",
                    *["-"] * 8,
                )
            )
            continue
        finals = [
            f"{sum(values) / len(values):.4g} ({min(values):.4g} to {max(values):.4g})"
            for values in entry["finals"].values()
        ]
        times = [
            f"{median(values):.0f} s" if None not in values else "not reached"
            for values in entry["times"]["wall"].values()
        ]
        rows.append(
            (
                name,
                entry["plan"],
                f"{entry['metric']['name']}: {' / '.join(finals)}",
                "within" if entry["final_ok"] else "**outside**",
                f"{entry['target']:.4g}: {' / '.join(times)}",
                spelled(entry.get("wall_ratio")),
                spelled(entry.get("ratio")),
                f"{entry['promised']['median']:.2f}x [{entry['promised']['low']:.2f}, {entry['promised']['high']:.2f}]",
                "kept" if entry["time_ok"] else "**not kept**",
                f"{entry['made']['device']}, {entry['made']['date'][:10]}",
            )
        )
    return rows


def page(programs: dict[str, dict[str, Any]], chart_name: str) -> str:
    header = (
        "program",
        "plan",
        "final metric, plain / tuned: mean (range)",
        "of the plain seeds' spread",
        "time to the metric, plain / tuned",
        "faster, whole process",
        "faster, from the start of training",
        "promised for a step",
        f"promise, within {WITHIN:.0%}",
        "device",
    )
    measured = [entry for entry in programs.values() if entry["status"] == "measured"]
    checks = [
        f"Final metric within the spread of the seeds: {sum(entry['final_ok'] for entry in measured)} of {len(measured)}.  ",
        f"Promise kept: {sum(entry['time_ok'] for entry in measured)} of {len(measured)}.",
    ]
    explained = (__doc__ or "").split("Each program runs once plain", 1)[1]
    shown = f"![Metric over time]({chart_name})\n" if measured else ""
    return "\n".join(
        [
            "# Time to a metric, plain and tuned\n",
            f"Each program runs once plain{explained}",
            shown,
            markdown_table(header, rows_of(programs)),
            "",
            *checks,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--budget", help="time to tune each program (default: what `flatout tune` chooses)")
    parser.add_argument("--only", default="", help="only these programs, separated by commas")
    parser.add_argument(
        "--seeds", type=int, default=len(SEEDS), help="runs of each side, with seeds from 0 (default 3)"
    )
    parser.add_argument("--limit", default="2h", help="time limit of each run (default 2h)")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    budget_s, limit_s = (
        None if text is None else Duration().convert(text, None, None) for text in (args.budget, args.limit)
    )
    home, only = args.dir.resolve(), [word for word in args.only.split(",") if word]
    public = [
        script for script in json.loads((home / "set.json").read_text(encoding="utf-8")) if "to_end" in script
    ]
    programs = {program["name"]: program for program in (*public, *OWN)}
    if unknown := set(only) - set(programs):
        parser.error(f"unknown program {', '.join(sorted(unknown))}; choose from {', '.join(programs)}")
    made = stamp(look())
    done: dict[str, dict[str, Any]] = read_result("time_to_accuracy", made, args.out).get("programs", {})
    for name in only or programs:
        if name not in done or args.again or done[name]["status"] == "failed":
            print(f"{name} ...", flush=True)
            done[name] = measure_program(programs[name], home, budget_s, tuple(range(args.seeds)), limit_s)
            write(done, made, home, args.out)
    print(
        write(done, made, home, args.out)
        if done
        else "no program was selected, and there are no earlier results"
    )


def write(done: dict[str, dict[str, Any]], made: dict[str, Any], home: Path, out: Path) -> str:
    """Writes the page, its records and its chart.

    The runs are judged here, so today's rule also applies to records of an earlier revision.
    """
    for entry in done.values():
        if entry["status"] == "measured":
            entry.update(
                judged([Run(**run) for run in entry["runs"]], entry["metric"], entry["promised"]["median"])
            )
    chart_name = f"time_to_accuracy_{made['slug']}_{made['date'][:7].replace('-', '')}.svg"
    text = page(done, chart_name)
    markdown, _ = write_result("time_to_accuracy", made, text, {"programs": done}, {str(home): "SET"}, out)
    if drawn := chart({name: entry for name, entry in done.items() if entry["status"] == "measured"}):
        write_atomically(markdown.with_suffix(".svg"), drawn)
    return text


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
