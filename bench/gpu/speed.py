"""Times training programs on one GPU: plain, with one-liners by hand, tuned by flatout, with all levers.

Programs: the tutorial's ResNet-18, GPT-2 124M at 4 and at 64 sequences of 1,024 tokens, nanoGPT (already tuned:
its plain version is its one-liners), DCGAN, and a ResNet-50 on a folder of JPEG files, which waits for its loader.

    python bench/gpu/speed.py --minutes 8

One process runs at a time, alone on the machine. CUDA events time its steps in steady state, in blocks.
Compilation is part of the start: seconds from the start of the process to its first steady step. Each ratio is
plain time over this time, with a 95 % interval over blocks. With one process a side the interval lacks the
variation between processes, which was up to 13 % on an H100. MFU is the share of the dense bf16 peak of the
vendor's data sheet that the model's FLOPs take; recomputation does not count.

The record is written after each side, and the page is made from it. A side starts only if it should end in time;
the others are named as not finished, and the next start continues with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from open_set import summary, tune
from pairs import ComparisonSide, comparison, ratio_of, spell
from provenance import RESULTS, markdown_table, stamp, write_result

from flatout.job.folder import JobFolder, read_json
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.measure.statistics import median, quantile
from flatout.probe.machine import look
from flatout.schema.enums import Origin
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio
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
HERE = Path(__file__).resolve().parent
NO_GPU = 2
THEME = "speed_gpu"
PLAIN, HAND, OVERHEAD, AUTOTUNE, TUNED, ALL = (
    "plain",
    "one-liners",
    "one-liners, reduce-overhead",
    "one-liners, max-autotune",
    "flatout tune",
    "flatout, all levers",
)
MODES = {HAND: "default", OVERHEAD: "reduce-overhead", AUTOTUNE: "max-autotune"}
# Seconds that a side takes at most, as far as an H100 has shown; a side that would end too late does not start.
EXPECTED_S = {PLAIN: 30, HAND: 75, OVERHEAD: 90, AUTOTUNE: 180, TUNED: 170, ALL: 60}
TIERS = ((PLAIN, HAND, TUNED), (ALL, OVERHEAD), (AUTOTUNE,))
ROUNDS, SET_S = 16, 6.0
LEVERS: dict[str, Any] = {
    "allocator": True,
    "cached_prefix": {"mib": 8192},
    "batched_transforms": "all",
    "resident_data": {"mib": 8192},
    "device_prefetch": 0,
    "gc_pause": True,
    "tf32": True,
    "cudnn_benchmark": True,
    "channels_last": True,
    "autocast": "bfloat16",
    "attention": True,
    "fused_ops": True,
    "fused_optimizer": "fused",
    "graphs": True,
    "early_values": True,
}


@dataclass(frozen=True)
class Program:
    """A program, its version by hand, and what its throughput counts. ``units``: in a step.

    ``tuned_already``: the plain version is the one with the one-liners.
    """

    name: str
    title: str
    script: str
    by_hand: str
    arguments: tuple[str, ...]
    small: tuple[str, ...]
    unit: str
    units: int
    flop_per_unit: float
    tuned_already: bool = False


def gpt_flop(vocabulary: int = 50257, width: int = 768, layers: int = 12, context: int = 1024) -> float:
    """FLOPs of a token by nanoGPT's formula: 6 N + 12 L H Q T, with N without the position embedding."""
    block = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 4 * width
    return 6 * (vocabulary * width + layers * block + 2 * width) + 12 * layers * width * context


