"""Measures the cost of checkpoints in one process under `flatout run --rescue`, with the hooks off and on.

One process avoids the process-to-process variation. It runs rounds of four blocks of steps: off, on, on, off,
without checkpoints. Then it trains with checkpoints at their intervals. Prints one JSON line: the median step
of each block, in microseconds of its thread's processor time, and the share of the time for checkpoints: the
waiting of the training plus the work of the writing thread.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from step_loop import make

from flatout.checkpoint.rescue import Rescue

SHORT_S = 0.02
NEVER = 10**12


class Switch:
    """Switches flatout between its normal state during a training and none at all."""

    def __init__(self, rescue):
        self.rescue, self.context = rescue, rescue.context
        self.roots = self.context.roots

    def __call__(self, on):
        context = self.context
        if on and not context.ledger.entries():
            context.install()
            context._remove_global_hooks()
            for root in self.roots:
                context._root_hooks[id(root)] = [
                    root.register_forward_pre_hook(context._root_begins, with_kwargs=True, prepend=True),
                    root.register_forward_hook(context._root_ends),
                ]
        elif not on:
            context.ledger.restore()
            for hooks in context._root_hooks.values():
                for hook in hooks:
                    hook.remove()
            context._root_hooks.clear()
        if bool(context.ledger.entries()) != on:
            raise SystemExit("flatout is not where it should be")


def steps(model, optimizer, data, fewest):
    """Returns the processor time of each step in seconds, which other processes affect little."""
    lengths, before = [], time.thread_time()
    while len(lengths) < fewest:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        now = time.thread_time()
        lengths.append(now - before)
        before = now
    return lengths


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each of the two")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.randn(32, args.width)
    model = make(args.layers, args.width)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length = statistics.median(steps(model, optimizer, data, 30))
    rescue = next(thing for thing in gc.get_objects() if isinstance(thing, Rescue))
    if not rescue.active or rescue.saver is None or rescue.context.paused:
        raise SystemExit("nothing is kept of this program")
    switch, saver = Switch(rescue), rescue.saver
    saver.wait()
    saver.every = NEVER
    count, found, start = max(5, round(SHORT_S / length)), [], time.perf_counter()
    while time.perf_counter() - start < args.seconds or len(found) < 3:
        times = []
        for on in (False, True, True, False):
            switch(on)
            steps(model, optimizer, data, 3)
            times.append(round(1e6 * statistics.median(steps(model, optimizer, data, count)), 2))
        found.append(times)
    switch(True)
    saver.every, cost = None, saver.cost
    before, start = (cost.saves, cost.waited_s + cost.worked_s), time.perf_counter()
    while time.perf_counter() - start < 2 * args.seconds:
        steps(model, optimizer, data, 3)
    saver.wait()
    wall_s = time.perf_counter() - start
    print(
        json.dumps(
            {
                "rounds": found,
                "saves": cost.saves - before[0],
                "share": (cost.waited_s + cost.worked_s - before[1]) / wall_s,
            }
        )
    )


if __name__ == "__main__":
    main()
