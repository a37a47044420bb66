"""Two ranks of flatout: what they send.

    python exchange_cases.py OUT

Writes OUT/<rank>.json for test_exchange.py.
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
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.job.rank_environment import this_rank
from flatout.levers.comm_compression import LEVER as compression
from flatout.levers.gradient_buckets import LEVER as buckets
from flatout.schema.facts import Facts

RANK = this_rank()
RENDEZVOUS = iter(range(100))
BATCH = 12


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


def network(dtype=torch.float64, width=8, momentum=0.0, two=False, rate=0.2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    groups = [list(layer.parameters()) for layer in model[::2]] if two else [list(model.parameters())]
    return model, [torch.optim.SGD(group, lr=rate, momentum=momentum) for group in groups]


def data(length, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(length, 6, generator=draw, dtype=dtype), torch.randint(0, 3, (length,), generator=draw)


def vector(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Program:
    """``weights`` holds those after each step."""

    def __init__(self, length=36, dtype=torch.float64, **options):
        self.ledger, self.observed = Ledger(), ExchangeRecorder()
        self.context = TrainingContext(torch, self.observed, self.ledger)
        here = replace(RANK, rendezvous=f"{RANK.rendezvous}{next(RENDEZVOUS)}")
        self.divided = DataParallelScript(torch, self.context, here, SplitSettings(), self.ledger)
        self.divided.install()
        self.ledger.set(self.context, "data_parallel", self.divided)
        self.context.install()
        self.model, self.optimizers = network(dtype, **options)
        dataset = torch.utils.data.TensorDataset(*data(length, dtype))
        self.loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH)
        self.weights, self.losses = [], []

    def train(self, epochs=1, until=lambda: False, scale=1.0):
        for _ in range(epochs):
            for x, y in self.loader:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y) * scale
                loss.backward()
                self.losses.append(loss.item())
                for optimizer in self.optimizers:
                    optimizer.step()
                self.weights.append(self.now())
                if until():
                    return self
        return self

    def traffic(self):
        return vars(self.divided.exchange.traffic)

    def gradient(self):
        return vector(p.grad for p in self.model.parameters()).tolist()

    def now(self):
        return vector(self.model.parameters()).tolist()

    def leave(self):
        self.ledger.restore()
        return self.weights


# -- gradients


def sizes():
    """Every bucket size, changed in one program whose gradient is the same in each pass."""
    program, answer = Program(length=BATCH, width=20000, rate=0.0).train(3), {}
    offered = buckets.applies(Facts(), program.context)
    answer["offered"] = [list(offered.values), offered.effect.value]
    for value in (25, 1, 0.1, "all"):
        undo = buckets.apply(program.context, value, Ledger())
        program.train(3)
        answer[str(value)] = {**program.traffic(), "gradient": program.gradient()[::97]}
        undo()
    answer["events"] = program.observed.events[-4:]
    bad = KNOWN_BAD["gradient_buckets"](program.context, 0.1, Ledger())
    answer["bad"] = program.train(2).gradient()[::97]
    bad()
    program.leave()
    return answer


def transports():
    """Thirty steps of training with each; the gradient of the first step is that of the same weights."""
    answer = {}
    for value in (None, "bf16", "fp16", {"kind": "powersgd", "rank": 2, "after": 3}, "bad"):
        program = Program(length=BATCH, dtype=torch.float32, width=60, rate=0.3)
        if value == "bad":
            KNOWN_BAD["comm_compression"](program.context, "bf16", program.ledger)
        elif value is not None:
            compression.apply(program.context, value, program.ledger)
        first = program.train(1).gradient()
        program.train(29)
        answer[value["kind"] if isinstance(value, dict) else str(value)] = {
            "first": first,
            "losses": program.losses,
            "sent": program.traffic()["sent_bytes"],
            "weights": program.weights[-1],
            "reports": [report for name, report in program.context.reports if name == "comm_compression"],
            "offered": list(compression.applies(Facts(), program.context).values),
        }
        program.leave()
    return answer


def accumulates():
    """The mean of accumulated gradients is that of one pass over both batches."""
    program = Program(length=2 * BATCH, rate=0.0)
    for x, y in program.loader:
        nn.functional.cross_entropy(program.model(x), y).backward()
    summed = program.gradient()
    program.leave()
    model, _ = network()
    for x, y in zip(*(part.split(BATCH) for part in data(2 * BATCH)), strict=True):
        nn.functional.cross_entropy(model(x), y).backward()
    return [summed, vector(p.grad for p in model.parameters()).tolist()]


CASES = (sizes, transports, accumulates)


def main():
    torch.set_num_threads(1)
    answers = {case.__name__: case() for case in CASES}
    (Path(sys.argv[1]) / f"{RANK.rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