SMALL_GPT = (
    *("--width", "64", "--heads", "2", "--layers", "2"),
    *("--context", "64", "--vocabulary", "512", "--tokens", "9000"),
)
IMAGES = "imagenet-files"
PROGRAMS = (
    Program(
        "tutorial",
        "ResNet-18 at 32x32, batch 128",
        "tutorial.py",
        "tutorial_one_liners.py",
        (),
        ("--batch-size", "8", "--images", "600"),
        "images",
        128,
        217.28e6,  # FlopCounterMode; the variant with a 3x3 stem needs fifteen times as much
    ),
    Program(
        "gpt 4",
        "GPT-2 124M, 4 x 1,024, float32",
        "gpt.py",
        "gpt_one_liners.py",
        ("--batch-size", "4"),
        SMALL_GPT,
        "tokens",
        4 * 1024,
        gpt_flop(),
    ),
    Program(
        "nanogpt",
        "nanoGPT 124M, 12 x 1,024, already tuned",
        "nanogpt.py",
        "nanogpt.py",
        (),
        SMALL_GPT,
        "tokens",
        12 * 1024,
        gpt_flop(50304),
        tuned_already=True,
    ),
    Program(
        "dcgan",
        "DCGAN at 64x64, batch 64",
        "dcgan.py",
        "dcgan.py",
        (),
        ("--batch-size", "8", "--images", "64", "--width", "8"),
        "images",
        64,
        2.482e9,  # FlopCounterMode, a step's three passes
    ),
    Program(
        "imagenet",
        "ResNet-50 on JPEG files, batch 256",
        "imagenet.py",
        "imagenet.py",
        ("--data", IMAGES),
        tuple(
            f"--data {IMAGES} --files 32 --side 64 --crop 32 --batch-size 8 --workers 0 --model resnet18".split()
        ),
        "images",
        256,
        24.30e9,  # FlopCounterMode
    ),
    Program(
        "gpt 64",
        "GPT-2 124M, 64 x 1,024, bf16",
        "gpt.py",
        "gpt_one_liners.py",
        ("--batch-size", "64", "--bf16"),
        (*SMALL_GPT, "--bf16"),
        "tokens",
        64 * 1024,
        gpt_flop(),
    ),
)


