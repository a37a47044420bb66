"""Measures the cost of the journal in one process under `flatout run --resume`, with recording off and on.

One process avoids the process-to-process variation. As `rescue_cost.py`, with batches from a DataLoader and a
loss that each step reads, interleaved for each count in --reads. Prints one JSON line. For each count: the
median step of each block in microseconds of its thread's processor time (all of flatout off, on, on, off),
and the entries and bytes of the journal a step.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from rescue_cost import NEVER, SHORT_S, Switch
from step_loop import make
from torch.utils.data import DataLoader, TensorDataset

from flatout.checkpoint.rescue import Rescue
from flatout.checkpoint.resume.session import ExactSession


class Recording(Switch):
    def __init__(self, rescue, again):
        super().__init__(rescue)
        self.again = again

    def __call__(self, on):
        off = not self.context.ledger.entries()
        super().__call__(on)
        if on and off:
            self.again.observe()
            self.again.install()


def steps(model, optimizer, loader, fewest, reads):
    lengths, before = [], time.thread_time()
    while len(lengths) < fewest:
        for (data,) in loader:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            for _ in range(reads):
                loss.item()
            now = time.thread_time()
            lengths.append(now - before)
            before = now
            if len(lengths) >= fewest:
                break
    return lengths


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--reads", type=int, nargs="+", default=[1], help="values that are read in each step (default 1)"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.randn(32 * 64, args.width)), batch_size=32, shuffle=True)
    model = make(args.layers, args.width)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length = statistics.median(steps(model, optimizer, loader, 30, args.reads[0]))
    rescue, again = (
        next(thing for thing in gc.get_objects() if isinstance(thing, kind))
        for kind in (Rescue, ExactSession)
    )
    if not rescue.active or rescue.saver is None or again.value_log.journal is None:
        raise SystemExit("nothing is recorded of this program")
    switch = Recording(rescue, again)
    rescue.saver.wait()
    rescue.saver.every = NEVER
    value_log, count, start = again.value_log, max(5, round(SHORT_S / length)), time.perf_counter()
    metadata = {
        reads: {"reads": reads, "rounds": [], "entries": 0, "bytes": 0, "steps": 0} for reads in args.reads
    }
    while time.perf_counter() - start < args.seconds or any(
        len(each["rounds"]) < 3 for each in metadata.values()
    ):
        for reads, each in metadata.items():
            times = []
            value_log.write()
            before = value_log.journal.position.bytes
            for on in (False, True, True, False):
                switch(on)
                entries, ended = len(value_log.values), value_log.steps
                steps(model, optimizer, loader, 3, reads)
                times.append(round(1e6 * statistics.median(steps(model, optimizer, loader, count, reads)), 2))
                each["steps"] += value_log.steps - ended
                each["entries"] += max(0, len(value_log.values) - entries)
            each["rounds"].append(times)
            each["bytes"] += value_log.write().bytes - before
    print(json.dumps(list(metadata.values())))


if __name__ == "__main__":
    main()
