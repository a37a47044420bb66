"""Two ranks of flatout: what they send, and where they end when they step by themselves.

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
from flatout.distributed.shares import share
from flatout.job.rank_environment import this_rank
from flatout.levers.comm_compression import LEVER as compression
from flatout.levers.gradient_buckets import LEVER as buckets
from flatout.levers.local_sgd import LEVER as local_sgd
from flatout.schema.facts import Facts

RANK = this_rank()
RENDEZVOUS = iter(range(100))
BATCH, SYNCHRONOUS = 12, 2


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
    """``local`` is a value of local_sgd. ``weights`` holds those after each step."""

    def __init__(self, local=None, length=36, dtype=torch.float64, **options):
        self.ledger, self.observed = Ledger(), ExchangeRecorder()
        self.context = TrainingContext(torch, self.observed, self.ledger)
        here = replace(RANK, rendezvous=f"{RANK.rendezvous}{next(RENDEZVOUS)}")
        self.divided = DataParallelScript(torch, self.context, here, SplitSettings(), self.ledger)
        self.divided.install()
        self.ledger.set(self.context, "data_parallel", self.divided)
        if local is not None:
            local_sgd.apply(self.context, local, self.ledger)
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


# -- gradients ------------------------------------------------------------------------------------------------------------


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


# -- local steps ----------------------------------------------------------------------------------------------------------


def every_step():
    """Rounds of one step with a plain mean and plain SGD beside the exchange of gradients."""
    return {
        str(two): [
            Program(two=two, length=37).train(4).leave(),
            Program({"every": 1}, two=two, length=37).train(4).leave(),
        ]
        for two in (False, True)
    }


def written_out(every, rate, momentum, steps, length):
    """Both ranks computed in one process by torch's SGD as the outer step: the weights of each after every step,
    and the shared ones at the end.
    """
    x, y = data(length)
    ranks = [network(momentum=0.9) for _ in (0, 1)]
    shared = [nn.Parameter(p.detach().clone()) for p in ranks[0][0].parameters()]
    outer = torch.optim.SGD(shared, lr=rate, momentum=momentum, nesterov=bool(momentum))
    courses = ([], [])

    def synchronise():
        for at, weight in enumerate(shared):
            present = [list(model.parameters())[at].detach() for model, _ in ranks]
            weight.grad = weight.detach() - sum(present) / 2
        outer.step()
        for model, _ in ranks:
            for p, weight in zip(model.parameters(), shared, strict=True):
                p.data.copy_(weight)

    for step in range(steps):
        begin = step * BATCH % length
        for rank, (model, (optimizer,)) in enumerate(ranks):
            part = share(min(BATCH, length - begin), rank, 2)
            rows = slice(begin + part.start, begin + part.stop)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) * part.weight * 2).backward()
        if step < SYNCHRONOUS:
            for a, b in zip(*(model.parameters() for model, _ in ranks), strict=True):
                a.grad = b.grad = (a.grad + b.grad) / 2
        for _, (optimizer,) in ranks:
            optimizer.step()
        if step < SYNCHRONOUS:
            for p, weight in zip(ranks[0][0].parameters(), shared, strict=True):
                weight.data.copy_(p)
        elif (step + 1 - SYNCHRONOUS) % every == 0:
            synchronise()
        for rank in (0, 1):
            courses[rank].append(vector(ranks[rank][0].parameters()).tolist())
    synchronise()
    return [*courses, vector(shared).tolist()]


def outer_steps():
    answer = {}
    for outer, rate, momentum in (("average", 1.0, 0.0), ("nesterov", 0.7, 0.9)):
        program = Program({"every": 3, "outer": outer}, momentum=0.9).train(5)
        with torch.no_grad():
            program.model(torch.zeros(1, 6, dtype=torch.float64))
        met = program.now()
        answer[outer] = [program.leave(), met, written_out(3, rate, momentum, 15, 36)]
    return answer


def alike(weights):
    """Whether every rank has these, bit for bit."""
    mine = torch.tensor(weights)
    parts = [torch.empty_like(mine) for _ in range(RANK.world_size)]
    torch.distributed.all_gather(parts, mine)
    return all(torch.equal(part, parts[0]) for part in parts)


def rendezvous():
    """Before each kind of rendezvous, in the middle of a round, the ranks differ; after it they agree."""
    answer, warm = {}, []
    program = Program({"every": 4, "outer": "nesterov", "warmup": 3}, length=48)
    program.train(1, until=lambda: warm.append([program.divided.local.apart, alike(program.now())]))
    weights = {name: tensor.detach() for name, tensor in network()[0].named_parameters()}

    def evaluate():
        with torch.inference_mode():
            program.model(torch.zeros(1, 6, dtype=torch.float64))

    def save():
        torch.save([p.detach() for p in program.model.parameters()], Path(sys.argv[1]) / f"{RANK.rank}.pt")

    for name, meet in (
        ("evaluation", evaluate),
        ("state_dict", program.model.state_dict),
        ("save", save),
        ("load_state_dict", lambda: program.model.load_state_dict(weights)),
    ):
        program.train(3, until=lambda: program.divided.local.since == 2)
        apart = not alike(program.now())
        meet()
        answer[name] = [apart, alike(program.now())]
    program.optimizers[0].param_groups[0]["lr"] = 0.0  # restored weights are no progress of a round
    program.train(1)
    evaluate()
    answer |= {"warm": warm, "put back": program.now() == vector(weights.values()).tolist()}
    program.leave()
    return answer


def compressed():
    """Progress is sent compressed, as gradients are. Two steps, and a round of three."""
    answer = {}
    for kind in ("plain", "bf16"):
        program = Program({"every": 3})
        program.divided.transport = replace(program.divided.transport, kind=kind)
        program.train(2)
        answer[kind] = [program.divided.local.traffic.sent_bytes, program.weights[4]]
        program.leave()
    return answer


def errors():
    """Rank 1 does three steps more than rank 0, then both save; and programs that cannot step alone."""
    program = Program({"every": 100}).train(1 + RANK.rank)
    answer = {}
    try:
        program.model.state_dict()
    except RuntimeError as error:
        answer["lost"] = f"{type(error).__name__}: {error}"
    program.leave()
    program = Program()
    for division in (SplitSettings(batches="whole"), SplitSettings(batchnorm="all")):
        program.divided.division = division
        reason = local_sgd.applies(None, program.context).reason
        try:
            local_sgd.apply(program.context, {"every": 2}, Ledger())
        except LookupError as error:
            answer[division.batches] = [reason, str(error)]
    program.leave()
    return answer


CASES = (sizes, transports, accumulates, every_step, outer_steps, rendezvous, compressed, errors)


def main():
    torch.set_num_threads(1)
    answers = {case.__name__: case() for case in CASES}
    (Path(sys.argv[1]) / f"{RANK.rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
