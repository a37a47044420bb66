"""Faults that show only over a whole run: what is left at the end of an epoch, what is reduced twice, what a resume
leaves out, what each sample reads again. Each form is found on its marked lines only, and its twins are clean.
"""

import pytest
from forms import TEXT, assert_found, cases, filled

HEAD = """
import functools
import itertools
import json
import os
import pickle

import h5py
import nibabel as nib
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import AutoModel
"""
WINDOW = """
def train(model, optimizer, loader, n, epochs):
    {start}
    for epoch in range(epochs):
        {before}
        for i, x in enumerate({loader=loader}):
            (model(x).square().mean() / n).backward()
            {count}
            if {test=(i + 1) % n == 0}:{mark}
                optimizer.step()
                optimizer.zero_grad()
        {after}
"""
IN_CLASS = """
class Trainer:
    def fit(self):
        for epoch in range(9):
            self.epoch()

    def epoch(self):
        seen = 0
        for x in self.loader:
            self.update(x, seen)
            seen += 1

    def update(self, x, seen):
        (self.model(x).square().mean() / self.n).backward()
        last = seen % self.n == self.n - 1
        if last:{mark}
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
REDUCED = """
def report(model, loader, group, other):
    total, count = torch.zeros(1), torch.zeros(1)
    for x in loader:
        total += model(x).sum()
        count += len(x)
        {inside}
    {after}
    return total / count
"""
KEPT = """
class Stats:
    def __init__(self):
        self.all, self.sum, self.value = {}, 0.0, 0.0

    def __setitem__(self, key, value):
        self.all.setdefault(key, [])
        self.all[key].append(value{detach}){set}

    def update(self, value, n=1):
        self.value = value
        self.sum += self.value * n{updated}

class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader, self.stats = model, loader, Stats()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self):
        losses, history = {}, []
        for step, x in enumerate(self.loader):
            self.optimizer.zero_grad()
            loss = self.loss(x, self.stats)
            loss.backward()
            self.optimizer.step()
            {line}

    def loss(self, x, stats):
        first, second = self.model(x).mean(), self.model(x).square().mean()
        loss = F.mse_loss(self.model(x), x)
        {inside}
        return loss

def log(stats: Stats, loss):
    stats.update(loss)

def fit(model, loader, stats: Stats):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {function}
"""
KEEPS = {
    "a container as an argument": {"inside": 'stats["loss"] = loss', "set": "  # <-"},
    "a meter as an argument": {"inside": "stats.update(loss, len(x))", "updated": "  # <-"},
    "an entry of the step": {"line": 'losses["last"] = loss'},
    "a pair": {"line": "history.append((step, loss))  # <-"},
}
MODES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = AutoModel.from_pretrained("distilbert-base-uncased")

    def forward(self, x):
        return self.body(x).last_hidden_state

class Agent:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def act(self, x):
        self.net.eval()
        with torch.inference_mode():
            return self.net(x)

    def learn(self, x):
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward(){agent}
        self.optimizer.step()
        {restore}

def fine_tune(build, batches):
    model = {model=build()}
    optimizer = torch.optim.AdamW({parameters=model.parameters()})
    {before}
    for x in batches:
        out = model(x){mark}
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
AWAKE = {
    "a model by from_pretrained": {"model": 'AutoModel.from_pretrained("gpt2")', "mark": "  # <-"},
    "a part by from_pretrained": {"model": "Net()", "mark": "  # <-"},
    "a model in training mode": {},
}
SCHEDULE = """
from accelerate import Accelerator
from diffusers.optimization import get_scheduler

