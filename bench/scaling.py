"""Compares the predictions of `flatout scale` with published trainings on many devices, and with local ranks.

    python bench/scaling.py           published runs (bench/published_runs.py); nothing is run
    python bench/scaling.py --here    small programs (bench/programs/ranks.py) on 2 and 4 processes of one
                                      thread each, gloo over the loopback

Local ranks: each round starts two fresh processes, then four, or the other way round, and interleaves blocks
of steps in them. A prediction knows the step time of one process while the others wait, and the times of
gloo's all-reduces of several sizes. It predicts a step under DistributedDataParallel.

    by cores      four processes on two cores have half a core each. Nothing else is known of the other
                  processes
    beside them   the step time while all processes train without communication (``no_sync``) is also
                  measured, and is the prediction's overhead

Measurements are left out, and counted, if other processes used more than a little of the machine. With
``--patience 0`` they stay, and the page says how much others used.

Goals: within 10 points of the published efficiency; within 15 % of a measured step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from provenance import HERE, markdown_table, read_result, stamp, write_result
from published_runs import RUNS, Run

from flatout.cli.scale import OVERHEAD
from flatout.measure.links import Fabric
from flatout.measure.scaling import Workload, predict
from flatout.measure.statistics import Round, compare
from flatout.probe.machine import look
from flatout.schema.records import Ratio
from flatout.schema.scale import Link, Timing

GOAL_POINTS, GOAL_STEP = 0.10, 0.15
MODELS = ("mlp", "gpt", "cnn")
WORLDS = (2, 4)
LAUNCH_S = 120.0
QUIET_CORES = 0.2  # that other processes may use during a block


def published_page() -> str:
    """Writes the section on published runs: each as published and as predicted."""
    rows, errors, baseline = [], [], []
    for run in RUNS:
        found = run.predicted(OVERHEAD)
        rows.append(
            (
                run.name,
                run.strategy,
                f"{run.devices} against {run.base}",
                f"{run.efficiency:.1%}",
                f"{found:.1%}",
                f"{100 * (found - run.efficiency):+.1f}",
                _remark(run),
                run.source,
            )
        )
        if run.counted:
            errors.append(abs(found - run.efficiency))
            baseline.append(abs(run.without_links(OVERHEAD) - run.efficiency))
    return "\n".join(
        [
            "## Published runs\n",
            markdown_table(
                ("run", "strategy", "devices", "published", "predicted", "points", "", "source"), rows
            ),
            f"\nGoal: within {100 * GOAL_POINTS:.0f} points. Predicted: {_summary(errors)}. The overhead alone, without links: {_summary(baseline)}.\n",
            "The largest errors are short steps of mixed precision: the time of one device does not show the cost of loading data and launching kernels.\n",
            "Sources, and the inputs of each prediction: `bench/published_runs.py`.",
        ]
    )


def _summary(errors: list[float]) -> str:
    good = sum(error <= GOAL_POINTS for error in errors)
    return f"{good} of {len(errors)} are within, the median error is {100 * median(errors):.1f} points, the largest {100 * max(errors):.1f}"


def _remark(run: Run) -> str:
    return run.note if run.counted else f"not counted: {run.note}"


class Launch:
    """Starts all processes of one world and returns the records of their first rank."""

    def __init__(self, model: str, world: int, turns: int, steps: int, timeout_s: float) -> None:
        with tempfile.TemporaryDirectory(prefix="ranks-") as place:
            out = Path(place) / "out.json"
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            ranks = [
                subprocess.Popen(
                    [
                        sys.executable,
                        str(HERE / "programs" / "ranks.py"),
                        model,
                        str(rank),
                        str(world),
                        f"{place}/store",
                        str(out),
                        "--turns",
                        str(turns),
                        "--steps",
                        str(steps),
                        "--patience",
                        str(timeout_s),
                    ],
                    env=environment,
                )
                for rank in range(world)
            ]
            try:
                codes = [rank.wait(timeout_s + LAUNCH_S) for rank in ranks]
            except subprocess.TimeoutExpired:
                raise SystemExit(
                    f"{model} on {world} processes did not end within {timeout_s + LAUNCH_S:.0f} s: the machine is too busy. "
                    "End other programs or raise --patience"
                ) from None
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise SystemExit(f"{model} on {world} processes ended with {codes}")
            self.metadata: dict[str, Any] = {"busy": not timeout_s, **json.loads(out.read_text())}


def quiet_turns(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        turn
        for turn in metadata["turns"]
        if metadata["busy"] or all(block["others"] <= QUIET_CORES for block in turn.values())
    ]


def timing_of(block: dict[str, Any]) -> Timing:
    """Returns the medians over the steps of a block, one for each phase."""
    return Timing(*(median(step[at] for step in block["ms"]) for at in range(3)))


def measured_ms(block: dict[str, Any]) -> float:
    return median(sum(step) for step in block["ms"])


def link_of(metadata: dict[str, Any], world: int) -> Link:
    """Returns latency (smallest message) and bandwidth (difference to the largest).

    Medians over the sweeps; over undisturbed ones if there are any.
    """
    sweeps = [
        each for each in metadata["sweeps"] if metadata["busy"] or each["others"] <= QUIET_CORES
    ] or metadata["sweeps"]
    times = {
        int(size): median(each["all_reduce_ms"][size] for each in sweeps)
        for size in sweeps[0]["all_reduce_ms"]
    }
    smallest, largest = min(times), max(times)
    share = 2 * (world - 1) / world
    bandwidth = 1e3 * share * (largest - smallest) / max(times[largest] - times[smallest], 1e-6)
    contention = min(1.0, max(0.0, median(each["contention"] for each in sweeps)))
    return Link(
        "loopback",
        bandwidth,
        1e3 * times[smallest] / (2 * (world - 1)),
        contention=contention,
        is_intra_node=True,
    )


def forecast(metadata: dict[str, Any], turn: dict[str, Any], world: int, cores: int, beside: bool) -> float:
    """Returns the milliseconds of a step."""
    timing = timing_of(turn["alone"])
    crowd = timing_of(turn["quiet"]).step_ms / timing.step_ms if beside else max(1.0, world / cores)
    shared = Timing(*(crowd * ms for ms in (timing.forward_ms, timing.backward_ms, timing.optimizer_ms)))
    sizes = tuple(float(size) for size in metadata["gradient_bytes"])
    return (
        predict(Workload(shared, sizes, sum(sizes)), Fabric(link_of(metadata, world)), "ddp", world).step_ms
        or 0.0
    )


def against(launches: list[dict[str, Any]], world: int, cores: int, beside: bool) -> Ratio | None:
    """Returns predicted over measured: a launch is a pair, a turn a round. None without undisturbed turns."""
    pairs = [
        [
            Round(forecast(metadata, turn, world, cores, beside), measured_ms(turn["sent"]))
            for turn in quiet_turns(metadata)
        ]
        for metadata in launches
    ]
    return compare(pairs) if any(pairs) else None


def here_page(programs: dict[str, list[dict[str, Any]]], cores: int) -> str:
    rows, links = [], []
    for model, entries in programs.items():
        for world in WORLDS:
            launches = [entry[str(world)] for entry in entries]
            turns = [turn for metadata in launches for turn in quiet_turns(metadata)]
            all_turns = sum(len(metadata["turns"]) for metadata in launches)
            ms = [
                f"{median(measured_ms(turn[kind]) for turn in turns):.1f} ms" if turns else "-"
                for kind in ("alone", "quiet", "sent")
            ]
            errors = [
                f"{ratio.median - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]" if ratio else "-"
                for ratio in (against(launches, world, cores, False), against(launches, world, cores, True))
            ]
            others = (
                f"{median(block['others'] for turn in turns for block in turn.values()):.1f}"
                if turns
                else "-"
            )
            rows.append(
                (
                    model,
                    world,
                    f"{sum(launches[0]['gradient_bytes']) / 1e6:.1f} MB",
                    *ms,
                    *errors,
                    f"{sum(bool(quiet_turns(metadata)) for metadata in launches)} of {len(launches)}",
                    f"{len(turns)} of {all_turns}",
                    others,
                )
            )
            found = [link_of(metadata, world) for metadata in launches]
            links.append(
                (
                    model,
                    world,
                    f"{median(link.bandwidth_bytes_per_s for link in found) / 1e9:.2f} GB/s",
                    f"{median(link.latency_us for link in found):.0f} us",
                    f"{median(link.contention for link in found):.2f}",
                )
            )
    header = (
        "program",
        "processes",
        "gradients",
        "one process",
        "all, no communication",
        "with DDP",
        "error, by cores",
        "error, beside them",
        "launches",
        "turns",
        "cores used by others",
    )
    return "\n".join(
        [
            f"## Ranks on this machine, {cores} cores\n",
            markdown_table(header, rows),
            f"\nThe error is the predicted step over the measured one, minus 1, with a 95 % interval. Goal: within {GOAL_STEP:.0%}. Four processes on two "
            "cores have half a core each; `by cores` knows nothing else of them. Launches and turns count if others used at most "
            f"{QUIET_CORES} cores, unless the check is off (`--patience 0`).\n",
            markdown_table(("program", "processes", "loopback bandwidth", "a hop", "contention"), links),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="also run ranks on this machine")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds that a launch may wait for an idle machine"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    asked = parser.parse_args()
    facts = look()
    made = stamp(facts)
    where = {"folder": asked.folder} if asked.folder else {}
    programs: dict[str, list[dict[str, Any]]] = read_result("scaling", made, **where).get("programs", {})
    text = publish(programs, facts.cores, made, where)
    for at in range(asked.rounds if asked.here else 0):
        for model in asked.models:
            worlds = WORLDS if at % 2 == 0 else WORLDS[::-1]
            metadata = {
                str(world): Launch(model, world, asked.turns, asked.steps, asked.timeout).metadata
                for world in worlds
            }
            programs.setdefault(model, []).append(metadata)
            text = publish(programs, facts.cores, made, where)
            calm = {world: len(quiet_turns(each)) for world, each in metadata.items()}
            print(
                f"    {model}: round {at + 1} of {asked.rounds}, undisturbed turns {calm}",
                file=sys.stderr,
                flush=True,
            )
    print(text)


def publish(
    programs: dict[str, list[dict[str, Any]]], cores: int, made: dict[str, Any], where: dict[str, Any]
) -> Path:
    """Writes the current results, so that an interrupted run keeps them; later runs of this month add."""
    parts = [
        "# Predicted steps on many devices, compared with published and measured ones\n",
        published_page(),
    ]
    not_run = "## Ranks on this machine\n\nNot run: `python bench/scaling.py --here`, on an idle machine."
    parts.append(here_page(programs, cores) if programs else not_run)
    return write_result("scaling", made, "\n\n".join(parts), {"programs": programs}, **where)[0]


if __name__ == "__main__":
    main()
