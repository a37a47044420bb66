"""Measures the data loader by itself and in training: plain, under flatout, and with other libraries.

The images are in memory as bytes: 50,000 of 32 x 32 x 3 with RandomCrop, flip, ToTensor and Normalize, and
60,000 of 28 x 28 with ToTensor and Normalize. Batches have 128 images. Each set has a fresh process for each
side; the sides are interleaved, and the processes of the other sides, with their workers, are stopped
meanwhile. A ratio is the median over rounds and sets with a 95 % interval (bootstrap over both). For
flatout's sides, ``flatout run`` starts the same script with a plan.

By itself: batches a second with 0, 2 and 4 workers, under flatout and with other libraries. In training (a
small convolutional network): steps under the plan, compared with steps on one preloaded batch.

Goals: 10 times the batches a second of 0 and of 4 workers; 95 % of the steps with a preloaded batch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pairs import ComparisonSide, comparison, ratio_of, spell
from provenance import HERE, markdown_table, read_result, stamp, write_result
from run_environment import run_environment

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, compare
from flatout.probe.machine import look
from flatout.schema.enums import Origin
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan

ALONE, TRAINING = HERE / "programs" / "loader_alone.py", HERE / "programs" / "small_images.py"
SETS = ("cifar", "mnist")
KEPT = Choice("cached_prefix", {"mib": 512, "ahead": True}, Origin.USER)
BATCHED = Choice("batched_transforms", "all", Origin.USER)
PLANS = {
    "flatout, batched_transforms": Plan((BATCHED,)),
    "flatout, cached_prefix": Plan((KEPT,)),
    "flatout, both": Plan((KEPT, BATCHED)),
}
PEERS = {
    "torchdata, 2 threads": ("torchdata", 2),
    "SPDL, 2 threads": ("spdl", 2),
    "kornia, by hand": ("kornia", 0),
}
ROUND_S = 1.0  # reading time for each side and round
GOAL_TIMES, GOAL_SHARE = 10.0, 0.95


@dataclass
class Reader:
    """One side: a command, a plan, and the batches a second of each round, one list for each set."""

    name: str
    argv: list[str]
    plan: Plan | None = None
    rates: list[list[float]] = field(default_factory=list)
    failure: str = ""


@contextmanager
def started(reader: Reader, facts: Facts) -> Iterator[subprocess.Popen[str]]:
    environment = dict(os.environ)
    folder = None
    if reader.plan is not None:
        environment = run_environment(reader.plan, facts)
        folder = Path(environment["FLATOUT_JOB"]).parent
    process = subprocess.Popen(
        [sys.executable, *reader.argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def answered(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        assert process.stderr is not None
        text = process.stderr.read().strip().splitlines()
        raise RuntimeError(text[-1][:200] if text else "it ended")
    return line


def read(process: subprocess.Popen[str], count: int) -> float:
    """Returns the batches a second over ``count`` batches. The process and its workers run only meanwhile."""
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGCONT)
    process.stdin.write(f"{count}\n")
    process.stdin.flush()
    seconds_taken = float(answered(process))
    os.killpg(process.pid, signal.SIGSTOP)
    return count / seconds_taken


def one_set(readers: Sequence[Reader], at: int, rounds: int, facts: Facts) -> None:
    """Runs one set: fresh processes of all sides, interleaved, in an order that reverses each round."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        running: dict[str, tuple[Reader, subprocess.Popen[str], int]] = {}
        for reader in readers if at % 2 == 0 else list(reversed(readers)):
            process = stack.enter_context(started(reader, facts))
            try:
                answered(process)
                running[reader.name] = reader, process, max(8, int(read(process, 8) * ROUND_S))
                reader.rates.append([])
            except (RuntimeError, OSError) as error:
                reader.failure = str(error)
        for turn in range(rounds):
            order = list(running.values())
            for reader, process, count in order if turn % 2 == 0 else reversed(order):
                reader.rates[-1].append(read(process, count))


def times(reader: Reader, against: Reader) -> Any:
    """Returns the batches a second relative to another side."""
    pairs = [
        [Round(1 / a, 1 / b) for a, b in zip(theirs, ours, strict=True)]
        for theirs, ours in zip(against.rates, reader.rates, strict=True)
    ]
    return compare(pairs) if any(pairs) else None


