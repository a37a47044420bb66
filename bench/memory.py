"""Measures memory savings and their cost: recomputed activations in a GPT, accumulation in the Loop.

Bytes of one step: *saved* are the bytes that the forward pass keeps alive for the backward pass. *peak* is
the maximum above the start of the step until its end (on a CPU from torch's record of every allocation, on a
GPU from its allocator). Times are of whole steps, interleaved in one process; the order reverses every second
time. Each figure is the median over fresh processes with a 95 % interval (bootstrap over processes and
rounds); "plain again" is the A/A comparison. In the Loop, *kept* is the maximum that autograd holds during a
step. Goals: at most half of the saved bytes for at most 10 % of additional time, a quarter at best, and with
four micro-batches at most 0.30 of the bytes kept for the whole batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pairs import spell
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

from flatout.measure.statistics import Round, compare, median
from flatout.schema.records import Ratio

PROGRAM = HERE / "programs" / "memory_step.py"
SIZE = {"width": 256, "layers": 8, "heads": 8, "context": 128, "batch": 16}
TINY = {"width": 32, "layers": 2, "heads": 2, "context": 16, "batch": 8}
HALF, SLOWER, QUARTER, ACCUMULATED = 0.5, 1.10, 0.25, 0.30


def measured(size: dict[str, int], rounds: int) -> dict[str, Any]:
    """Returns the records of one process. Raises SystemExit with its output where it fails."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps({**size, "rounds": rounds, "steps": 1})],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"memory: the program failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def time_of(processes: list[dict[str, Any]], name: str, base: str) -> Ratio | None:
    """Returns the step time relative to that of ``base``; None without measured times."""
    rounds = [
        [Round(a, b) for a, b in zip(each["ms"][name], each["ms"][base], strict=True)]
        for each in processes
        if each["ms"].get(name)
    ]
    return compare(rounds) if rounds else None


def page(first: dict[str, Any], processes: list[dict[str, Any]], size: dict[str, int]) -> str:
    saved, peak = first["bytes"]["plain"]
    shares, rows = {}, []
    for name, (mine, most) in first["bytes"].items():
        ratio = None if name == "plain" else time_of(processes, name, "plain")
        shares[name] = (mine / saved, ratio)
        rows.append(
            (
                name,
                f"{mine / 2**20:.1f}",
                f"{mine / saved:.3f}",
                f"{most / 2**20:.1f}",
                f"{most / peak:.3f}",
                "1" if name == "plain" else spell(ratio) if ratio else "not run",
            )
        )
    whole = first["accumulation"]["Loop, 1"]
    loops = [
        (
            name.split(", ")[1],
            f"{kept / 2**20:.1f}",
            f"{kept / whole:.3f}",
            spell(time_of(processes, name, "plain")),
        )
        for name, kept in first["accumulation"].items()
    ]
    ms = median([each for process in processes for each in process["ms"]["plain"]]) if processes else None
    described = ", ".join(f"{name} {value}" for name, value in size.items()) + (
        f"; a plain step takes {ms:.0f} ms" if ms else ""
    )
    return "\n".join(
        [
            f"# Memory savings and their cost\n\n{(__doc__ or '').split(chr(10), 2)[2].strip()}\n\nThe model: {described}; float32, AdamW.\n",
            *goals(shares, first["accumulation"]),
            "",
            "## Recomputed activations (lever recompute)\n",
            markdown_table(
                ("way", "saved, MiB", "of plain", "peak, MiB", "of plain", "step time relative to plain"),
                rows,
            ),
            "",
            "## Accumulation in the Loop\n",
            markdown_table(
                ("micro-batches", "kept, MiB", "of the whole batch", "step time relative to the raw loop"),
                loops,
            ),
            "",
        ]
    )


def goals(shares: dict[str, tuple[float, Ratio | None]], kept: dict[str, int]) -> list[str]:
    ways = {name: entry for name, entry in shares.items() if not name.startswith("plain")}
    affordable = [
        (share, name, ratio)
        for name, (share, ratio) in ways.items()
        if ratio is not None and ratio.median <= SLOWER
    ]
    best, who = min((share, name) for name, (share, _) in ways.items())
    half = (
        "not run: no time was measured"
        if not any(ratio for _, ratio in ways.values())
        else "**missed**: none is that cheap"
    )
    if affordable:
        share, name, ratio = min(affordable, key=lambda each: each[0])
        half = f"{_word(share <= HALF)}: {share:.2f} with {name}, {spell(ratio)} of the time"
    four = kept["Loop, 4"] / kept["Loop, 1"]
    return [
        f"* At most {HALF} of the saved bytes for at most {SLOWER:.2f} of the time: {half}.",
        f"* At most {QUARTER} at best: {_word(best <= QUARTER)}, {best:.2f} with {who}.",
        f"* At most {ACCUMULATED:.2f} at four micro-batches: {_word(four <= ACCUMULATED)}, {four:.3f}.",
    ]


def _word(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=4,
        help="fresh processes to time, including those of earlier runs of this month (default 4)",
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--bytes-only", action="store_true", help="measure no times")
    parser.add_argument("--again", action="store_true", help="discard the records of earlier runs")
    parser.add_argument("--smoke", action="store_true", help="run the same code at a tiny size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    size = TINY if args.smoke else SIZE
    made = stamp()
    old = {} if args.again else read_result("memory", made, args.out)
    same = old.get("size") == size
    first, processes = (old["first"], old["processes"]) if same else (measured(size, 0), [])
    while True:
        text = page(first, processes, size)
        written = write_result(
            "memory", made, text, {"size": size, "first": first, "processes": processes}, folder=args.out
        )
        if args.bytes_only or len(processes) >= args.processes:
            break
        processes.append(measured(size, args.rounds))
        print(
            f"process {len(processes)} of {args.processes}: plain {median(processes[-1]['ms']['plain']):.0f} ms",
            flush=True,
        )
    print(text)
    print(*(path.name for path in written))


if __name__ == "__main__":
    main()
