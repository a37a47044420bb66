"""Rules see modes, best states, losses, windows and resumes in trainer classes, Lightning, Ignite and closures.

Each program of FOUND has one fault, on its marked lines. Each program of CLEAN looks like one of them and is right.
"""

import pytest
from forms import TEXT, assert_found, cases

HEAD = """
import copy
import functools
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 3), nn.Dropout()

    def forward(self, x):
        return self.drop(self.layer(x))

def batches():
    for _ in range(64):
        yield torch.randn(8, 4), torch.randint(3, (8,))
"""
INSIDE_THE_EPOCH = """
class Trainer:
    def __init__(self, model, every):
        self.model, self.every, self.steps = model, every, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in batches():
                DESCEND self.optimizer F.cross_entropy(self.model(x), y)
                self.steps += 1
                if self.steps % self.every == 0:
                    self.callback()
                    {end}

    def callback(self):
        {before}
        print(self.accuracy())
        {after}

    @torch.no_grad()
    def accuracy(self):
        self.model.eval(){mark}
        return [(self.model(x).argmax(1) == y).float().mean() for x, y in batches()]
"""
BACK = """
def run(model, x, y, {switch}):
    {set}
    return F.cross_entropy(model(x), y)

def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.train()
        for x, y in batches():
            DESCEND optimizer run(model, x, y, True)
        model.eval()
        with torch.no_grad():
            total = sum(run(model, x, y, False) for x, y in batches())
        print(total)

fit(Net())
"""
BEST = """
def fit(model, optimizer):
    best, kept = 9.0, None
    for epoch in range(9):
        total = torch.zeros(())
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        value = total.item()
        if value < best:
            best = value
            {keep}
    {use}
"""
LOSS = """
class Soft(nn.Module):
    def __init__(self, {given=criterion=nn.CrossEntropyLoss()}):
        super().__init__()
        self.criterion = criterion

    def forward(self, scores, labels):
        rows = {rows}
        return sum({call=self.criterion(row[None], label[None])} for row, label in zip(rows, labels)){mark}

def fit(model, optimizer):
    loss = Soft()
    for x, y in batches():
        DESCEND optimizer loss(model(x), y)
"""
LIGHTNING = """
import lightning

class Pair(lightning.LightningModule):
    def __init__(self, every):
        super().__init__()
        self.automatic_optimization, self.every = False, every
        self.first, self.second = Net(), Net()

    def update(self, optimizer, loss, batch_idx):
        {early}
        self.manual_backward(loss / self.every)
        if {test}
            optimizer.step()
            optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.update(first, F.cross_entropy(self.first(batch[0]), batch[1]), batch_idx)
        self.update(second, F.cross_entropy(self.second(batch[0]), batch[1]), batch_idx)
"""
IGNITE = """
from ignite.engine import Engine

def trainer(model, optimizer):
    def update(engine, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        {clip}
        optimizer.step()
        {clip_late}
    return Engine(update)
"""
WINDOW = """
class Trainer:
    def __init__(self, model, every):
        self.model, self.every, self.count = model, every, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self):
        for i, (x, y) in enumerate(batches(){start}):
            (F.cross_entropy(self.model(x), y) / self.every).backward()
            self.maybe_step(i)
            {after}

    def maybe_step(self, at):
        {before}
        if {test}
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
RESUME = """
class Trainer:
    def __init__(self, model, file):
        self.model = model
        self.optimizer = None
        {first}

    def build(self):
        return torch.optim.Adam(self.model.parameters())

    def load(self, file):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(saved["optimizer"]){mark}

    def fit(self):
        {second}
        for x, y in batches():
            DESCEND self.optimizer F.cross_entropy(self.model(x), y)
"""
NAMES = """
def fit(model, file, warm):
    optimizer = torch.optim.Adam(model.parameters())
    if file:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"]){mark}
    {then}
    for x, y in batches():
        DESCEND optimizer F.cross_entropy(model(x), y)
