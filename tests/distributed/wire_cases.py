"""Records the communication between two ranks in OUT/<rank>.json, for test_wire.py.

python wire_cases.py OUT
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from known_bad_levers import KNOWN_BAD

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.bucket_queue import BucketQueue
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.distributed.powersgd import PowerSGD
from flatout.job.rank_environment import this_rank
from flatout.levers.comm_compression import LEVER as compression
from flatout.levers.gradient_buckets import LEVER as buckets
from flatout.schema.facts import Facts

PLACE = this_rank()
FACTS = Facts()
MEETINGS = iter(range(100))


class ExchangeRecorder(Listener):
    def __init__(self):
        self.events = []

    def backward_begin(self, losses):
        self.events.append("backward begins")

    def exchange_begin(self):
        self.events.append("exchange begins")

    def exchange_end(self, traffic):
        self.events.append(["exchange ends", traffic.sent_bytes])

    def backward_end(self):
        self.events.append("backward ends")


class Program:
    """A small network, 16 samples in one batch, and no update by default: each backward pass has the same
    gradient.
    """

    def __init__(self, dtype=torch.float32, width=24, rate=0.0):
        self.ledger, self.observed = Ledger(), ExchangeRecorder()
        self.context = TrainingContext(torch, self.observed, self.ledger)
        self.divided = DataParallelScript(
            torch,
            self.context,
            replace(PLACE, rendezvous=f"{PLACE.rendezvous}{next(MEETINGS)}"),
            SplitSettings(),
            self.ledger,
        )
        self.divided.install()
        self.context.install()  # as in a run: the hook of the backward pass also covers the exchange inside it
        self.ledger.set(self.context, "divided", self.divided)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
        ).to(dtype)
        draw = torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(
            torch.randn(16, 12, generator=draw, dtype=dtype), torch.randint(0, 3, (16,), generator=draw)
        )
        self.loader = torch.utils.data.DataLoader(data, batch_size=16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    def backward(self, scale=1.0, keep=False):
        """Run one pass; return the communication and the gradient as one vector."""
        for x, y in self.loader:
            if not keep:
                self.optimizer.zero_grad()
            (nn.functional.cross_entropy(self.model(x), y) * scale).backward()
            self.optimizer.step()
        traffic = self.divided.exchange.traffic
        return {
            "sent": traffic.sent_bytes,
            "collectives": traffic.collectives,
            "buckets": traffic.buckets,
            "early": traffic.left_early,
            "gradient": torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]).tolist(),
        }

    def passes(self, number, **options):
        return [self.backward(**options) for _ in range(number)]

    def leave(self):
        self.ledger.restore()


def ways():
    """One program whose encoding changes while it runs; rank 1 learns of each change one pass later."""
    program, found = Program(), {}
    found["offered"] = [
        compression.applies(FACTS, program.context).values,
        buckets.applies(FACTS, program.context).reason,
    ]
    found["plain"] = program.passes(3)
    for way in ("bf16", "fp16"):
        ledger = Ledger()
        late = []
        if PLACE.rank == 1:
            late = program.passes(1)
        undo = compression.apply(program.context, way, ledger)
        if PLACE.rank == 0:
            late = program.passes(1)
        found[f"{way} late"] = late[0]["sent"]
        program.backward()  # all use it now
        found[way] = program.passes(3)
        undo()
        program.backward()
    found["plain again"] = program.backward()
    found["wanted again"] = (
        program.divided.wanted == program.divided.terms and program.divided.terms.way.name == "plain"
    )
    bad = KNOWN_BAD["comm_compression"](program.context, "bf16", Ledger())
    found["bad"] = program.passes(2)[1]["gradient"]
    bad()
    found["events"] = program.observed.events[-8:-4]
    program.leave()
    return found


def extremes():
    """Gradients that float16 cannot hold:

    1e7 times as large, then suddenly another 1e5 times, and 1e-9 times as large.
    """
    program = Program()
    compression.apply(program.context, "fp16", program.ledger)
    found = {"plain": program.backward()["gradient"]}
    found["large"] = [*program.passes(2, scale=1e7), *program.passes(3, scale=1e12)]
    found["small"] = program.passes(3, scale=1e-9)
    program.leave()
    return found


def accumulation():
    """One pass with a gradient a thousand times as large, then four small ones added to it."""
    program = Program()
    compression.apply(program.context, "bf16", program.ledger)
    small = program.backward()["gradient"]
    large = program.backward(scale=1000.0)["gradient"]
    tensors = [p.grad for p in program.model.parameters()]
    summed = program.passes(4, keep=True)[-1]["gradient"]
    same = all(p.grad is held for p, held in zip(program.model.parameters(), tensors, strict=True))
    program.leave()
    return {"small": small, "large": large, "summed": summed, "same tensors": same}


def sizes():
    """Float64 and every bucket size, changed in one program."""
    program, found = Program(torch.float64, width=500), {}
    program.passes(3)
    answer = buckets.applies(FACTS, program.context)
    found["offered"] = [list(answer.values), answer.effect.value]
    for value in (25, 1, 0.001, "all"):
        undo = buckets.apply(program.context, value, Ledger())
        found[str(value)] = program.passes(2)[1]
        undo()
        program.backward()
    bad = KNOWN_BAD["gradient_buckets"](program.context, 0.001, Ledger())
    found["bad"] = program.passes(2)[1]["gradient"]
    bad()
    program.leave()
    return found


def courses():
    """Thirty steps of training under each encoding."""
    found = {}
    for way in (None, "bf16", "fp16", {"kind": "powersgd", "rank": 2, "after": 3}):
        program = Program(rate=0.3)
        if way is not None:
            compression.apply(program.context, way, program.ledger)
        losses = []
        for _ in range(30):
            for x, y in program.loader:
                loss = nn.functional.cross_entropy(program.model(x), y)
                program.optimizer.zero_grad()
                loss.backward()
                losses.append(loss.item())
                program.optimizer.step()
        kind = way if isinstance(way, str) else "plain" if way is None else "powersgd"
        found[kind] = {
            "losses": losses,
            "sent": program.divided.exchange.traffic.sent_bytes,
            "weights": torch.cat([p.detach().reshape(-1) for p in program.model.parameters()]).tolist(),
            "reports": [words for name, words in program.context.reports if name == "comm_compression"],
        }
        program.leave()
    return found


SHAPES = ((7, 5), (4,), (6, 2, 3))


def sent(wire, parameters, gradients):
    """Send through one bucket queue, as one bucket."""
    bucket_queue = BucketQueue(torch, wire)
    bucket_queue.leave(torch.cat([each.reshape(-1) for each in gradients]), parameters)
    return bucket_queue.arrive()[0].clone(), bucket_queue


def powersgd():
    ledger = Ledger()
    from flatout.distributed.rendezvous import join

    join(torch, replace(PLACE, rendezvous=f"{PLACE.rendezvous}{next(MEETINGS)}"), torch.device("cpu"), ledger)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    draw = torch.Generator().manual_seed(10 + PLACE.rank)
    steps = [[torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES] for _ in range(12)]

    def mean(tensor):
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
        return tensor / 2

    means = [mean(torch.cat([each.reshape(-1) for each in step])) for step in steps]
    full = PowerSGD(torch, 2, 99, after=0, saving=0.0)
    found = {
        "full rank": max(
            float((sent(full, parameters, step)[0] - right).abs().max())
            for step, right in zip(steps, means, strict=True)
        )
    }

    thin, taken = PowerSGD(torch, 2, 1, after=2, saving=0.0), []
    for step in steps:
        got, bucket_queue = sent(thin, parameters, step)
        taken.append(got)
    kept = mean(
        torch.cat(
            [
                thin.errors[p].reshape(-1)
                if p in thin.errors
                else torch.zeros(p.numel(), dtype=torch.float64)
                for p in parameters
            ]
        )
    )
    found["rank one, sum"] = float((sum(taken) + kept - sum(means)).abs().max())
    found["rank one, each"] = [
        float((got - right).norm() / right.norm()) for got, right in zip(taken, means, strict=True)
    ]
    found["rank one, numbers"] = bucket_queue.sent_bytes / 8
    found["rank one, collectives"] = bucket_queue.collectives
    found["same"] = float((2 * mean(taken[-1]) - 2 * taken[-1]).abs().max())
    found["torch"] = beside_torch(steps, parameters)
    ledger.restore()
    return found


def beside_torch(steps, parameters):
    """Compare with torch's hook for its DistributedDataParallel, given the same Q and errors after its first
    pass: the largest difference.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    class Bucket:
        def __init__(self, gradients):
            self.flat = torch.cat([each.reshape(-1) for each in gradients])

        def buffer(self):
            return self.flat

        def index(self):
            return 0

        def gradients(self):
            return [
                part.view(shape)
                for part, shape in zip(self.flat.split([p.numel() for p in parameters]), SHAPES, strict=True)
            ]

        def parameters(self):
            return parameters

        def is_last(self):
            return True

    state = powerSGD_hook.PowerSGDState(
        torch.distributed.group.WORLD, 2, start_powerSGD_iter=2, min_compression_rate=1.0
    )
    for step in steps[:3]:  # two passes uncompressed, then a compressed one
        powerSGD_hook.powerSGD_hook(state, Bucket(step)).wait()
    mine, apart = PowerSGD(torch, 2, 2, after=0, saving=0.0), []
    thin = [p for p in parameters if p.dim() > 1]
    queries = state.q_memory_dict[0]
    error = state.error_dict[0].split([p.numel() for p in parameters])
    begin = 0
    for p in thin:  # their Qs are stored one after another
        size = (p.numel() // p.shape[0]) * 2
        mine.queries[p] = queries[begin : begin + size].view(-1, 2).clone()
        begin += size
    for p, part in zip(parameters, error, strict=True):
        if p.dim() > 1:
            mine.errors[p] = part.view(p.shape[0], -1).clone()
    for step in steps[3:]:
        their = powerSGD_hook.powerSGD_hook(state, Bucket(step)).wait()
        apart.append(float((sent(mine, parameters, step)[0] - their).abs().max()))
    return max(apart)


def main():
    torch.set_num_threads(1)
    found = {case.__name__: case() for case in (ways, extremes, accumulation, sizes, courses, powersgd)}
    (Path(sys.argv[1]) / f"{PLACE.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
