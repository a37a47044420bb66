"""Measures the cost of flatout's inactive hooks in one process, with flatout detached and attached.

One process avoids the process-to-process variation. It starts as `flatout run` starts a program. After the
warm-up, it runs rounds of four blocks of steps: off, on, on, off. Prints one JSON line: for each round the
median step of its blocks, in microseconds.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from step_loop import make, steps

from flatout.agent.heartbeat import StepCounters
from flatout.agent.training_context import TrainingContext

BLOCK_S = 0.01  # short, so that disturbances affect all four blocks equally
COLD_STEPS = 50  # a switch empties the caches of the interpreter
FEWEST_STEPS = 5


def switch(context, on, counted):
    if on and not context.ledger.entries():
        context.install()
        context.stop_observing()
        if counted:
            StepCounters().install(torch, context.ledger)
    elif not on:
        context.ledger.restore()
    if bool(context.ledger.entries()) != on:
        raise SystemExit("flatout is not where it should be")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument(
        "--counted", action="store_true", help="count steps as `flatout run` does for its record"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.randn(args.batch, args.width)
    model, optimizer = make(args.layers, args.width)
    length = statistics.median(steps(model, optimizer, data, 1.0))
    context = next(thing for thing in gc.get_objects() if isinstance(thing, TrainingContext))
    if not context.paused:
        raise SystemExit("flatout does not rest")
    count = max(FEWEST_STEPS, round(BLOCK_S / length))
    rounds, start = [], time.perf_counter()
    while time.perf_counter() - start < args.seconds or len(rounds) < 3:
        times = []
        for on in (False, True, True, False):
            switch(context, on, args.counted)
            steps(model, optimizer, data, fewest=COLD_STEPS)
            times.append(round(1e6 * statistics.median(steps(model, optimizer, data, fewest=count)), 2))
        rounds.append(times)
    print(json.dumps({"rounds": rounds, "steps_a_block": count}))


if __name__ == "__main__":
    main()