class Bench:
    def __init__(self, args: argparse.Namespace, facts: Facts, place: Path) -> None:
        self.args, self.facts, self.place = args, facts, place
        self.end_s = seconds() + 60 * args.minutes
        self.out: Path = args.out
        self.made = stamp(facts)
        self.record: dict[str, Any] = {"smoke": args.smoke, "sides": {}}
        old = read_json(args.state) if args.state is not None and args.state.is_file() else None
        if isinstance(old, dict) and old.get("smoke") == args.smoke:
            self.record = old
        name = facts.gpus[0].name.lower() if facts.gpus else ""
        self.peak = next((peak for known, peak in PEAKS.items() if known.lower() in name), None)

    def run(self) -> int:
        left_out = []
        for tier in TIERS:
            for program in PROGRAMS:
                for side in tier:
                    if self.skipped(program, side) or self.found(program, side).get("step_ms"):
                        continue
                    if seconds() + EXPECTED_S[side] * (0.2 if self.args.smoke else 1) > self.end_s:
                        left_out.append(f"{program.name}: {side}")
                        continue
                    figures = self.measured(program, side)
                    self.record["sides"].setdefault(program.name, {})[side] = figures
                    step = figures.get("step_ms", {}).get("median")
                    said = f"{step:.4g} ms a step" if step else f"failed: {figures['failure']}"
                    print(f"{program.name}: {side}: {said}", flush=True)
                    self.write()
        print(self.page(), flush=True)
        if left_out:
            print(f"not finished, run it again: {', '.join(left_out)}")
        return 1 if left_out else 0

    def skipped(self, program: Program, side: str) -> bool:
        if self.args.smoke and (program.name != "tutorial" or side == AUTOTUNE) and side != PLAIN:
            return True
        return program.tuned_already and side == HAND

    def found(self, program: Program, side: str) -> dict[str, Any]:
        return dict(self.record["sides"].get(program.name, {}).get(side, {}))

    # -- one side

    def words(self, program: Program, side: str) -> tuple[str, ...]:
        by_hand = side in MODES
        given = program.small if self.args.smoke else program.arguments
        given = tuple(str(self.place / IMAGES) if word == IMAGES else word for word in given)
        if by_hand:
            given += ("--fast", MODES[side])
        if self.args.smoke and (by_hand or program.tuned_already):
            given += ("--backend", "aot_eager")
        script = program.by_hand if by_hand else program.script
        return (sys.executable, str(HERE / "programs" / script), *given)

    def measured(self, program: Program, side: str) -> dict[str, Any]:
        words, plan, tuned = self.words(program, side), Plan(), {}
        if side == PLAIN and IMAGES in program.arguments:  # make the files
            subprocess.run([*words, "--epochs", "0"], check=False)
        start_s, left_s = seconds(), self.end_s - seconds()
        if side == TUNED:
            budget_s = 6.0 if self.args.smoke else None
            session, failure = tune(list(words), budget_s, self.place / "tune" / program.name, left_s)
            if session is None or failure:
                return {"failure": failure}
            plan, tuned = plan_of(session), summary(session)
        if side == ALL:
            plan = Plan(tuple(Choice(name, value, Origin.USER) for name, value in LEVERS.items()))
        timed = ComparisonSide(side, parse_command(words), plan)
        job = JobFolder(self.place / "jobs" / f"{program.name} {side}".replace(" ", "-")).make()
        rounds, set_s = (2, 1.0) if self.args.smoke else (ROUNDS, SET_S)
        comparison([timed], job, self.facts, 1, rounds, self.end_s, set_s=set_s)
        if not timed.blocks_ms:
            return {"failure": timed.failure or "no block was measured", "tuned": tuned}
        times, record = timed.blocks_ms[0], timed.records[0]
        per_s = program.units / median(times) * 1000
        return {
            "step_ms": {"median": median(times), "low": quantile(times, 0.25), "high": quantile(times, 0.75)},
            "blocks_ms": times,
            "per_s": per_s,
            "mfu": per_s * program.flop_per_unit / (self.peak * 1e12) if self.peak else None,
            "start_s": timed.start_s[0],
            "seconds": seconds() - start_s,
            "phases": record.phases,
            "peak_memory_bytes": record.peak_memory_bytes,
            "plan": plan.describe(),
            "applied": record.applied,
            "not_applied": record.skipped,
            "tuned": tuned,
        }

    # -- the page

    def write(self) -> None:
        write_result(THEME, self.made, self.page(), self.record, folder=self.out)
        if self.args.state is not None:
            self.args.state.write_text(json.dumps(self.record), encoding="utf-8")

    def page(self) -> str:
        title = "# Speed on a GPU\n\n" + (
            "**A rehearsal at a tiny size: its figures are meaningless.**\n\n" * self.args.smoke
        )
        return (
            title
            + f"{(__doc__ or '').partition('    python')[0].strip()}\n\n"
            + "\n".join(map(self.section, PROGRAMS))
        )

    def section(self, program: Program) -> str:
        rows = [
            self.row(program, side)
            for side in MODES.keys() | {PLAIN, TUNED, ALL}
            if not self.skipped(program, side)
        ]
        order = [PLAIN, HAND, OVERHEAD, AUTOTUNE, TUNED, ALL]
        rows.sort(key=lambda row: order.index(row[0]))
        header = (
            "version",
            f"{program.unit}/s",
            "ms a step [quartiles]",
            "relative to plain [95 %]",
            "MFU",
            "GiB",
            "start, s",
            "plan",
        )
        return f"## {program.title}\n\n{markdown_table(header, rows)}\n"

    def row(self, program: Program, side: str) -> tuple[str, ...]:
        figures = self.found(program, side)
        if not figures.get("step_ms"):
            return (side, figures.get("failure", "not finished")[:160] or "failed", *["-"] * 6)
        step, ratio = figures["step_ms"], self.ratio(program, side)
        left_out = "; ".join(f"{skip['name']}: {skip['reason']}" for skip in figures["not_applied"])
        return (
            side,
            f"{figures['per_s']:,.0f}",
            f"{step['median']:.4g} [{step['low']:.4g}, {step['high']:.4g}]",
            "1" if side == PLAIN else spell(ratio) if ratio else "no plain time",
            f"{figures['mfu']:.1%}" if figures["mfu"] is not None else "unknown peak",
            f"{(figures['peak_memory_bytes'] or 0) / 2**30:.2f}",
            f"{figures['start_s']:.0f}",
            figures["plan"] + (f" (not applied: {left_out})" if left_out and side == ALL else ""),
        )

    def ratio(self, program: Program, side: str) -> Ratio | None:
        plain, other = self.found(program, PLAIN).get("blocks_ms"), self.found(program, side)["blocks_ms"]
        if not plain:
            return None
        sides = [
            ComparisonSide("", parse_command(["python"]), Plan(), blocks_ms=[ms]) for ms in (plain, other)
        ]
        count = min(len(plain), len(other))
        for timed in sides:
            timed.blocks_ms = [timed.blocks_ms[0][:count]]
        return ratio_of(*sides)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="start nothing that would end later (default 30)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run the same code at a tiny size, without a GPU on the CPU"
    )
    parser.add_argument(
        "--state", type=Path, help="file with the sides that are done; the next start continues"
    )
    parser.add_argument("--out", type=Path, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write(
            "this benchmark needs a CUDA GPU, and torch finds none: nothing was measured or written.\n"
            "Add --smoke to run the same code at a tiny size on the CPU.\n"
        )
        return NO_GPU
    with tempfile.TemporaryDirectory(prefix="speed-") as place:
        args.out = (args.out or (Path(place) / "results" if args.smoke else RESULTS)).resolve()
        args.state = args.state and args.state.resolve()
        work = Path(place) / "work"  # programs run in a folder that nothing else changes
        work.mkdir()
        os.chdir(work)
        return Bench(args, look(), Path(place)).run()


if __name__ == "__main__":
    raise SystemExit(main())
