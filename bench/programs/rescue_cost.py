"""One process under `flatout run --rescue` in which what hears its steps is taken off and put on again: what keeping costs, without the luck of two processes.

Rounds of four blocks of steps: off, on, on, off. Short blocks, in which no save is made, show what the hooks cost; long ones with saves at their intervals show
the whole. Prints one JSON line: the mean step of each block, in microseconds.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from step_loop import make, steps

from flatout.engine.rescue import Rescue

SHORT_S = 0.02
NEVER = 10**12


class Switch:
    """Flatout as it is while a script trains, or nothing of it."""

    def __init__(self, rescue):
        self.rescue, self.scene = rescue, rescue.scene
        self.roots = self.scene.roots

    def __call__(self, on):
        scene = self.scene
        if on and not scene.ledger.entries():
            scene.install()
            scene._stop_looking()
            for root in self.roots:
                scene._root_hooks[id(root)] = [root.register_forward_pre_hook(scene._root_begins, with_kwargs=True, prepend=True),
                                               root.register_forward_hook(scene._root_ends)]
        elif not on:
            scene.ledger.restore()
            for hooks in scene._root_hooks.values():
                for hook in hooks:
                    hook.remove()
            scene._root_hooks.clear()
        if bool(scene.ledger.entries()) != on:
            raise SystemExit("flatout is not where it should be")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each of the two")
    args = parser.parse_args()
    data = torch.randn(32, args.width)
    model, optimizer = make(args.layers, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length = statistics.median(steps(model, optimizer, data, 1.0))
    rescue = next(thing for thing in gc.get_objects() if isinstance(thing, Rescue))
    if not rescue.active or rescue.saver is None or rescue.scene.asleep:
        raise SystemExit("nothing is kept of this program")
    switch, saver = Switch(rescue), rescue.saver
    saver.wait()

    def rounds(block_s, seconds, average):
        found, start = [], time.perf_counter()
        count = max(5, round(block_s / length))
        while time.perf_counter() - start < seconds or len(found) < 2:
            times = []
            for on in (False, True, True, False):
                switch(on)
                steps(model, optimizer, data, fewest=3)
                times.append(1e6 * average(steps(model, optimizer, data, fewest=count)))
            found.append([round(each, 2) for each in times])
        return found

    saver.every = NEVER
    short = rounds(SHORT_S, args.seconds, statistics.median)
    saver.every, before = None, saver.cost.saves
    long = rounds(max(1.0, 20 * length), 2 * args.seconds, statistics.fmean)
    switch(True)
    print(json.dumps({"short": short, "long": long, "saves": saver.cost.saves - before, "waited_s": saver.cost.waited_s, "worked_s": saver.cost.worked_s}))


if __name__ == "__main__":
    main()
