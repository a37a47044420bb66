"""Rules see modes, best states, losses, windows and resumes in trainer classes, Lightning, Ignite and closures.

Each program of FOUND has one fault, on its marked lines. Each program of CLEAN looks like one of them and is right.
"""

from __future__ import annotations

import textwrap

import pytest

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

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
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()
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
                optimizer.zero_grad()
                run(model, x, y, True).backward()
                optimizer.step()
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
        def __init__(self, {given}):
            super().__init__()
            self.criterion = criterion

        def forward(self, scores, labels):
            rows = {rows}
            return sum({call} for row, label in zip(rows, labels)){mark}

    def fit(model, optimizer):
        loss = Soft()
        for x, y in batches():
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
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
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
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
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
"""
PLAIN = {"given": "criterion=nn.CrossEntropyLoss()", "call": "self.criterion(row[None], label[None])"}
AFTER = {"before": "pass", "start": "", "after": "pass"}
FOUND = {
    "FL016 through a callback": (
        "FL016",
        INSIDE_THE_EPOCH.format(end="pass", before="pass", after="pass", mark="  # <-"),
    ),
    "FL015 through a function": (
        "FL015",
        BACK.format(switch="training", set="model.train()  # <-"),
    ),
    "FL032 in a dictionary": (
        "FL032",
        BEST.format(
            keep='kept = {"weights": model.state_dict(), "epoch": epoch}  # <-',
            use='model.load_state_dict(kept["weights"])',
        ),
    ),
    "FL032 of a shallow copy": (
        "FL032",
        BEST.format(keep="kept = copy.copy(model.state_dict())  # <-", use="return kept"),
    ),
    "FL032 of a copied dictionary": (
        "FL032",
        BEST.format(keep="kept = {k: v for k, v in model.state_dict().items()}  # <-", use="return kept"),
    ),
    "FL017 in a loss class": (
        "FL017",
        LOSS.format(given=PLAIN["given"], rows="scores.softmax(-1)", call=PLAIN["call"], mark="  # <-"),
    ),
    "FL017 of a function that is passed": (
        "FL017",
        """
        def fit(model, optimizer, criterion=functools.partial(F.cross_entropy, label_smoothing=0.1)):
            for x, y in batches():
                optimizer.zero_grad()
                probabilities = torch.softmax(model(x), dim=1)
                criterion(probabilities, y).backward()  # <-
                optimizer.step()
        """,
    ),
    "FL017 across a loss class": (
        "FL017",
        """
        class Smooth(nn.Module):
            def forward(self, scores, labels):
                return F.cross_entropy(scores, labels, label_smoothing=0.1)  # <-

        def fit(model, optimizer):
            loss = Smooth()
            for x, y in batches():
                optimizer.zero_grad()
                loss(model(x).softmax(dim=1), y).backward()
                optimizer.step()
        """,
    ),
    "FL004 in Lightning": (
        "FL004",
        LIGHTNING.format(early="optimizer.zero_grad()  # <-", test="(batch_idx + 1) % self.every == 0:"),
    ),
    "FL040 in Lightning": (
        "FL040",
        LIGHTNING.format(early="pass", test="batch_idx % self.every == 0:  # <-"),
    ),
    "FL007 in Ignite": (
        "FL007",
        IGNITE.format(clip="pass", clip_late="nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-"),
    ),
    "FL040 through a method": ("FL040", WINDOW.format(test="at % self.every == 0:  # <-", **AFTER)),
    "FL040 of a counter": (
        "FL040",
        WINDOW.format(
            start="", before="pass", test="not self.count % self.every:  # <-", after="self.count += 1"
        ),
    ),
    "FL040 of an index from 1": (
        "FL040",
        WINDOW.format(start=", 1", before="pass", test="(at + 1) % self.every == 0:  # <-", after="pass"),
    ),
    "FL041 in __init__": (
        "FL041",
        RESUME.format(
            first="self.load(file)\n            self.optimizer = self.build()", second="pass", mark="  # <-"
        ),
    ),
    "FL041 in another method": (
        "FL041",
        RESUME.format(first="pass", second="self.optimizer = self.build()", mark="  # <-"),
    ),
    "FL041 of a name": (
        "FL041",
        NAMES.format(
            mark="  # <-",
            then="model.layer.requires_grad_(True)\n        optimizer = torch.optim.Adam(model.parameters())",
        ),
    ),
}
CLEAN = {
    "FL016: the callback restores the mode": INSIDE_THE_EPOCH.format(
        end="pass", before="pass", after="self.model.train()", mark=""
    ),
    "FL016: the callback restores what was": INSIDE_THE_EPOCH.format(
        end="pass", before="was = self.model.training", after="self.model.train(was)", mark=""
    ),
    "FL016: the evaluation ends the epoch": INSIDE_THE_EPOCH.format(
        end="break", before="pass", after="pass", mark=""
    ),
    "FL015: only the training switches": BACK.format(switch="training", set="model.train(training)"),
    "FL015: both modes on purpose": """
        def fit(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(3):
                model.train()
                for x, y in batches():
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    for x, y in batches():
                        model.train()
                        loss = F.cross_entropy(model(x), y)
                        model.eval()
                        print(loss, model(x).argmax(1))
    """,
    "FL032: a copy of each tensor": BEST.format(
        keep="kept = {k: v.clone() for k, v in model.state_dict().items()}", use="return kept"
    ),
    "FL032: saved at once": BEST.format(
        keep='kept = {"weights": model.state_dict()}\n                torch.save(kept, "best.pt")',
        use='model.load_state_dict(torch.load("best.pt", map_location="cpu", weights_only=True)["weights"])',
    ),
    "FL017: scores": LOSS.format(rows="scores", mark="", **PLAIN),
    "FL017: the caller decides": LOSS.format(
        given="criterion=nn.NLLLoss()", rows="scores.log_softmax(-1)", call=PLAIN["call"], mark=""
    ),
    "FL004 in Lightning": LIGHTNING.format(early="pass", test="(batch_idx + 1) % self.every == 0:"),
    "FL007 in Ignite": IGNITE.format(
        clip="nn.utils.clip_grad_norm_(model.parameters(), 1.0)", clip_late="pass"
    ),
    "FL040: the last of the window": WINDOW.format(test="at % self.every == self.every - 1:", **AFTER),
    "FL040: an index from 1": WINDOW.format(
        start=", start=1", before="pass", test="at % self.every == 0:", after="pass"
    ),
    "FL040: counted before the test": WINDOW.format(
        start="", before="self.count += 1", test="self.count % self.every == 0:", after="pass"
    ),
    "FL040: the step comes before the backward pass": """
        def fit(model, optimizer, every):
            for i, (x, y) in enumerate(batches()):
                if i % every == 0:
                    if i > 0:
                        optimizer.step()
                    optimizer.zero_grad()
                (F.cross_entropy(model(x), y) / every).backward()
    """,
    "FL041: loaded after it is made": RESUME.format(
        first="pass", second="self.optimizer = self.build()\n            self.load('last.pt')", mark=""
    ),
    "FL041: made only if there is none": RESUME.format(
        first="pass",
        second="if self.optimizer is None:\n                self.optimizer = self.build()",
        mark="",
    ),
    "FL041: a new optimizer for a new phase": NAMES.format(
        mark="", then="if warm:\n            optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)"
    ),
}


def found(text: str) -> list[tuple[str, int]]:
    return [(f.rule, f.place.line) for f in check(ScriptProgram.of_text(HEAD + textwrap.dedent(text)))]


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found_in_a_trainer(name):
    code, text = FOUND[name]
    lines = (HEAD + textwrap.dedent(text)).splitlines()
    assert found(text) == [(code, at) for at, line in enumerate(lines, 1) if line.endswith("# <-")]


@pytest.mark.parametrize("name", CLEAN)
def test_a_trainer_that_looks_alike_is_clean(name):
    assert found(CLEAN[name]) == []
