"""Mistakes behind trainer classes, metric objects, callbacks and library functions: each rule finds them there,
on the marked lines only, and is silent about a twin that looks alike and is right.
"""

import pytest
from forms import assert_found, cases, filled

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import copy
from itertools import cycle

import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda")
"""
MEAN = """
class Mean:
    def __init__(self):
        self.total, self.count = torch.tensor(0.0), 0

    def add(self, value, weight=1):
        {line}
        self.count += weight


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = Mean()
for x in DataLoader(torch.randn(64, 4), batch_size=8):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.add({given}, len(x))
"""
OUTPUTS = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for x in DataLoader(torch.randn(64, 4), batch_size=8):
    optimizer.zero_grad()
    output = {"loss": model(x).square().mean(), "size": len(x)}
    output["loss"].backward()
    optimizer.step()
    {line}
"""
BEST = """
class Trainer:
    def __init__(self, model):
        self.model = None
        self.optimizer = None
        self.best_loss, self.best_state = float("inf"), None

    def fit(self, loader):
        for epoch in range(10):
            self.model.train()
            for x in loader:
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                self.optimizer.step()
            mean = self.evaluate()
            if mean < self.best_loss:
                self.best_loss = mean
                {line}
"""
READS = """
class Trainer:
    def __init__(self, args):
        self.args, self.total = args, 0.0
        self.model = nn.Linear(4, 1).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, steps):
        for step in range(steps):
            self.optimizer.zero_grad()
            for part in range(self.args.parts):
                self.accumulate(step)
            self.optimizer.step()

    def accumulate(self, step):
        loss = self.model(torch.randn(8, 4, device=device)).square().mean() / self.args.parts
        loss.backward()
        {line}
"""
GIVEN = """
class Trainer:
    def __init__(self, model, train_loader, optimizer):
        self.model, self.train_loader, self.optimizer = model, train_loader, optimizer

    def fit(self):
        self.epoch(self.scaled if self.optimizer is None else self.plain)

    def plain(self, loss):
        loss.backward()
        self.optimizer.step()

    def scaled(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def epoch(self, backward):
        for x, y in self.train_loader:
            {line}
            self.optimizer.zero_grad()
            backward(nn.functional.mse_loss(self.model(x), y))
"""
SLICES = """
class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.cell = nn.Linear(16, 8), nn.GRUCell(16, 8)

    def one(self, x):
        return self.other(x)

    def other(self, x):
        return self.one(x)

    def forward(self, x):
        found, state = torch.zeros(len(x), x.shape[1], 8, device=x.device), None
        for entry in range(x.shape[1]):
            {line}
            found[:, entry] = nn.functional.normalize(one, dim=1)
        return found
"""
ENTRIES = """
def similarities(queries, keys):
    found = torch.zeros(queries.size(0), keys.size(0))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            {line}
    return found
"""

LOSS = """
class MaskedLoss(nn.Module):
    def forward(self, output, target):
        mask = target != -100
        error = torch.abs(output - target) * mask
        {line}
"""
CYCLED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{line}
for _ in range(100):
    DESCEND optimizer model(next(batches)).square().mean()
"""
CONVERTS = """
def as_input(array, device):
    {line}
"""
SCALED = """
class Trainer:
    def __init__(self, parts):
        self.parts, self.scaler = parts, torch.amp.GradScaler("cuda")
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = self.model(x).square().mean()
            loss = {line}
            loss.backward(){mark}
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""

FORMS = {
    ("FL009", SCALED): {
        "a loss without its scale": {"line": "loss / self.parts", "mark": "  # <-"},
    },
    ("FL202", MEAN): {
        "a metric adds the loss": {"line": "self.total += value.cpu() * weight  # <-", "given": "loss"},
        "a metric detaches": {"line": "self.total += value.detach() * weight", "given": "loss"},
    },
    ("FL202", OUTPUTS): {
        "outputs with their loss": "kept.append(output)  # <-",
        "outputs without their loss": 'output["loss"] = output["loss"].detach(); kept.append(output)',
    },
    ("FL032", BEST): {
        "the best state": "self.best_state = self.model.state_dict()  # <-",
        "a copy of it": "self.best_state = copy.deepcopy(self.model.state_dict())",
    },
    ("FL101", READS): {
        "a read in a fixed arm": "if self.args.log: self.total += loss.item()  # <-",
        "a read for debugging": "if self.args.debug: self.total += loss.item()",
    },
    ("FL109", GIVEN): {
        "a copy that blocks": "x = x.to(device)  # <-",
        "a copy that does not": "x = x.to(device, non_blocking=True)",
    },
    ("FL118", SLICES): {
        "one slice at a time": "one = self.tower(x[:, entry])  # <-",
        "methods that call each other": "one = self.one(x[:, entry])",
        "feedback": "one = self.tower(x[:, entry] + found[:, entry - 1].sum())",
    },
    ("FL118", ENTRIES): {
        "a dynamic program": "found[i, j] = torch.dist(query, key) + torch.minimum(found[i, j - 1], found[i - 1, j])",
    },
    ("FL101", LOSS): {
        "a test in a loss": "return error.sum() / mask.sum() if mask.sum() > 0 else error.sum()  # <-",
    },
    ("FL206", CYCLED): {
        "a cycle over a loader": "batches = cycle(DataLoader(torch.randn(64, 4), batch_size=8))  # <-",
        "a cycle over numbers": "batches = cycle([torch.ones(8, 4), torch.zeros(8, 4)])",
    },
    ("FL111", CONVERTS): {
        "a function that converts": "return torch.as_tensor(array).to(device)  # <-",
    },
}


def test_growing_memory_comes_before_wasted_time():
    text = HEAD + filled(MEAN, {"line": "self.total += value.cpu()", "given": "loss"}).replace(
        "nn.Linear(4, 1)", "nn.Linear(4, 1).to(device)"
    )
    assert [f.rule for f in check(ScriptProgram.of_text(text), ["FL101", "FL202"])] == ["FL202", "FL101"]


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given)
