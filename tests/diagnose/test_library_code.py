"""Faults in trainers, optimizers and modules of a library: each rule finds them on the marked lines only, and is
silent about a twin that looks alike and is right.
"""

import pytest
from forms import TEXT, assert_found, cases, filled

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda")
"""
OVERRIDDEN = """
class Base:
    def __init__(self, model: nn.Module, loader: DataLoader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self):
        for epoch in range(9):
            self.train_epoch()
            {call}
                self.valid_epoch()

    def valid_epoch(self):
        raise NotImplementedError


class Trainer(Base):
    def train_epoch(self):
        self.model.train()
        for x in self.loader:
            DESCEND self.optimizer self.model(x).mean()
    {decorator}
    def valid_epoch(self):
        self.model.eval()
        for x in self.loader:
            print(self.model(x).mean().item()){mark}


class Other(Base):
    train_epoch = Trainer.train_epoch

    def valid_epoch(self):
        print("nothing to evaluate")
"""
FORCES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        {first}
        energy = self.layer(x).sum()
        {then}


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(64, 3), batch_size=8):
    DESCEND optimizer model(x)[0]
model.eval()
for x in DataLoader(torch.randn(64, 3), batch_size=8):
    print(model(x)[0].item()){mark}
"""
PENALTY = """
def penalty(model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()


model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(64, 3), batch_size=8):
    DESCEND optimizer (model(x).mean() + penalty(model, x))
model.eval()
for x in DataLoader(torch.randn(64, 3), batch_size=8):
    print(model(x).mean().item())  # <-
"""

FETCHES = """
class Trainer:
    def __init__(self, model: nn.Module):
        self.model = model

    @torch.no_grad()
    def evaluate(self, loader, loaders):
        self.model.eval()
        for name in {over}:
            x = {fetched}
            print(self.model(x).mean())
"""
MODES = """
class Trainer:
    def __init__(self, model, optimizer, loaders):
        self.model, self.optimizer, self.loaders = model, optimizer, loaders

    def fit(self):
        for epoch in range(9):
            {mode}
            for step, x in enumerate(self.loaders["train"]):
                DESCEND self.optimizer self.run(x)
                if step % 100 == 0:
                    {before}
                    self.validate()

    def run(self, x):
        return self.model(x).mean()

    def validate(self):
        {switch}
        with torch.no_grad():
            for x in self.loaders["val"]:
                print(self.run(x)){mark}
"""
IN_MODE = {
    "a mode": ("self.model.train()", "pass", "self.model.train(False)"),
    "a hook": ("self.model.train()", "self.hooks.on_validation(self)", "pass"),
}
MARK = "  # <-"
FREEZES = """
import torchvision

resnet = torchvision.models.resnet18()
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
layers = list(resnet.children())[:-2]
for {entry} in {entries}:
    {line}
"""
FROZEN = {
    "numbered": ("i, (name, p)", "enumerate(resnet.named_modules())"),
    "parts of a known model": ("p", "[resnet.layer1, resnet.fc, *net[:1]]"),
    "one or the other": ("p", "resnet.layer1 if device else net"),
    "by name": ("p", "[getattr(resnet, 'layer1')]"),
    "a comprehension": ("p", "[each for each in resnet.modules() if isinstance(each, nn.BatchNorm2d)]"),
}
THAWED = {
    "weights": ("p", "[resnet.fc.weight, *(q for m in net for q in m.parameters())]"),
    "a list of parameters": ("p", "nn.ParameterList([nn.Parameter(torch.zeros(2))])"),
}


FORMS = {
    ("FL015", MODES): {
        "evaluated in training mode": {"mode": "self.model.train()", "mark": MARK},
        **{
            f"evaluated with {name}": {"mode": mode, "before": before, "switch": switch}
            for name, (mode, before, switch) in IN_MODE.items()
        },
    },
    ("FL117", FETCHES): {
        "a method call": {"over": "range(9)", "fetched": "iter(loader).__next__()" + MARK},
        "one batch of a varying loader": {
            "over": "loaders",
            "fetched": "next(iter(loader := loaders[name]))",
        },
    },
    ("FL201", OVERRIDDEN): {
        "an overridden evaluation": {"call": "if epoch > 3:", "decorator": "", "mark": MARK},
        "without gradients in the base class": {"call": "with torch.no_grad():", "decorator": ""},
    },
    ("FL201", FORCES): {
        "a model without inner gradients": {"then": "return energy, x", "mark": MARK},
        "forces from an energy": {
            "first": "x.requires_grad_()",
            "then": "return energy, torch.autograd.grad(energy, x)[0]",
        },
        "a derivative by the caller": {"first": "x.requires_grad = True", "then": "return energy, x"},
    },
    ("FL201", TEXT): {
        "a penalty of the training": PENALTY,
    },
    ("FL034", FREEZES): {
        **{
            f"frozen: {name}": {"entry": entry, "entries": entries, "line": "p.requires_grad = False" + MARK}
            for name, (entry, entries) in FROZEN.items()
        },
        "frozen by setattr": {
            "entry": "p",
            "entries": "layers",
            "line": 'setattr(p, "requires_grad", False)' + MARK,
        },
        **{
            f"frozen for real: {name}": {
                "entry": entry,
                "entries": entries,
                "line": "p.requires_grad = False",
            }
            for name, (entry, entries) in THAWED.items()
        },
        "frozen as well": {
            "entry": "p",
            "entries": "layers",
            "line": "p.requires_grad = False\n    for q in p.parameters():\n        q.requires_grad = False",
        },
    },
}


@pytest.mark.parametrize("forces", [True, False])
def test_a_model_of_another_folder_of_the_package_may_need_gradients(tmp_path, forces):
    package = tmp_path / "fields"
    for folder in ("model", "train"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    taken = "torch.autograd.grad(energy, x)[0]" if forces else "x"
    (package / "model" / "net.py").write_text(
        f"import torch\n\n\ndef forces(energy, x):\n    return {taken}\n"
    )
    script = package / "train" / "loop.py"
    script.write_text(
        "from fields.model import (\n    net,\n)\n"
        + HEAD
        + filled(FORCES, {"then": "return energy, net.forces(energy, x)"})
    )
    assert len(check(ScriptProgram.read(script), ["FL201"])) == (0 if forces else 1)


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given)
