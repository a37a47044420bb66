"""Ranks that step by themselves; their state after each round is written to OUT/<rank>.json.

python local_cases.py OUT
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.distributed.shares import share
from flatout.distributed.wire import BF16
from flatout.job.rank_environment import this_rank
from flatout.levers.local_sgd import LEVER

PLACE = this_rank()
MEETINGS = iter(range(100))
LENGTH, BATCH = 37, 12  # the last batch has one sample, fewer than there are ranks
SYNCHRONOUS = 2


def made(momentum=0.0, two=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parts = (
        ([model[0].weight, model[0].bias], [model[2].weight, model[2].bias])
        if two
        else (list(model.parameters()),)
    )
    return model, [torch.optim.SGD(part, lr=0.2, momentum=momentum) for part in parts]


def data(length=LENGTH):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(length, 6, generator=draw, dtype=torch.float64), torch.randint(
        0, 3, (length,), generator=draw
    )


def vector(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters])


class Program:
    def __init__(self, value=None, length=LENGTH, **options):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        self.divided = DataParallelScript(
            torch,
            self.context,
            replace(PLACE, rendezvous=f"{PLACE.rendezvous}{next(MEETINGS)}"),
            SplitSettings(),
            self.ledger,
        )
        self.divided.install()
        self.ledger.set(self.context, "divided", self.divided)
        if value is not None:
            LEVER.apply(self.context, value, self.ledger)
        self.context.install()
        self.model, self.optimizers = made(**options)
        self.loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*data(length)), batch_size=BATCH
        )
        self.weights = []

    def train(self, epochs=1, after=lambda step: None):
        for _ in range(epochs):
            for x, y in self.loader:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                self.weights.append(vector(self.model.parameters()).tolist())
                after(len(self.weights))
        return self

    def now(self):
        return vector(self.model.parameters()).tolist()

    def leave(self):
        self.ledger.restore()
        return self.weights


def every_step():
    """Rounds of one step with a plain mean and plain SGD, compared with the exchange of gradients; with one
    optimizer and with two.
    """
    return {
        f"{two}": [Program(two=two).train(4).leave(), Program({"every": 1}, two=two).train(4).leave()]
        for two in (False, True)
    }


def written_out(every, rate, momentum, overlap, steps, length):
    """Both ranks computed in one process without flatout: the weights of each after every step, and the
    shared ones at the end.
    """
    x, y = data(length)
    ranks = [made(momentum=0.9) for _ in (0, 1)]
    shared = vector(ranks[0][0].parameters())
    speed, begun, late, courses = torch.zeros_like(shared), [shared.clone(), shared.clone()], None, ([], [])

    def put(rank, values):
        at = 0
        for p in ranks[rank][0].parameters():
            p.data.copy_(values[at : at + p.numel()].view_as(p))
            at += p.numel()

    def outer(progress):
        nonlocal shared, speed
        speed = momentum * speed + progress
        shared = shared - rate * (progress + momentum * speed)

    since = 0
    for step in range(steps):
        begin = step * BATCH % length
        gradients = []
        for rank, (model, (optimizer,)) in enumerate(ranks):
            samples = min(BATCH, length - begin)
            part = share(samples, rank, 2)
            rows = slice(begin + part.start, begin + part.stop)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) * part.weight * 2).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for model, (optimizer,) in ranks:
            if step < SYNCHRONOUS:
                for p, a, b in zip(model.parameters(), *gradients, strict=True):
                    p.grad = (a + b) / 2
            optimizer.step()
        if step < SYNCHRONOUS:
            shared = vector(ranks[0][0].parameters())
            begun = [shared.clone(), shared.clone()]
        else:
            since += 1
            if since == every:
                since = 0
                progress = [begun[rank] - vector(ranks[rank][0].parameters()) for rank in (0, 1)]
                if not overlap:
                    outer((progress[0] + progress[1]) / 2)
                    begun = [shared.clone(), shared.clone()]
                else:
                    if late is not None:
                        outer(late)
                    late = (progress[0] + progress[1]) / 2
                    begun = [shared - progress[rank] for rank in (0, 1)]
                for rank in (0, 1):
                    put(rank, begun[rank])
        for rank in (0, 1):
            courses[rank].append(vector(ranks[rank][0].parameters()).tolist())
    progress = [begun[rank] - vector(ranks[rank][0].parameters()) for rank in (0, 1)]
    if late is not None:
        outer(late)
    if since:
        outer((progress[0] + progress[1]) / 2)
    return [*courses, shared.tolist()]


def outer_steps():
    found = {}
    for outer, rate, momentum in (("average", 1.0, 0.0), ("nesterov", 0.7, 0.9)):
        for overlap in (False, True):
            program = Program(
                {"every": 3, "outer": outer, "overlap": overlap}, length=36, momentum=0.9
            ).train(5)
            with torch.no_grad():
                program.model(torch.zeros(1, 6, dtype=torch.float64))
            met = program.now()
            found[f"{outer} {overlap}"] = {
                "flatout": [program.leave(), met],
                "by hand": written_out(3, rate, momentum, overlap, 15, 36),
                "rounds": program.divided.local.held if program.divided.local else None,
            }
    return found


def alike(weights):
    """Whether every rank has these, bit for bit."""
    mine = torch.tensor(weights)
    parts = [torch.empty_like(mine) for _ in range(PLACE.world_size)]
    torch.distributed.all_gather(parts, mine)
    return all(torch.equal(part, parts[0]) for part in parts)


def meetings():
    return {str(overlap): meeting(overlap) for overlap in (False, True)}


def meeting(overlap):
    """Before each kind of rendezvous the ranks differ; after it they agree.

    It happens in the middle of a round, with communication in flight where they overlap.
    """
    found, warm = {}, []
    program = Program({"every": 4, "outer": "nesterov", "overlap": overlap, "warmup": 3}, length=48)
    program.train(1, after=lambda step: warm.append([program.divided.local.apart, alike(program.now())]))
    weights = {name: tensor.detach() for name, tensor in made()[0].named_parameters()}

    def evaluate():
        with torch.inference_mode() if overlap else torch.no_grad():
            program.model(torch.zeros(1, 6, dtype=torch.float64))

    def save():
        torch.save([p.detach() for p in program.model.parameters()], Path(sys.argv[1]) / f"{PLACE.rank}.pt")

    for name, meet in (
        ("evaluation", evaluate),
        ("state_dict", program.model.state_dict),
        ("save", save),
        ("load_state_dict", lambda: program.model.load_state_dict(weights)),
    ):
        program.train(1)
        for x, y in program.loader:  # two steps more: a round has started and has not ended
            program.optimizers[0].zero_grad()
            nn.functional.cross_entropy(program.model(x), y).backward()
            program.optimizers[0].step()
            if len(x) and program.divided.local.since == 2:
                break
        apart = not alike(program.now())
        meet()
        found[name] = [apart, alike(program.now())]
    program.optimizers[0].param_groups[0]["lr"] = (
        0.0  # restored weights are no progress, which the next rendezvous would carry further
    )
    program.train(1)
    evaluate()
    found |= {"warm": warm, "put back": program.now() == vector(weights.values()).tolist()}
    program.leave()
    return found


def compressed():
    """Progress is sent compressed, as gradients are: in half the bytes, and all ranks hold the
    same after it.
    """
    found = {}
    for way in (None, BF16):
        program = Program({"every": 3}, length=36)
        if way is not None:
            program.divided.wanted = replace(program.divided.wanted, way=way)
        program.train(2)
        found["plain" if way is None else way.name] = [
            program.divided.local.traffic.sent_bytes,
            program.weights[4],
        ]  # two steps, and a round of three
        program.leave()
    return found


def lost():
    """Rank 1 does one step more than rank 0, then both save. Both report it, with the step."""
    program = Program({"every": 100}, length=36)
    program.train(1 + PLACE.rank)
    try:
        program.model.state_dict()
        said = ""
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    program.leave()
    return said


def refused():
    program = Program()
    said = []
    for division in (SplitSettings(batches="whole"), SplitSettings(batchnorm="all")):
        program.divided.division = division
        said.append(LEVER.applies(None, program.context).reason)
        try:
            LEVER.apply(program.context, {"every": 2}, Ledger())
        except LookupError as error:
            said.append(str(error))
    program.leave()
    return said


def main():
    torch.set_num_threads(1)
    found = {case.__name__: case() for case in (every_step, outer_steps, meetings, compressed, lost, refused)}
    (Path(sys.argv[1]) / f"{PLACE.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
