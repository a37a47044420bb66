"""Measures rows/s of a deep, narrow, launch-bound network: plain, with the one-liners, under flatout.

The network has 24 residual blocks of width 128 at batch 64, Adam, clipping, and `.item()` in each step: about
a thousand kernels of a few microseconds each. The matrix products need 6 FLOPs a weight and row, forward and
backward.
"""

from __future__ import annotations

import argparse

from three_way import Theme, options, run

COLUMNS, WIDTH, BLOCKS = 32, 128, 24
WEIGHTS = COLUMNS * WIDTH + BLOCKS * 2 * WIDTH * WIDTH + WIDTH
SMOKE = ("--blocks", "3", "--width", "32", "--rows", "4000")


def theme(smoke: bool, args: argparse.Namespace) -> Theme:
    return Theme(
        name="small",
        title="A deep, narrow network, batch 64: plain, the one-liners, flatout",
        plain="small.py",
        one_liners="small_one_liners.py",
        unit="rows",
        per_sample=1,
        batch=64,
        flop_per_unit=6 * WEIGHTS,
        formula=f"{6 * WEIGHTS / 1e6:.2f} MFLOP a row (6 N, N = {WEIGHTS / 1e6:.3f} M)",
        arguments=SMOKE if smoke else (),
        one_liner_arguments=("--backend", "aot_eager") if smoke else (),
    )


if __name__ == "__main__":
    raise SystemExit(run(theme, options(__doc__).parse_args()))
