"""How near `flatout scale` comes: to training on many devices as others have published it, and to real ranks on this machine.

    python bench/scaling.py           published runs (bench/published_runs.py); nothing is run
    python bench/scaling.py --here    small programs (bench/programs/ranks.py) on 2 and 4 processes of one thread each, gloo over the loopback

Of the ranks here, each round starts two processes anew, then four, or the other way round, and blocks of steps take turns in them. What one process needs while
the others wait, and how long gloo's all-reduces of several sizes take, are what a prediction knows; it foretells a step under DistributedDataParallel.

    by cores      four processes on two cores have half a core each. Nothing else is known of neighbours
    beside them   what a step takes when all processes train and nothing is sent (``no_sync``) was measured too, and is the prediction's overhead

What was measured while others used more than a little of the machine is left out, and counted; with ``--patience 0`` it is not, and the page says how much
others used.

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
from flatout.measure.scaling import Work, predict
from flatout.measure.statistics import Round, compare
from flatout.plan.records import Ratio
from flatout.plan.scale import Link, Timing
from flatout.probe.machine import look

GOAL_POINTS, GOAL_STEP = 0.10, 0.15
MODELS = ("mlp", "gpt", "cnn")
WORLDS = (2, 4)
LAUNCH_S = 120.0
QUIET_CORES = 0.2  # that somebody else may use during a block


def published_page() -> str:
    """Each run, as published and as foretold."""
    rows, errors, baseline = [], [], []
    for run in RUNS:
        found = run.predicted(OVERHEAD)
        rows.append((run.name, run.strategy, f"{run.devices} against {run.base}", f"{run.efficiency:.1%}", f"{found:.1%}",
                     f"{100 * (found - run.efficiency):+.1f}", _remark(run), run.source))
        if run.counted:
            errors.append(abs(found - run.efficiency))
            baseline.append(abs(run.without_links(OVERHEAD) - run.efficiency))
    return "\n".join([
        "## Published runs\n", markdown_table(("run", "strategy", "devices", "published", "foretold", "points", "", "source"), rows),
        f"\nGoal: within {100 * GOAL_POINTS:.0f} points. Foretold: {_summary(errors)}. The overhead alone, without links: {_summary(baseline)}.\n",
        "What falls short are short steps of mixed precision: of what feeds them and launches them, the time of one device tells nothing.\n",
        "Sources, and what each prediction knows: `bench/published_runs.py`."])


def _summary(errors: list[float]) -> str:
    good = sum(error <= GOAL_POINTS for error in errors)
    return f"{good} of {len(errors)} are within, the median error is {100 * median(errors):.1f} points, the largest {100 * max(errors):.1f}"


def _remark(run: Run) -> str:
    return run.note if run.counted else f"not counted: {run.note}"


class Launch:
    """All processes of one world, and what their first rank wrote."""

    def __init__(self, model: str, world: int, turns: int, steps: int, patience_s: float) -> None:
        with tempfile.TemporaryDirectory(prefix="ranks-") as place:
            out = Path(place) / "out.json"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            ranks = [subprocess.Popen([sys.executable, str(HERE / "programs" / "ranks.py"), model, str(rank), str(world), f"{place}/store", str(out),
                                       "--turns", str(turns), "--steps", str(steps), "--patience", str(patience_s)], env=environment) for rank in range(world)]
            try:
                codes = [rank.wait(patience_s + LAUNCH_S) for rank in ranks]
            except subprocess.TimeoutExpired:
                raise SystemExit(f"{model} on {world} processes did not end in {patience_s + LAUNCH_S:.0f} s; this machine is too busy") from None
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise SystemExit(f"{model} on {world} processes ended with {codes}")
            self.told: dict[str, Any] = {"busy": not patience_s, **json.loads(out.read_text())}


def quiet_turns(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn for turn in told["turns"] if told["busy"] or all(block["others"] <= QUIET_CORES for block in turn.values())]


def timing_of(block: dict[str, Any]) -> Timing:
    """Medians over the steps of a block, one phase each."""
    return Timing(*(median(step[at] for step in block["ms"]) for at in range(3)))


def measured_ms(block: dict[str, Any]) -> float:
    return median(sum(step) for step in block["ms"])


def link_of(told: dict[str, Any], world: int) -> Link:
    """Latency from the smallest message, bandwidth from the difference to the largest; medians over the sweeps, calm ones where there are any."""
    sweeps = [each for each in told["sweeps"] if told["busy"] or each["others"] <= QUIET_CORES] or told["sweeps"]
    times = {int(size): median(each["all_reduce_ms"][size] for each in sweeps) for size in sweeps[0]["all_reduce_ms"]}
    smallest, largest = min(times), max(times)
    share = 2 * (world - 1) / world
    bandwidth = 1e3 * share * (largest - smallest) / max(times[largest] - times[smallest], 1e-6)
    contention = min(1.0, max(0.0, median(each["contention"] for each in sweeps)))
    return Link("loopback", bandwidth, 1e3 * times[smallest] / (2 * (world - 1)), contention=contention, inside=True)


def foretold(told: dict[str, Any], turn: dict[str, Any], world: int, cores: int, beside: bool) -> float:
    """Milliseconds of a step."""
    timing = timing_of(turn["alone"])
    crowd = timing_of(turn["quiet"]).step_ms / timing.step_ms if beside else max(1.0, world / cores)
    shared = Timing(*(crowd * ms for ms in (timing.forward_ms, timing.backward_ms, timing.optimizer_ms)))
    sizes = tuple(float(size) for size in told["gradient_bytes"])
    return predict(Work(shared, sizes, sum(sizes)), Fabric(link_of(told, world)), "ddp", world).step_ms or 0.0


def against(launches: list[dict[str, Any]], world: int, cores: int, beside: bool) -> Ratio | None:
    """Foretold over measured; a pair is a launch of processes, a round of it a turn. None where no turn was quiet."""
    pairs = [[Round(foretold(told, turn, world, cores, beside), measured_ms(turn["sent"])) for turn in quiet_turns(told)] for told in launches]
    return compare(pairs) if any(pairs) else None


def here_page(programs: dict[str, list[dict[str, Any]]], cores: int) -> str:
    rows, links = [], []
    for model, entries in programs.items():
        for world in WORLDS:
            launches = [entry[str(world)] for entry in entries]
            turns = [turn for told in launches for turn in quiet_turns(told)]
            all_turns = sum(len(told["turns"]) for told in launches)
            ms = [f"{median(measured_ms(turn[kind]) for turn in turns):.1f} ms" if turns else "-" for kind in ("alone", "quiet", "sent")]
            errors = [f"{ratio.median - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]" if ratio else "-"
                      for ratio in (against(launches, world, cores, False), against(launches, world, cores, True))]
            others = f"{median(block['others'] for turn in turns for block in turn.values()):.1f}" if turns else "-"
            rows.append((model, world, f"{sum(launches[0]['gradient_bytes']) / 1e6:.1f} MB", *ms, *errors,
                         f"{sum(bool(quiet_turns(told)) for told in launches)} of {len(launches)}", f"{len(turns)} of {all_turns}", others))
            found = [link_of(told, world) for told in launches]
            links.append((model, world, f"{median(link.bandwidth_bytes_per_s for link in found) / 1e9:.2f} GB/s",
                          f"{median(link.latency_us for link in found):.0f} us", f"{median(link.contention for link in found):.2f}"))
    header = ("program", "processes", "gradients", "one alone", "all, nothing sent", "with DDP", "error, by cores", "error, beside them", "launches", "turns",
              "cores that others used")
    return "\n".join([
        f"## Ranks on this machine, {cores} cores\n", markdown_table(header, rows),
        f"\nThe error is the foretold step over the measured one, minus 1, with an interval of 95 %. Goal: within {GOAL_STEP:.0%}. Four processes on two "
        "cores have half a core each: by cores, that is all that is known of them. Launches and turns are those in which others used at most "
        f"{QUIET_CORES} cores, unless nobody waited for that (`--patience 0`).\n",
        markdown_table(("program", "processes", "loopback bandwidth", "a hop", "contention"), links)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="also run ranks on this machine")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a launch may wait for a calm machine")
    parser.add_argument("--folder", type=Path, default=None, help="where to write in place of bench/results")
    asked = parser.parse_args()
    facts = look()
    made = stamp(facts)
    where = {"folder": asked.folder} if asked.folder else {}
    programs: dict[str, list[dict[str, Any]]] = read_result("scaling", made, **where).get("programs", {})
    text = publish(programs, facts.cores, made, where)
    for at in range(asked.rounds if asked.here else 0):
        for model in asked.models:
            worlds = WORLDS if at % 2 == 0 else WORLDS[::-1]
            told = {str(world): Launch(model, world, asked.turns, asked.steps, asked.patience).told for world in worlds}
            programs.setdefault(model, []).append(told)
            text = publish(programs, facts.cores, made, where)
            calm = {world: len(quiet_turns(each)) for world, each in told.items()}
            print(f"    {model}: round {at + 1} of {asked.rounds}, calm turns {calm}", file=sys.stderr, flush=True)
    print(text)


def publish(programs: dict[str, list[dict[str, Any]]], cores: int, made: dict[str, Any], where: dict[str, Any]) -> Path:
    """Whatever there is by now, so that a call that is cut short loses nothing; the next one of this month adds to it."""
    parts = ["# Steps on many devices: foretold beside published and measured ones\n", published_page()]
    not_run = "## Ranks on this machine\n\nNot run: `python bench/scaling.py --here`, on a machine that nobody else uses."
    parts.append(here_page(programs, cores) if programs else not_run)
    return write_result("scaling", made, "\n\n".join(parts), {"programs": programs}, **where)[0]


if __name__ == "__main__":
    main()
