"""What `flatout run --export` costs the training: trackers that answer, that are down, and that are slow.

One training on all cores runs under `flatout run --export TRACKER`. The process that sends the figures is
stopped (SIGSTOP) and continued in blocks: off, on, on, off. The cost is the mean step of the inner blocks minus
that of the outer two, so it contains all that the tracker's client computes. The A/A difference is that of the
outer two. The start of the client is not in the blocks; its processor time is a column of its own.

The row `none` has no tracker and stops nothing: it shows how far equal blocks are apart.

    python bench/trackers.py                     all trackers, about 30 minutes
    python bench/trackers.py --only jsonl,wandb
"""

from __future__ import annotations

import argparse
import array
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from overhead import interval, spell, verdict
from provenance import HERE, markdown_table, read_result, stamp, write_result

from flatout.probe.machine import look

THEME = "trackers"
PROGRAM = HERE / "programs" / "timed_steps.py"
EVERY = "1s"
START_S = 20.0  # until the client has started
BLOCK_S = 2.5
SETTLE_S = 0.3  # after a switch
GOAL_US, GOAL_SHARE = 20.0, 0.01
CASES = (
    "none",
    "jsonl",
    "tensorboard",
    "wandb (offline)",
    "mlflow",
    "prometheus",
    "mlflow (down)",
    "mlflow (slow)",
)


@contextmanager
def silent_server() -> Iterator[int]:
    """Yield the port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def take() -> None:
            while True:
                try:
                    kept.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def exported(case: str, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the options of `flatout run` for a case, and its environment."""
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    name = case.split()[0]
    target = ""
    if case == "mlflow (down)":
        target = f"=http://127.0.0.1:{free_port()}"
    elif case == "mlflow":
        target = f"={(folder / 'mlruns').as_uri()}"
    elif case == "prometheus":
        target = f"={free_port()}"
    if case == "mlflow (slow)":
        with silent_server() as port:
            yield ["--export", f"mlflow=http://127.0.0.1:{port}"], environment
        return
    yield ([] if name == "none" else ["--export", name + target]), environment


def followers(pid: int) -> list[psutil.Process]:
    """The processes that send the figures of a run, and their children."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "flatout.export.trackers" in words and str(pid) in words:
            found += [process, *process.children(recursive=True)]
    return found


def processor_s(processes: list[psutil.Process]) -> float:
    """Processor seconds of those processes that are still there."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Run one training with a tracker; return its blocks' mean steps in us, and the client's processor time."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with exported(case, folder) as (options, environment):
            total_s = START_S + rounds * 4 * BLOCK_S + 10
            words = [
                sys.executable,
                "-m",
                "flatout",
                "run",
                "--plan",
                "none",
                "--export-every",
                EVERY,
                *options,
            ]
            words += [sys.executable, str(PROGRAM), "--seconds", str(total_s), "--out", str(folder / "steps")]
            training = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            time.sleep(START_S)
            clients = followers(training.pid)
            started_s = processor_s(clients)
            blocks = []
            for _ in range(rounds):
                for on in (False, True, True, False):
                    send(clients, signal.SIGCONT if on else signal.SIGSTOP)
                    time.sleep(SETTLE_S)
                    start = time.monotonic_ns()
                    time.sleep(BLOCK_S - SETTLE_S)
                    blocks.append((start, time.monotonic_ns()))
            send(clients, signal.SIGCONT)
            used_s = processor_s(clients) - started_s
            _, said = training.communicate(timeout=300)
            if training.returncode:
                raise SystemExit(f"trackers: {case} failed:\n{said[-2000:]}")
            if case not in ("none", "jsonl") and not clients:
                raise SystemExit(f"trackers: no client of {case} was seen:\n{said[-2000:]}")
            ends = array.array("q")
            ends.frombytes((folder / "steps").read_bytes())
    steps = [_mean_step(ends, start, end) for start, end in blocks]
    return {
        "rounds": [steps[at : at + 4] for at in range(0, len(steps), 4)],
        "start_s": started_s,
        "used_share": used_s / (rounds * 4 * BLOCK_S),
        "clients": len(clients),
    }


def _mean_step(ends: array.array[int], start: int, end: int) -> float:
    """The mean step, in us, of those that ended in a block."""
    inside = [each for each in ends if start <= each <= end]
    return (inside[-1] - inside[0]) / (len(inside) - 1) / 1000


def page(cases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for case in CASES:
        found = cases.get(case)
        if not found:
            continue
        plain = mean((a + d) / 2 for one in found for a, _, _, d in one["rounds"])
        cost = interval([[(b + c - a - d) / 2 for a, b, c, d in one["rounds"]] for one in found])
        same = interval([[d - a for a, _, _, d in one["rounds"]] for one in found])
        rows.append(
            (
                case,
                f"{plain / 1000:.2f}",
                spell(cost, 1),
                spell(same, 1),
                f"{cost['median'] / plain:+.2%}",
                verdict(cost, same, max(GOAL_US, GOAL_SHARE * plain)),
                f"{mean(one['start_s'] for one in found):.1f}",
                f"{mean(one['used_share'] for one in found):.2%}",
                f"{len(found)} x {len(found[0]['rounds'])}",
            )
        )
    return "\n".join(
        (
            "# The cost of `flatout run --export`\n",
            f"A training on all cores; live figures each {EVERY}. Baseline: the same process while the tracker's client is stopped. "
            "95 % intervals, bootstrap over processes and rounds.\n",
            markdown_table(
                (
                    "tracker",
                    "plain step, ms",
                    "with the client, us a step",
                    "A/A, us a step",
                    "share of a step",
                    f"at most {GOAL_SHARE:.0%} or {GOAL_US:.0f} us",
                    "client's start, CPU s",
                    "client, share of a core",
                    "processes x rounds",
                ),
                rows,
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="the cases, separated by commas")
    parser.add_argument("--processes", type=int, default=2, help="trainings of each case (default 2)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of four blocks in each (default 8)")
    args = parser.parse_args()
    chosen = [case for case in CASES if case in args.only.split(",")]
    if not chosen:
        parser.error(f"--only accepts some of {', '.join(CASES)}")
    made = stamp(look())
    cases = dict(read_result(THEME, made).get("cases", {}))
    for case in chosen:
        cases[case] = []
        for at in range(args.processes):
            cases[case].append(measure(case, args.rounds))
            print(f"  {case}: {at + 1} of {args.processes}", file=sys.stderr, flush=True)
            write_result(THEME, made, page(cases), {"cases": cases})
    print(page(cases))


if __name__ == "__main__":
    main()
