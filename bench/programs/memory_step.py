"""One model with memory-saving methods switched on and off: bytes and times. Prints one JSON object.

    python memory_step.py '{"width": 256, "layers": 8, "heads": 8, "context": 128, "batch": 16, "rounds": 6,
    "steps": 1}'

``saved_bytes`` is what the forward pass leaves alive for the backward pass, ``peak_bytes`` the most above the
start of the step until its end; gradients exist before it. ``accumulation`` holds the most bytes that
autograd keeps at any moment of a step of the Loop in so many micro-batches. ``rounds`` of 0 measure bytes
alone.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT

from flatout import Loop
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers import TABLE
from flatout.measure.memory import allocations, bytes_at, running_totals

VOCABULARY = 100
LEVERS = {lever.name: lever for lever in TABLE}
POINTS = {
    "plain again": None,
    "blocks, half": ("recompute", {"blocks": 0.5}),
    "blocks": ("recompute", {"blocks": 1.0}),
}
PARTS = (1, 2, 4, 8)


class Bench:
    def __init__(self, size):
        torch.manual_seed(0)
        self.size = size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = GPT(VOCABULARY, size["context"], size["width"], size["heads"], size["layers"]).to(
            self.device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = [
            torch.randint(0, VOCABULARY, (size["batch"], size["context"]), device=self.device)
            for _ in range(2)
        ]
        self.context = TrainingContext(torch, Listener(), Ledger())
        self.context.register_objects([self.model], [self.optimizer], [])
        self.context.first_step_done(1)
        self.step()

    def forward(self):
        return self.model(*self.batch)[1]

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.forward().backward()
        self.optimizer.step()

    def switched(self, point):
        """Applies the method and runs it until all its choices are made; returns what removes it."""
        if point is None:
            return lambda: None
        name, value = point
        undo = LEVERS[name].apply(self.context, value, Ledger())
        for _ in range(2):
            self.step()
        return undo

    def bytes(self):
        """(saved, peak) of one step."""
        self.optimizer.zero_grad(set_to_none=False)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            loss = self.forward()
            saved = torch.cuda.memory_allocated() - start
            loss.backward()
            self.optimizer.step()
            torch.cuda.synchronize()
            return saved, torch.cuda.max_memory_allocated() - start
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as recorded:
            loss = self.forward()
            with torch.profiler.record_function("between"):
                pass
            loss.backward()
            self.optimizer.step()
        events = list(recorded.profiler.kineto_results.events())
        between = next(event.start_ns() for event in events if event.name() == "between")
        totals = running_totals(allocations(events, on_device=False), 0)
        return bytes_at(totals, between, 0), max(total for _, total in totals)

    def sync(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, step, steps):
        self.sync()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.sync()
        return 1000 * (time.perf_counter() - start) / steps

    def loop(self, parts):
        def batches():
            while True:
                yield tuple(self.batch)

        micro_batch = self.size["batch"] // parts
        return iter(
            Loop(
                self.model,
                self.optimizer,
                lambda model, batch: model(*batch)[1],
                batches(),
                micro_batch=micro_batch,
                reduction="mean",
            )
        )

    def kept(self, loop):
        """Returns the maximum bytes that autograd keeps during a step, without parameters and the batch."""
        known = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.batch)}
        live, seen = {}, {"now": 0, "most": 0}

        class Packed:
            def __init__(self, tensor):
                storage = tensor.untyped_storage()
                self.tensor, self.place = tensor.detach(), storage.data_ptr()
                if self.place in known:
                    self.place = None
                    return
                count, size = live.get(self.place, (0, storage.nbytes()))
                live[self.place] = count + 1, size
                seen["now"] += size if count == 0 else 0
                seen["most"] = max(seen["most"], seen["now"])

            def __del__(self):
                if self.place is None:
                    return
                count, size = live.pop(self.place)
                if count > 1:
                    live[self.place] = count - 1, size
                else:
                    seen["now"] -= size

        next(loop)
        with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
            next(loop)
        return seen["most"]


def main():
    size = json.loads(sys.argv[1])
    bench = Bench(size)
    found = {"bytes": {}, "accumulation": {}, "ms": {}}
    for name, point in {"plain": None, **POINTS}.items():
        undo = bench.switched(point)
        found["bytes"][name] = bench.bytes()
        undo()
    loops = {f"Loop, {parts}": bench.loop(parts) for parts in PARTS if size["batch"] % parts == 0}
    for name, loop in loops.items():
        found["accumulation"][name] = bench.kept(loop)
    names = ["plain", *POINTS, *loops]
    found["ms"] = {name: [] for name in names}
    for turn in range(size["rounds"]):
        for name in names if turn % 2 == 0 else names[::-1]:
            if name in loops:
                next(loops[name])
                found["ms"][name].append(bench.timed(lambda name=name: next(loops[name]), size["steps"]))
            else:
                undo = bench.switched(POINTS.get(name))
                bench.step()
                found["ms"][name].append(bench.timed(bench.step, size["steps"]))
                undo()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