def train(args, model, optimizer, loader):
    accelerator = Accelerator()
    {first}
    per_epoch = {length=len(loader) // args.accumulate}
    if args.steps is None:
        args.steps = args.epochs * per_epoch
    schedule = get_scheduler("cosine", optimizer, num_training_steps={total=args.steps * accelerator.num_processes}){mark}
    {last=model, optimizer, loader = accelerator.prepare(model, optimizer, loader)}
    return schedule
"""
PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
LENGTHS = {
    "a schedule before prepare": {"mark": "  # <-"},
}
SAMPLES = """
class Samples(Dataset):
    def __init__(self, root, rows, size):
        self.root, self.rows, self.size, self.table = root, rows, size, None
        self.names = os.path.join(root, "names.json")
        self.file = h5py.File(os.path.join(root, "all.h5"))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        {line}

    def read(self, path):
        with open(path, "rb") as file:
            return pickle.load(file){mark}

    @functools.lru_cache
    def kept(self, path):
        return np.load(path)
"""
ONE_SAMPLE = {
    "a table of all samples": "return json.load(open(self.names))[index]  # <-",
    "a table by the name of its folder": 'return pd.read_csv(f"{self.root}/all.csv").iloc[index]  # <-',
    "a row of a file": "at, row = divmod(index, 9); return np.load(self.rows[at])[row]  # <-",
    "a volume of slices": 'item = self.rows[index]; return nib.load(item["file"]).get_fdata()[..., item["z"]]  # <-',
    "an array of a file": 'return self.file["x"][:][index]  # <-',
    "a part of a sample": "x = np.load(self.rows[index]); at = len(x) // 2; return x[at : at + self.size]",
    "a mask of a sample": "path, which = self.rows[index]; mask = np.load(path); return mask[mask == which]",
    "a file that is mapped": 'path, row = self.rows[index]; return np.load(path, mmap_mode="r")[row]',
    "a cached table": "self.table = self.table if self.table is not None else np.load(self.names); return self.table[index]",
    "a cached function": "path, row = self.rows[index]; return self.kept(path)[row]",
    "its own name as key": 'name = self.rows[index]; return json.load(open(f"{name}.json"))[name]',
}
SCRIPT = """
parser_args = object()
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer=Adam(model.parameters())}
saved = torch.load("last.pt", map_location="cpu", weights_only=True)
{load}
model.load_state_dict(saved["net"]){mark=  # <-}
{start=start = saved['epoch'] + 1}
for epoch in range({first=start}, 9):
    for x in torch.randn(9, 8, 4):
        DESCEND optimizer model(x).square().mean()
    torch.save({"epoch": epoch, "net": model.state_dict(), "optim": optimizer.state_dict()}, "last.pt")
"""
RESUMES = """
class Trainer:
    def save(self):
        state = {"model": self.net.state_dict(), "step": self.step}
        state["opt"] = self.opt.state_dict()
        torch.save(state, self.file)

    def load(self, file, opt=None):
        state = self.read(file)
        self.net.load_state_dict(state["model"]){mark}
        {more}
        self.step = state.get("step", 0)

    def read(self, file):
        return torch.load(file, map_location="cpu", weights_only=True)

    def fit(self):
        while self.step < 900:
            self.update(next(self.batches))
            self.step += 1
"""

FORMS = {
    ("FL044", SCRIPT): {
        "a script that resumes": {},
        "an argument for the start": {
            "start": "parser_args.start = saved['epoch']",
            "first": "parser_args.start",
        },
        "an optimizer without state": {"optimizer": "SGD(model.parameters(), lr=0.1)", "mark": ""},
        "weights to start from": {"start": "print(saved['epoch'])", "first": "0", "mark": ""},
    },
    ("FL044", RESUMES): {
        "a trainer that resumes": {"mark": "  # <-"},
        "a trainer of parts": {"more": "for name in state: getattr(self, name).load_state_dict(state[name])"},
    },
    ("FL045", TEXT): {
        **{form: filled(MODES, parts).replace("self.net.eval()", "pass") for form, parts in AWAKE.items()},
    },
    ("FL045", MODES): {
        "another method evaluates": {"agent": "  # <-"},
        "another method evaluates, this trains": {"restore": "self.net.train()"},
    },
    ("FL046", SCHEDULE): LENGTHS,
    ("FL202", KEPT): KEEPS,
    ("FL124", SAMPLES): {
        **ONE_SAMPLE,
        "a row through a method": {
            "line": "path, row = self.rows[index]; return self.read(path)[row]",
            "mark": "  # <-",
        },
        "a sample through a method": "path, row = self.rows[index]; return self.read(path), row",
    },
    ("FL042", WINDOW): {
        "a counter of the run": {"start": "k = 0", "count": "k += 1", "test": "k % n == 0"},
        "cleared for each epoch": {"before": "optimizer.zero_grad()"},
        "a loader without end": {"loader": "itertools.cycle(loader)"},
    },
    ("FL042", IN_CLASS): {
        "a method for each batch": {"mark": "  # <-"},
    },
    ("FL043", REDUCED): {
        "a pasted reduction": {"after": "dist.all_reduce(total); dist.all_reduce(total)  # <-"},
        "a reduction after a log": {
            "after": "dist.all_reduce(total)\n    print(total.item())\n    if dist.is_initialized():\n        dist.all_reduce(total)  # <-"
        },
        "two groups": {"after": "dist.all_reduce(total, group=group); dist.all_reduce(total, group=other)"},
        "a mean in between": {"inside": "dist.all_reduce(total); total /= dist.get_world_size()"},
        "a total that is cleared": {"inside": "dist.all_reduce(total); print(total); total.zero_()"},
        "two arms": {
            "after": "if group:\n        dist.all_reduce(total)\n    else:\n        dist.all_reduce(total)"
        },
        "a largest value": {"inside": "dist.all_reduce(total, op=dist.ReduceOp.MAX)"},
    },
}


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given)
