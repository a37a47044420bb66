"""Tests the ranks of a launch (`flatout run --procs N`) when the launcher is killed, and when a rank fails.

    kills      SIGKILL hits the launcher of 2 ranks, each with a loader worker, at a random moment: half of
               the kills while the ranks start, half while they train. Three seconds later, the bench counts
               the remaining processes
    failures   one random rank of 2 to 4 fails at a random moment while the others wait for it in a gloo
               exchange (or at the rendezvous): by an exception, by `sys.exit(3)`, or by SIGKILL. The others
               fail because of it. Is the first failed rank identified, with its own traceback and exit code?
               How long after its failure have all processes ended?

The bench finds the processes of a launch by a mark in their environment.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

PROGRAM = HERE / "programs" / "launcher.py"
ORPHANS_AFTER_S, GONE_GOAL_S = 3.0, 2.0
TIMEOUT_S = 120.0
STARTING_S = 5.0  # approximate start-up time: both ranks import torch
KINDS = {"exception": 1, "exit": 3, "killed": 137}
WEIGHTS = (70, 15, 15)
MARK = "FLATOUT_BENCH_LAUNCH"


def left(mark: str) -> list[str]:
    """Returns the command lines of the living processes of a launch."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
        except OSError:
            continue
    return found


def end(mark: str) -> None:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def start(mark: str, folder: str, procs: int, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "flatout.launch.local_launcher",
        "--procs",
        str(procs),
        "--",
        sys.executable,
        str(PROGRAM),
        *words,
    ]
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(seed: int) -> dict[str, Any]:
    draw, mark = random.Random(seed), uuid.uuid4().hex
    training = seed % 2 == 1
    with tempfile.TemporaryDirectory() as folder:
        launcher = start(mark, folder, 2, "train", folder)
        until = time.monotonic() + TIMEOUT_S
        while (
            training
            and len(list(Path(folder).glob("trains.*"))) < 2
            and time.monotonic() < until
            and launcher.poll() is None
        ):
            time.sleep(0.01)
        after_s = draw.uniform(0, 1.0) if training else draw.uniform(0, STARTING_S)
        time.sleep(after_s)
        ran = launcher.poll() is None
        there = left(mark)
        launcher.kill()
        launcher.communicate()
        time.sleep(ORPHANS_AFTER_S)
        orphans = left(mark)
        end(mark)
        folders = [path.name for path in Path(folder).glob("flatout-launch-*")]
    return {
        "seed": seed,
        "phase": "training" if training else "starting",
        "after_s": round(after_s, 3),
        "ran": ran,
        "processes": len(there),
        "orphans": orphans,
        "folders_left": len(folders),
    }


def failure(seed: int) -> dict[str, Any]:
    draw, mark = random.Random(1000 + seed), uuid.uuid4().hex
    procs = draw.choice((2, 2, 3, 4))
    victim, kind = draw.randrange(procs), draw.choices(list(KINDS), WEIGHTS)[0]
    moment = "early" if draw.random() < 0.1 else str(int(draw.random() ** 2 * 300))
    with tempfile.TemporaryDirectory() as folder:
        launcher = start(mark, folder, procs, "fail", str(victim), kind, moment, folder)
        try:
            _, said = launcher.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            _, said = launcher.communicate()
        while left(mark) and time.monotonic() < float(Path(folder, "failed_at").read_text()) + TIMEOUT_S:
            time.sleep(0.01)
        gone_s = time.monotonic() - float(Path(folder, "failed_at").read_text())
    named = re.search(r"^flatout: rank (\d+) \(\S+, process \d+\) failed first, .*$", said, re.MULTILINE)
    after = said[named.end() :] if named else ""
    own = f"ValueError: the bad sample of rank {victim}"
    words = kind != "exception" or (own in after if victim else own in said)
    stray = victim != 0 and "Connection closed" in after
    return {
        "seed": seed,
        "procs": procs,
        "victim": victim,
        "kind": kind,
        "moment": moment,
        "named": int(named[1]) if named else None,
        "code": launcher.returncode,
        "traceback": words and not stray,
        "gone_s": round(gone_s, 3),
        "right": bool(named)
        and int(named[1]) == victim
        and launcher.returncode == KINDS[kind]
        and words
        and not stray,
        "said": "" if named and int(named[1]) == victim else said[-2000:],
    }