def alone(which: str, sets: int, rounds: int, facts: Facts) -> dict[str, Any]:
    def side(name: str, kind: str, workers: int, plan: Plan | None = None) -> Reader:
        return Reader(name, [str(ALONE), "--set", which, "--kind", kind, "--workers", str(workers)], plan)

    readers = [
        *(side(f"{n} workers", "plain", n) for n in (0, 2, 4)),
        side("0 workers, repeated (A/A)", "plain", 0),
        *(side(name, "plain", 0, plan) for name, plan in PLANS.items()),
        *(side(name, kind, n) for name, (kind, n) in PEERS.items()),
    ]
    for at in range(sets):
        one_set([reader for reader in readers if not reader.failure], at, rounds, facts)
        print(f"    {which}: set {at + 1} of {sets}", file=sys.stderr, flush=True)
    by_name = {reader.name: reader for reader in readers}
    found = {}
    for reader in readers:
        rates = [rate for one in reader.rates for rate in one]
        ratios = (
            {f"times_{n}": times(reader, by_name[f"{n} workers"]) for n in (0, 4)}
            if not reader.failure
            else {}
        )
        found[reader.name] = {
            "failure": reader.failure,
            "batches_per_s": median(rates) if rates else None,
            "rates": reader.rates,
            **{key: ratio.to_json() if ratio else None for key, ratio in ratios.items()},
        }
    return found


def in_training(which: str, sets: int, rounds: int, facts: Facts) -> dict[str, Any]:
    def side(name: str, *more: str, plan: Plan | None = None) -> ComparisonSide:
        return ComparisonSide(
            name, parse_command(["python", str(TRAINING), "--set", which, *more]), plan or Plan()
        )

    floor, again = (
        side("one preloaded batch", "--same-batch"),
        side("one preloaded batch, repeated (A/A)", "--same-batch"),
    )
    sides = [
        floor,
        again,
        side("0 workers"),
        side("4 workers", "--workers", "4"),
        *(side(name, plan=plan) for name, plan in PLANS.items()),
    ]
    place = Path(tempfile.mkdtemp(prefix="data-"))
    try:
        comparison(
            sides,
            JobFolder(place).make(),
            facts,
            sets,
            rounds,
            seconds() + 1800,
            lambda at: print(f"    {which}: set {at}", file=sys.stderr, flush=True),
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    plain = sides[2]
    found = {}
    for one in sides:
        blocks = [ms for each in one.blocks_ms for ms in each]
        against_floor, against_plain = ratio_of(floor, one), ratio_of(plain, one)
        data = [record.phases.get("data", {}).get("median_ms") for record in one.records]
        found[one.name] = {
            "failure": one.failure,
            "step_ms": median(blocks) if blocks else None,
            "blocks_ms": one.blocks_ms,
            "data_ms": median([ms for ms in data if ms is not None])
            if any(ms is not None for ms in data)
            else None,
            "of_floor": against_floor.to_json() if against_floor else None,
            "times_plain": against_plain.to_json() if against_plain else None,
        }
    return found


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def page(found: dict[str, Any]) -> str:
    parts = ["# Training limited by the data loader\n", (__doc__ or "").split("\n\n", 1)[1]]
    for which, rows in found.get("alone", {}).items():
        table = [
            (
                name,
                number(row["batches_per_s"], 0),
                spell(row.get("times_0")),
                spell(row.get("times_4")),
                row["failure"],
            )
            for name, row in rows.items()
        ]
        parts += [
            f"\n## {which}: the loader by itself\n",
            markdown_table(("side", "batches/s", "times 0 workers", "times 4 workers", "remark"), table),
        ]
    for which, rows in found.get("training", {}).items():
        table = [
            (
                name,
                number(row["step_ms"], 2),
                number(row["data_ms"], 2),
                spell(row["of_floor"]),
                spell(row["times_plain"]),
                row["failure"],
            )
            for name, row in rows.items()
        ]
        parts += [
            f"\n## {which}: in training\n",
            markdown_table(
                (
                    "side",
                    "step, ms",
                    "waiting for data",
                    "speed relative to a preloaded batch",
                    "times 0 workers",
                    "remark",
                ),
                table,
            ),
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=3, help="sets of fresh processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("alone", "training"))
    parser.add_argument("--data", choices=SETS)
    wanted = parser.parse_args()
    facts = look()
    made = stamp(facts)
    found: dict[str, Any] = {
        key: value for key, value in read_result("data", made).items() if key in ("alone", "training")
    }
    for part, measure in (("alone", alone), ("training", in_training)):
        for which in (wanted.data,) if wanted.data else SETS:
            if wanted.only in (None, part):
                found.setdefault(part, {})[which] = measure(which, wanted.sets, wanted.rounds, facts)
                text, _ = write_result("data", made, page(found), found)
    print(text.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
