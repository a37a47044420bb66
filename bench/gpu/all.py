"""Runs all benchmarks that need a GPU: `python bench/gpu/all.py --minutes 12`.

First the rows that check correctness, side by side on the card, then the timed rows, each alone. Each row is a process with its own time limit. Its output and its state are on disk when it ends, in --folder.
If a row fails, it reports why, and the others still run. A restart runs the remaining rows. Each benchmark
writes its results to bench/results, or to --out.

    python bench/gpu/all.py --list            print the rows and their limits
    python bench/gpu/all.py --minutes 12      run the rows that fit into twelve minutes; the next start
                                              continues
    python bench/gpu/all.py --only tutorial   run some of them again
    python bench/gpu/all.py --rehearse        run all at a small size on the stand-in for a GPU
                                              (bench/gpu/stand_in)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DONE, FAILED, LATE = "done", "failed", "cut off"
GRACE_S = 10.0
SLOWER = 3  # time factor of a rehearsal, because other programs may use the machine
CORES_EACH = 2  # of a row that runs beside others
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Row:
    """A benchmark with its limit. ``small``: arguments for a short rehearsal.

    ``beside``: it runs at once with the other such rows. ``continues``: it gets the minutes that are left, at least
    ``limit_s``, and a file for its state. ``compiles``: it has compiled kernels, which the stand-in for a GPU
    cannot run.
    """

    name: str
    limit_s: int
    script: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ("--smoke",)
    what: str = ""
    compiles: bool = False
    beside: bool = False
    continues: bool = False


ROWS = (
    Row(
        "runs",
        200,
        "runs.py",
        what="basic operation: programs with and without flatout, their levers, a profile",
        beside=True,
    ),
    Row(
        "again",
        240,
        "again.py",
        ("--kills", "2"),
        what="exact resume of plain scripts to their end",
        beside=True,
    ),
    Row(
        "trust",
        240,
        "trust.py",
        ("--kills", "2", "--seconds", "40"),
        what="checkpoints: killed and resumed",
        beside=True,
    ),
    Row("ranks", 200, "ranks.py", what="ranks that share the GPU", beside=True),
    Row(
        "speed",
        240,
        "speed.py",
        what="six programs: plain, one-liners, tuned by flatout, all levers",
        continues=True,
    ),
    Row(
        "kernels",
        80,
        "kernels.py",
        ("--limit-s", "70"),
        ("--smoke", "--kernels", "layer_norm", "--case", "4,096 rows of 1,024"),
        what="the kernels compared with torch's own",
        compiles=True,
    ),
    Row(
        "diagnosis",
        140,
        "diagnosis.py",
        ("--budget", "30s"),
        ("--smoke", "--budget", "6s"),
        what="profiles compared with direct measurements",
    ),
    Row("memory", 130, "memory.py", ("--limit-s", "105"), what="out of memory, micro-batches, recomputation"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their limits, then exit")
    parser.add_argument(
        "--minutes", type=float, default=None, help="start only rows that fit into this many minutes"
    )
    parser.add_argument(
        "--only", default=None, help="run only these rows, separated by commas, even if they are done"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run at a small size on the stand-in for a GPU"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="states and outputs of the rows (default .flatout/gpu)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    parser.add_argument(
        "--archive",
        type=Path,
        default=None,
        help="after each row, write folder and results into this .tar.gz",
    )
    args = parser.parse_args()
    if args.list:
        for row in ROWS:
            print(f"{row.name:10} {row.limit_s:4d} s  {row.what}")
        print(f"{'total':10} {sum(row.limit_s for row in ROWS):4d} s")
        return 0
    rows = ROWS if args.only is None else tuple(row for row in ROWS if row.name in args.only.split(","))
    if args.only is not None and len(rows) != len(set(args.only.split(","))):
        parser.error(f"unknown row; choose from {', '.join(row.name for row in ROWS)}")
    folder = args.folder or ROOT / ".flatout" / ("gpu-rehearsal" if args.rehearse else "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    out = args.out or (folder / "results" if args.rehearse else None)
    end = time.monotonic() + 60 * args.minutes if args.minutes is not None else None
    todo, left_out = [], []
    for row in rows:
        known = state_of(folder, row)
        if known.get("state") == DONE and args.only is None:
            print(f"{row.name}: done already, {known['seconds']} s", flush=True)
        elif end is not None and time.monotonic() + row.limit_s > end:
            left_out.append(row.name)
        else:
            todo.append(row)
    beside, alone = [row for row in todo if row.beside], [row for row in todo if not row.beside]
    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_EACH)
    with ThreadPoolExecutor(at_once) as pool:
        for row, state in zip(
            beside, pool.map(lambda row: run(row, folder, out, args.rehearse), beside), strict=True
        ):
            report(row, state, args.archive, folder, out)
    for row in alone:
        left_s = row.limit_s if end is None else end - time.monotonic()
        if left_s < row.limit_s:
            left_out.append(row.name)
            continue
        report(row, run(row, folder, out, args.rehearse, left_s), args.archive, folder, out)
    if left_out:
        print(f"no time for {', '.join(left_out)}: run the same command again", flush=True)
    return 1 if left_out or any(state_of(folder, row).get("state") != DONE for row in rows) else 0


def report(row: Row, state: dict, target: Path | None, folder: Path, out: Path | None) -> None:
    why = f": {state['why']}" if state["why"] else ""
    print(f"{row.name}: {state['state']}, {state['seconds']} s{why}", flush=True)
    if target:
        archive(target, folder, out or ROOT / "bench" / "results")


def state_of(folder: Path, row: Row) -> dict:
    try:
        return dict(json.loads((folder / f"{row.name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def run(row: Row, folder: Path, out: Path | None, rehearse: bool, left_s: float = 0.0) -> dict:
    """Runs a row and records its outcome. Its output goes to NAME.log, which grows while it runs."""
    command = [sys.executable, "-u", str(HERE / row.script), *(row.small if rehearse else row.arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if rehearse and not row.compiles:
        from stand_in import environment as with_card

        environment = with_card(environment, cards=1, mib=4096)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        command += ["--out", str(out)]
    limit_s = row.limit_s * (SLOWER if rehearse else 1)
    if row.continues:
        limit_s = max(limit_s, left_s)
        command += ["--minutes", f"{limit_s / 60:.2f}", "--state", str(folder / f"{row.name}-sides.json")]
    log, start = folder / f"{row.name}.log", time.monotonic()
    state, why = DONE, ""
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with_parent,
        )
        try:
            if child.wait(limit_s):
                state, why = FAILED, last_line(log) or f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            state, why = LATE, f"it took longer than {limit_s} s"
        finally:
            stop(child)
    found = {"state": state, "why": why, "seconds": round(time.monotonic() - start), "command": command}
    (folder / f"{row.name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def ends_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop(child: subprocess.Popen) -> None:
    """Ends the row's whole process group: first SIGTERM, then SIGKILL."""
    for number, timeout in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            continue


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def archive(target: Path, *folders: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as packed:
        for folder in folders:
            packed.add(folder, arcname=folder.name)


if __name__ == "__main__":
    sys.exit(main())