def page(kills: list[Any], failures: list[Any]) -> str:
    orphaned, right = (
        [each for each in kills if each["orphans"]],
        [each for each in failures if each["right"]],
    )
    text = f"# The launcher of several ranks\n\n{(__doc__ or '').strip()}\n"
    if kills:
        text += (
            f"\n## Killed launchers\n\n{len(kills)} kills: **{len(orphaned)} with remaining processes** {ORPHANS_AFTER_S:.0f} s later "
            f"({sum(len(each['orphans']) for each in kills)} processes). Goal: none.\n\n"
        )
        rows = []
        for phase in ("starting", "training"):
            of = [each for each in kills if each["phase"] == phase]
            counts = Counter(each["processes"] for each in of)
            rows.append(
                (
                    phase,
                    len(of),
                    ", ".join(f"{count}: {counts[count]}" for count in sorted(counts)),
                    sum(bool(each["orphans"]) for each in of),
                    sum(each["folders_left"] for each in of),
                )
            )
        text += (
            markdown_table(
                (
                    "killed while",
                    "kills",
                    "processes at that moment: kills",
                    "with orphans",
                    "remaining folders",
                ),
                rows,
            )
            + "\n"
        )
    if failures:
        gone = sorted(each["gone_s"] for each in failures)
        late = sum(each > GONE_GOAL_S for each in gone)
        text += (
            f"\n## Failing ranks\n\n{len(failures)} failures: **{len(right)} identified correctly**, with their own output and exit code. Goal: all. "
            f"All processes had ended {gone[len(gone) // 2]:.2f} s (median) after the failure, {gone[int(len(gone) * 0.95)]:.2f} s (95 %), "
            f"{gone[-1]:.2f} s (maximum); {late} later than {GONE_GOAL_S:.0f} s.\n\n"
        )
        rows = [
            (
                kind,
                procs,
                len(of),
                sum(each["right"] for each in of),
                sum(each["moment"] == "early" for each in of),
                f"{sorted(each['gone_s'] for each in of)[len(of) // 2]:.2f}",
                f"{max(each['gone_s'] for each in of):.2f}",
            )
            for kind in KINDS
            for procs in (2, 3, 4)
            if (of := [each for each in failures if (each["kind"], each["procs"]) == (kind, procs)])
        ]
        text += (
            markdown_table(
                (
                    "fails by",
                    "ranks",
                    "n",
                    "identified correctly",
                    "before the rendezvous",
                    "ended after s (median)",
                    "maximum",
                ),
                rows,
            )
            + "\n"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=("kills", "failures"),
        help="run only one of the two; keep the other's records of this month",
    )
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument(
        "--fresh", action="store_true", help="discard the records of this month instead of completing them"
    )
    parser.add_argument("--at-once", type=int, default=3, help="launches that run at once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made = stamp()
    raw = {name: read_result("launcher", made, args.out).get(name, []) for name in ("kills", "failures")}
    text, paths = "", list[Path]()
    for name, one in (("kills", kill), ("failures", failure)):
        if args.only not in (None, name):
            continue
        raw[name] = [] if args.fresh else raw[name]
        todo = sorted(set(range(args.n)) - {each["seed"] for each in raw[name]})
        with ThreadPoolExecutor(args.at_once) as pool:
            for record in pool.map(one, todo):
                raw[name].append(record)
                if len(raw[name]) % 10 == 0 or len(raw[name]) == args.n:
                    text = page(raw["kills"], raw["failures"])
                    paths = [*write_result("launcher", made, text, raw, folder=args.out)]
    print(text)
    for each in [
        *(each for each in raw["kills"] if each["orphans"]),
        *(each for each in raw["failures"] if not each["right"]),
    ]:
        print(each)
    print(*[path.name for path in paths] or ["everything is measured already; add --fresh to measure again"])


if __name__ == "__main__":
    main()
