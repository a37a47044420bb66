"""Benchmarks every kernel: its reference, torch.compile, each implementation, and a copy.

One process runs all candidates, interleaved. Ratios are relative to the reference, with 95 % intervals
(bootstrap over rounds). If a case cannot run here, its row says so. On a GPU, `bench/gpu/kernels.py` adds
Liger-Kernel's kernels where it is installed, and the goals.

    python bench/kernels.py                         all of flatout's kernels
    python bench/kernels.py --kernels layer_norm --rounds 4
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from provenance import RESULTS, markdown_table, stamp, write_result

from flatout.cli.kernel_bench import (
    COLUMNS,
    ExtraImplementations,
    KernelTiming,
    cells,
    copy_gb_per_s,
    device_of_kernels,
    kernel_of,
    time_cases,
)
from flatout.kernels import NAMES
from flatout.measure.clock import seconds


def measure(
    theme: str,
    title: str,
    args: argparse.Namespace,
    others: ExtraImplementations | None = None,
    goals: Callable[[list[KernelTiming]], list[str]] | None = None,
) -> int:
    """Runs the benchmark; writes its page after each kernel, so that an interrupted run keeps its results."""
    made, copy_rate, rows = stamp(), copy_gb_per_s(), list[KernelTiming]()
    folder = args.out or (Path(tempfile.mkdtemp(prefix="smoke-")) if args.smoke else RESULTS)
    text, end_s, late = "", seconds() + args.limit_s, list[str]()
    for name in args.kernels.split(","):
        for row in (
            time_cases(kernel_of(name), 1 if args.smoke else args.rounds, args.case, copy_rate, others)
            if seconds() < end_s
            else ()
        ):
            rows.append(row)
            if seconds() >= end_s:
                break
            print(
                f"  {row.kernel}, {row.case}, {row.passes}: {' | '.join(cells(row))}",
                file=sys.stderr,
                flush=True,
            )
        late += [name] if seconds() >= end_s else []
        parts = [
            f"# {title}\n",
            *(["**A smoke run of one round: its figures are meaningless.**\n"] if args.smoke else []),
            f"Measured first on {device_of_kernels()[1]}: {copy_rate:,.0f} GB/s copied (read and written). One round is about 20 ms;",
            f"{1 if args.smoke else args.rounds} rounds. Baseline: the reference, plain torch.\n",
            *([f"**Incomplete after {args.limit_s:.0f} s: {', '.join(late)}.**\n"] if late else []),
            *(goals(rows) if goals else []),
            markdown_table(
                ("kernel", "case", "work", *COLUMNS),
                [(row.kernel, row.case, row.passes, *cells(row)) for row in rows],
            ),
        ]
        text, data = write_result(
            theme,
            made,
            "\n".join(parts),
            {"copy_gb_per_s": copy_rate, "rows": [asdict(row) for row in rows]},
            folder=folder,
        )
    print(f"{text}\n{data}")
    return 0


def options(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}, or your own")
    parser.add_argument("--case", default="", help="only cases whose title contains this")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of every candidate (default 12)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        help="stop measuring after this many seconds; the page lists what is missing",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run one round into a temporary folder, to test the benchmark"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(measure("kernels", "Kernels", options(__doc__).parse_args()))
