"""Compares the learning curves of a CIFAR-10 script with per-sample transforms and under flatout's data path.

A small convolutional network trains on the real CIFAR-10 for one epoch of 390 steps (``python bench/curves.py
FOLDER``, where FOLDER holds ``cifar-10-batches-py`` for torchvision). Each of three seeds trains twice, in
separate processes, and the losses of every step are compared bit by bit.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from data import BATCHED, KEPT, TRAINING
from pairs import enter
from provenance import markdown_table, stamp, write_result

from flatout.job.folder import JobFolder, write_atomically
from flatout.launch.command import parse_command
from flatout.probe.machine import look
from flatout.schema.plan import Plan
from flatout.tune.interleaver import Interleaver

STEPS, SEEDS = 390, (0, 1, 2)
SIDES = {"plain": Plan(), "lowered": Plan((KEPT, BATCHED))}
WIDTH, HEIGHT, MARGIN, SMOOTHED = 760, 320, 44, 10
COLOURS = ("#2a6fdb", "#d1495b", "#3a9a5c")


def losses(root: str, plan: Plan, seed: int, job: JobFolder, facts: Any) -> list[float]:
    """Returns the loss of every step, to the last bit."""
    interleaver = Interleaver(parse_command(["python", str(TRAINING), "--root", root]), job, facts)
    try:
        trial = enter(interleaver, plan, seed).trial
        while trial.ticks_done < STEPS:
            interleaver.run(trial, min(50, STEPS - trial.ticks_done))
        record = trial.finish()
    finally:
        interleaver.close()
    return [float.fromhex(loss) for loss in record.losses[:STEPS]]


def smooth(curve: list[float]) -> list[float]:
    """Returns the means of ten adjacent losses."""
    return [
        sum(curve[at : at + SMOOTHED]) / len(curve[at : at + SMOOTHED])
        for at in range(0, len(curve), SMOOTHED)
    ]


def drawn(found: dict[str, list[list[float]]]) -> str:
    """Returns an SVG: plain curves as wide pale lines, the others as thin dark ones on top."""
    every = [value for curves in found.values() for curve in curves for value in smooth(curve)]
    low, high = min(every), max(every)

    def line(curve: list[float], colour: str, style: str) -> str:
        points = smooth(curve)
        across, down = (WIDTH - 2 * MARGIN) / (len(points) - 1), (HEIGHT - 2 * MARGIN) / (high - low)
        places = " ".join(
            f"{MARGIN + at * across:.1f},{HEIGHT - MARGIN - (v - low) * down:.1f}"
            for at, v in enumerate(points)
        )
        return f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>'

    wide, thin = 'stroke-width="7" stroke-opacity="0.3"', 'stroke-width="1.5"'
    lines = [line(c, COLOURS[at], wide) for at, c in enumerate(found["plain"])] + [
        line(c, COLOURS[at], thin) for at, c in enumerate(found["lowered"])
    ]
    words = [
        f'<text x="{MARGIN}" y="20">Training loss of CIFAR-10, three seeds: plain (wide), lowered (thin)</text>',
        *(
            f'<text x="6" y="{y}">{value:.2f}</text>'
            for y, value in ((MARGIN + 4, high), (HEIGHT - MARGIN + 4, low))
        ),
        f'<text x="{MARGIN}" y="{HEIGHT - 14}">step 1</text>',
        f'<text x="{WIDTH - MARGIN - 50}" y="{HEIGHT - 14}">step {STEPS}</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#333">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(lines)}{"".join(words)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="folder that holds cifar-10-batches-py")
    root = str(Path(parser.parse_args().root).resolve())
    facts = look()
    made, place = stamp(facts), Path(tempfile.mkdtemp(prefix="curves-"))
    found: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    try:
        for seed in SEEDS:
            for name, plan in SIDES.items():
                found[name].append(
                    losses(root, plan, seed, JobFolder(place / f"{name}-{seed}").make(), facts)
                )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    rows = []
    for seed, plain, lowered in zip(SEEDS, found["plain"], found["lowered"], strict=True):
        same = sum(a == b for a, b in zip(plain, lowered, strict=False))
        rows.append(
            (
                seed,
                f"{smooth(plain)[-1]:.4f}",
                f"{smooth(lowered)[-1]:.4f}",
                f"{same} of {max(len(plain), len(lowered))}",
            )
        )
    chart = f"curves_{made['slug']}_{made['date'][:7].replace('-', '')}.svg"
    table = markdown_table(("seed", "last ten losses, plain", "lowered", "losses equal bit for bit"), rows)
    page = "\n".join(
        [
            "# Learning curves, plain and lowered\n",
            (__doc__ or "").split("\n\n", 1)[1],
            table,
            f"\n![Learning curves]({chart})",
        ]
    )
    text, _ = write_result("curves", made, page, {"losses": found})
    write_atomically(text.with_suffix(".svg"), drawn(found))
    print(page)


if __name__ == "__main__":
    main()