"""

FORMS = {
    ("FL016", INSIDE_THE_EPOCH): {
        "FL016 through a callback": {"mark": "  # <-"},
        "FL016: the evaluation ends the epoch": {"end": "break"},
    },
    ("FL015", BACK): {
        "FL015 through a function": {"switch": "training", "set": "model.train()  # <-"},
        "FL015: only the training switches": {"switch": "training", "set": "model.train(training)"},
    },
    ("FL032", BEST): {
        "FL032 in a dictionary": {
            "keep": 'kept = {"weights": model.state_dict(), "epoch": epoch}  # <-',
            "use": 'model.load_state_dict(kept["weights"])',
        },
        "FL032 of a shallow copy": {
            "keep": "kept = copy.copy(model.state_dict())  # <-",
            "use": "return kept",
        },
        "FL032 of a copied dictionary": {
            "keep": "kept = {k: v for k, v in model.state_dict().items()}  # <-",
            "use": "return kept",
        },
        "FL032: a copy of each tensor": {
            "keep": "kept = {k: v.clone() for k, v in model.state_dict().items()}",
            "use": "return kept",
        },
        "FL032: saved at once": {
            "keep": 'kept = {"weights": model.state_dict()}\n            torch.save(kept, "best.pt")',
            "use": 'model.load_state_dict(torch.load("best.pt", map_location="cpu", weights_only=True)["weights"])',
        },
    },
    ("FL017", LOSS): {
        "FL017 in a loss class": {"rows": "scores.softmax(-1)", "mark": "  # <-"},
        "FL017: scores": {"rows": "scores"},
    },
    ("FL017", TEXT): {
        "FL017 of a function that is passed": """
def fit(model, optimizer, criterion=functools.partial(F.cross_entropy, label_smoothing=0.1)):
    for x, y in batches():
        optimizer.zero_grad()
        probabilities = torch.softmax(model(x), dim=1)
        criterion(probabilities, y).backward()  # <-
        optimizer.step()
""",
    },
    ("FL004", LIGHTNING): {
        "FL004 in Lightning: as it is meant": {"test": "(batch_idx + 1) % self.every == 0:"},
    },
    ("FL040", LIGHTNING): {
        "FL040 in Lightning": {"test": "batch_idx % self.every == 0:  # <-"},
    },
    ("FL007", IGNITE): {
        "FL007 in Ignite": {"clip_late": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-"},
        "FL007 in Ignite: as it is meant": {"clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    },
    ("FL040", WINDOW): {
        "FL040 of a counter": {"test": "not self.count % self.every:  # <-", "after": "self.count += 1"},
        "FL040 of an index from 1": {"start": ", 1", "test": "(at + 1) % self.every == 0:  # <-"},
        "FL040: an index from 1": {"start": ", start=1", "test": "at % self.every == 0:"},
    },
    ("FL041", RESUME): {
        "FL041 in __init__": {
            "first": "self.load(file)\n        self.optimizer = self.build()",
            "mark": "  # <-",
        },
        "FL041: made only if there is none": {
            "second": "if self.optimizer is None:\n            self.optimizer = self.build()"
        },
    },
    ("FL041", NAMES): {
        "FL041 of a name": {
            "mark": "  # <-",
            "then": "model.layer.requires_grad_(True)\n    optimizer = torch.optim.Adam(model.parameters())",
        },
    },
    ("", TEXT): {
        "FL015: both modes on purpose": """
def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.train()
        for x, y in batches():
            DESCEND optimizer F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            for x, y in batches():
                model.train()
                loss = F.cross_entropy(model(x), y)
                model.eval()
                print(loss, model(x).argmax(1))
""",
        "FL040: the step comes before the backward pass": """
def fit(model, optimizer, every):
    for i, (x, y) in enumerate(batches()):
        if i % every == 0:
            if i > 0:
                optimizer.step()
            optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / every).backward()
""",
    },
}


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given, of_all=True)
