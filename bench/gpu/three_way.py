"""Compares one training program in three ways on one GPU: plain, with one-liners by hand, under flatout.

1. `flatout tune` gets the plain program and a budget, and finds a plan, with the guard's verdict.
2. Sets of three fresh processes (plain, one-liners, flatout's plan) are interleaved block by block, so that
   the machine's state affects all three equally; CUDA events time the steps. Three sets, if the time allows;
   at least one.

Ratios are of mean step times in steady state: the median over sets with a 95 % interval (bootstrap over sets
and rounds). Compilation is outside the steady state and counts as start-up: seconds from the start of the
process to the first steady step. The benchmark has a time limit, and writes its results after each set, so
that an interrupted run keeps them.

MFU (model FLOP utilisation) = FLOPs that the model needs for one image or token, forward and backward, times
the throughput, over the dense bf16 peak of the vendor's data sheet; recomputation does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from open_set import summary, tune
from pairs import ComparisonSide, comparison, ratio_of, spell
from provenance import RESULTS, ROOT, markdown_table, stamp, write_result

from flatout.cli.options.arguments import Duration
from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.measure.statistics import median, quantile
from flatout.probe.machine import look
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.records import PHASES
from flatout.tune.session import plan_of

# Dense bf16 TFLOP/s by the vendor's data sheets (fp16 without bf16); the first name contained in the device's
# name counts.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "A6000": 154.8,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
PROGRAMS = Path(__file__).resolve().parent / "programs"
SETS = 3
RESERVE_S, RESERVE_SHARE = 150.0, 0.4  # of the limit, for at least one set of processes
OVERTIME = 1.2  # limit of a search, relative to its budget
NO_GPU = 2


@dataclass(frozen=True)
class Theme:
    """A benchmark: its two programs, the counted unit, and the FLOPs of one unit.

    ``per_sample`` turns samples into units (tokens).
    """

    name: str
    title: str
    plain: str
    one_liners: str
    unit: str
    per_sample: int
    batch: int
    flop_per_unit: float
    formula: str
    arguments: tuple[str, ...] = ()
    one_liner_arguments: tuple[str, ...] = ()


def options(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"{doc}\n{__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run the same code at a tiny size, without a GPU on the CPU; write to a temporary folder",
    )
    parser.add_argument(
        "--budget", default=None, help="time budget of the tuner (default 210s; 30s with --smoke)"
    )
    parser.add_argument(
        "--limit", default="9m30s", help="time limit; the page then shows the finished sets (default 9m30s)"
    )
    parser.add_argument(
        "--sets",
        type=int,
        default=None,
        help=f"sets of three fresh processes (default {SETS}; 1 with --smoke)",
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="blocks of each process in a set (default 6; 3 with --smoke)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="keep the tuner's session and report in this folder"
    )
    return parser


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def run(theme: Callable[[bool, argparse.Namespace], Theme], args: argparse.Namespace) -> int:
    """Runs the whole benchmark; returns the exit code."""
    if not args.smoke and not has_gpu():
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    facts = look()
    made = stamp(facts)
    if args.smoke and not has_gpu():
        made["slug"] = "cpu"
    folder = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    budget_s = duration(args.budget or ("30s" if args.smoke else "210s"))
    bench = Bench(
        theme(args.smoke, args),
        facts,
        made,
        folder,
        limit_s=duration(args.limit),
        budget_s=budget_s,
        sets=args.sets or (1 if args.smoke else SETS),
        rounds=args.rounds or (3 if args.smoke else 6),
        smoke=args.smoke,
    )
    with tempfile.TemporaryDirectory(prefix="three-way-") as place:
        bench.run((args.keep or Path(place)).resolve())
    return 0


def duration(text: str) -> float:
    """Parses ``90s``, ``5m`` or ``9m30s`` into seconds."""
    minutes, mark, rest = text.partition("m")
    return (
        float(Duration().convert(text, None, None))
        if not (mark and rest)
        else 60 * float(minutes) + float(Duration().convert(rest, None, None))
    )


class Bench:
    def __init__(
        self,
        theme: Theme,
        facts: Facts,
        made: dict[str, Any],
        folder: Path,
        limit_s: float,
        budget_s: float,
        sets: int,
        rounds: int,
        smoke: bool,
    ) -> None:
        self.theme, self.facts, self.made, self.folder, self.smoke = theme, facts, made, folder, smoke
        self.start_s, self.limit_s, self.budget_s, self.sets, self.rounds = (
            seconds(),
            limit_s,
            budget_s,
            sets,
            rounds,
        )
        self.peak = next(
            (
                peak
                for name, peak in PEAKS.items()
                if facts.gpus and name.lower() in facts.gpus[0].name.lower()
            ),
            None,
        )
        self.tuned: dict[str, Any] = {}
        self.sides: list[ComparisonSide] = []

    def run(self, place: Path) -> None:
        theme = self.theme
        plain = (sys.executable, str(PROGRAMS / theme.plain), *theme.arguments)
        by_hand = (
            sys.executable,
            str(PROGRAMS / theme.one_liners),
            *theme.arguments,
            *theme.one_liner_arguments,
        )
        self.say(f"tuning the plain program for {self.budget_s:.0f} s")
        left_s = self.start_s + self.limit_s - seconds() - min(RESERVE_S, RESERVE_SHARE * self.limit_s)
        session, failure = tune(
            list(plain), self.budget_s, place / "tune", max(left_s, OVERTIME * self.budget_s)
        )
        self.sides = [
            ComparisonSide("plain", parse_command(plain), Plan()),
            ComparisonSide("one-liners", parse_command(by_hand), Plan()),
        ]
        if session is None or failure:
            self.tuned = {"failure": failure}
            self.say(f"the tuner failed: {failure}")
        else:
            plan = plan_of(session)
            self.tuned = summary(session)
            self.sides.append(ComparisonSide("flatout", parse_command(plain), plan))
            self.say(f"flatout's plan: {plan.describe()}, {spell(session.speedup)}")
        job = JobFolder(place / "comparison").make()
        comparison(
            self.sides,
            job,
            self.facts,
            self.sets,
            self.rounds,
            self.start_s + self.limit_s,
            observed=self.observed,
        )
        text, paths = self.write()
        print(
            f"\n{text}\n\nwritten: {', '.join(path.name for path in paths)}"
            + (f" in {self.folder}" if self.smoke else "")
        )

    def observed(self, done: int) -> None:
        rates = (
            f"{side.name} {self.throughput(side):,.0f} {self.theme.unit}/s"
            for side in self.sides
            if side.blocks_ms
        )
        self.say(f"set {done} of {self.sets}: {', '.join(rates)}")
        self.write()

    def say(self, sentence: str) -> None:
        print(f"[{seconds() - self.start_s:5.0f} s] {sentence}", file=sys.stderr, flush=True)

    # -- figures ---------------------------------------------------------------------------------------------

    def blocks(self, side: ComparisonSide) -> list[float]:
        return [ms for blocks in side.blocks_ms for ms in blocks]

    def throughput(self, side: ComparisonSide) -> float:
        per_step = (
            next((r.samples_per_step for r in side.records if r.samples_per_step), None) or self.theme.batch
        )
        return per_step * self.theme.per_sample / median(self.blocks(side)) * 1000

    def mfu(self, side: ComparisonSide) -> float | None:
        return self.throughput(side) * self.theme.flop_per_unit / (self.peak * 1e12) if self.peak else None

    def figures(self, side: ComparisonSide) -> dict[str, Any]:
        if not side.blocks_ms:
            return {"failure": side.failure or "no complete set of processes"}
        times, plain = self.blocks(side), self.sides[0]
        ratio = ratio_of(plain, side) if side is not plain else None
        last = side.records[-1]
        return {
            "step_ms": {
                "median": median(times),
                "low": quantile(times, 0.25),
                "high": quantile(times, 0.75),
                "blocks": len(times),
            },
            "processes": len(side.blocks_ms),
            "per_s": self.throughput(side),
            "mfu": self.mfu(side),
            "start_s": side.start_s,
            "ratio": ratio.to_json() if ratio else None,
            "phases": last.phases,
            "plan": side.plan.describe(),
            "peak_memory_bytes": max((r.peak_memory_bytes or 0 for r in side.records), default=0),
            "applied": last.applied,
            "not_applied": last.skipped,
            "failure": side.failure,
            "blocks_ms": side.blocks_ms,
            "first_losses": [float.fromhex(x) for x in last.losses[:40]],
        }

    def write(self) -> tuple[str, Sequence[Path]]:
        figures = {side.name: self.figures(side) for side in self.sides}
        text = self.page(figures)
        raw = {
            "smoke": self.smoke,
            "unit": self.theme.unit,
            "flop_per_unit": self.theme.flop_per_unit,
            "formula": self.theme.formula,
            "peak_bf16_tflops": self.peak,
            "budget_s": self.budget_s,
            "sides": figures,
            "tuned": self.tuned,
        }
        return text, write_result(self.theme.name, self.made, text, raw, folder=self.folder)

    def row(self, name: str, f: dict[str, Any]) -> tuple[Any, ...]:
        if "step_ms" not in f:
            return (name, f"failed: {f['failure'][:200]}", *["-"] * 7)
        step, shares = f["step_ms"], {phase: f["phases"].get(phase, {}).get("share", 0) for phase in PHASES}
        return (
            name,
            f"{f['per_s']:,.0f}",
            f"{step['median']:.3g} [{step['low']:.3g}, {step['high']:.3g}]",
            spell(f["ratio"]) if f["ratio"] else "1 (baseline)",
            "unknown peak" if f["mfu"] is None else f"{100 * f['mfu']:.2f} %",
            ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in shares.items() if share >= 0.005)
            or "-",
            f"{f['peak_memory_bytes'] / 2**30:.1f}",
            f"{f['start_s'][0]:.0f}, then {median(f['start_s'][1:] or f['start_s']):.0f}",
            f"{f['processes']} x {self.rounds}",
        )

    def page(self, figures: dict[str, dict[str, Any]]) -> str:
        header = (
            "program",
            f"{self.theme.unit}/s",
            "step, ms [quartiles]",
            "relative to plain [95 %]",
            "MFU",
            "phases of a step",
            "peak memory, GiB",
            "start, s",
            "processes x blocks",
        )
        parts = [f"# {self.theme.title}\n"]
        if self.smoke:
            parts.append(
                "**A smoke run at a tiny size: it only shows that the benchmark works. Its figures are meaningless.**\n"
            )
        parts += [
            "Baseline: the plain program. Fresh processes, interleaved block by block. Start: seconds to the first steady step, including compilation,",
            "for the first process and (median) the later ones, which use the compiler's cache; flatout's first one uses the cache from tuning.\n",
            markdown_table(header, [self.row(name, f) for name, f in figures.items()]),
            "",
        ]
        sides = {side.name: side for side in self.sides if side.blocks_ms}
        if {"one-liners", "flatout"} <= set(sides):
            parts.append(
                f"flatout relative to the one-liners by hand: {spell(ratio_of(sides['one-liners'], sides['flatout']))}.\n"
            )
        parts += self.of_tuner()
        peak = (
            f"{self.peak:g} TFLOP/s (bf16, dense, vendor's data sheet)"
            if self.peak
            else "unknown for this device"
        )
        plain, by_hand = (
            (PROGRAMS / name).relative_to(ROOT) for name in (self.theme.plain, self.theme.one_liners)
        )
        parts.append(
            f"MFU = {self.theme.formula} x throughput / peak; peak {peak}.\nPrograms: `{plain}` (plain, and unchanged under flatout), `{by_hand}`.\n"
        )
        if "levers" in self.tuned:
            rows = [
                (lever["name"], lever["value"], lever["status"], self.alone(lever), lever["reason"])
                for lever in self.tuned["levers"]
            ]
            parts.append(
                markdown_table(("lever", "value", "outcome", "by itself, relative to plain", "reason"), rows)
            )
        return "\n".join(parts)

    def of_tuner(self) -> list[str]:
        said = self.tuned
        if "plan" not in said:
            return [f"flatout's tuner failed: {said.get('failure', '')[:300]}\n"]
        return [
            f"flatout's plan: `{said['plan']}`, found in {said['spent_s']:.0f} s; the session claims {spell(said['session_ratio'])}, "
            f"A/A {spell(said['noise_floor'])}.",
            f"Guard: {said['guard']['verdict']}: {said['guard']['why']}.\n",
        ]

    @staticmethod
    def alone(lever: dict[str, Any]) -> str:
        return (
            "-"
            if lever["ratio"] is None
            else f"{lever['ratio']:.2f}x [{lever['low']:.2f}, {lever['high']:.2f}] ({lever['how']})"
        )
