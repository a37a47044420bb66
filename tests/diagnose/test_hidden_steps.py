"""Faults in steps, models and loaders that the program does not show: units that a framework drives, models from a
registry, loaders that a class makes, averages in helper functions. Each form is found on its marked lines only, and
its twin is clean.
"""

import textwrap

import pytest
from forms import TEXT, assert_found, cases, filled

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda")
"""
UNIT = """
class Unit:
    def __init__(self, registry, logger):
        self.net = registry.get("net")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.last, self.log_every, self.logger = None, 10, logger

    def train_step(self, state, data):
        loss = self.net(data.to(device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        {line}

    def log(self, step, value):
        if step % self.log_every != 0:
            return
        self.logger.log(value.item())
"""


VALIDATES = """
@torch.no_grad()
def validate(model, batches, loss_of):
    model.eval()
    losses, total = torch.zeros(len(batches), device=device), 0.0
    for at, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        {line}
    model.train()
    return losses.mean().item()


def train(model, optimizer, loader, batches, loss_of):
    for step, (x, y) in enumerate(loader):
        DESCEND optimizer F.cross_entropy(model(x), y)
        if step % 1000 == 0:
            print(validate(model, batches, loss_of))
"""

WITHIN = """
def run(model, loader, valid, config):
    optimizer = config.optimizer(model.parameters())
    for epoch in range(9):
        model.train()
        for x in loader:
            DESCEND optimizer model(x).square().mean()
        model.eval()
        {block}
        for x in valid:
            print(epoch, model(x).argmax(-1).sum()){mark}
"""
DATA = """
class Data({base}):
    def __init__(self, first, second, num_workers):
        self.first, self.second, self.num_workers = first, second, num_workers

    def train_dataloader(self):
        return DataLoader(self.first, shuffle=True, num_workers=self.num_workers{more}){mark}

    def {other}(self):
        return DataLoader(self.second, num_workers=self.num_workers{more})
"""
AVERAGE = """
class Average:
    def __init__(self, model, decay):
        self.kept, self.decay = copy.deepcopy(model), decay

    def update(self, model):
        weights = model.state_dict()
        with torch.no_grad():
            for name, kept in self.kept.state_dict().items():
                {line}

    def mix(self, kept, weight, steps):
        rate = min(self.decay, steps / 10)
        {inner}
"""

COMPILED = """
def share(mask):
    return mask.float().mean(){read}{mark}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(x) * share(x > 0)


model = {model}
"""

FORMS = {
    ("FL101", UNIT): {
        "the norm in a unit's step": "self.last = float(norm)  # <-",
        "a log that returns early": "self.log(state.step, loss)",
    },
    ("FL101", VALIDATES): {
        "a batch of a validation": "losses[at] = loss.item()  # <-",
        "a sum of a validation": "total += loss.item()  # <-",
        "a validation on the device": "losses[at] = loss",
    },
    ("FL201", WITHIN): {
        "an evaluation beside the training": {"block": "", "mark": "  # <-"},
    },
    ("FL201", TEXT): {
        "an evaluation without gradients": filled(WITHIN, {"block": ""}).replace(
            "print(epoch,", "with torch.no_grad(): print(epoch,"
        ),
    },
    ("FL108", DATA): {
        "a data module": {"other": "val_dataloader", "mark": "  # <-"},
        "workers that are kept": {"other": "val_dataloader", "more": ", persistent_workers=num_workers > 0"},
        "a class with one loader": {"other": "further"},
    },
    ("FL121", AVERAGE): {
        "an average in a method": {
            "line": "self.mix(kept.data, weights[name].data, 9)",
            "inner": "kept.mul_(rate).add_(weight, alpha=1 - rate)  # <-",
        },
        "an average by assignment": "kept.data = kept.data * self.decay + weights[name].data * (1.0 - self.decay)  # <-",
    },
    ("FL123", COMPILED): {
        "a read below a compiled model": {
            "read": ".item()",
            "mark": "  # <-",
            "model": "torch.compile(Net())",
        },
        "a compiled model without reads": {"model": "torch.compile(Net())"},
    },
}


def test_several_devices_in_one_process_come_first():
    text = HEAD + textwrap.dedent("""
        model = nn.DataParallel(nn.Linear(4, 1), device_ids=list(range(torch.cuda.device_count()))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in torch.randn(9, 8, 4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item())
    """)
    assert [f.rule for f in check(ScriptProgram.of_text(text), ["FL101", "FL115"])] == ["FL115", "FL101"]
    one = text.replace("list(range(torch.cuda.device_count()))", "[0]")
    assert [f.rule for f in check(ScriptProgram.of_text(one), ["FL101", "FL115"])] == ["FL101", "FL115"]


def test_an_evaluation_with_graphs_comes_before_wasted_time():
    text = HEAD + textwrap.dedent(filled(WITHIN)).replace(
        "optimizer.step()", "optimizer.step(); torch.cuda.empty_cache()"
    )
    assert [f.rule for f in check(ScriptProgram.of_text(text), ["FL104", "FL201"])] == ["FL201", "FL104"]


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given)
