"""Rules see through trainer classes, functions, parameters, Accelerator and Fabric.

Each program of FOUND has one fault, on its marked lines. Each program of CLEAN looks like one of them and is right.
"""

import textwrap

import pytest
from forms import TEXT, assert_found, cases, filled

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import contextlib
import torch
import torch.nn.functional as F
from torch import nn

def batches():
    for _ in range(64):
        yield torch.randn(8, 4)
"""
WARM_UP = """
model = nn.Linear(4, 1)
warm, joint = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(joint, step_size=3)

def one_epoch(net, opt=None):
    for x in batches():
        loss = net(x).square().mean()
        if opt is not None:
            DESCEND opt loss

for epoch in range(9):
    if epoch < 3:
        one_epoch(model, opt=warm)
    else:
        {before}
        one_epoch(model, opt=joint)
        {after}
"""
ACCUMULATE = """
from accelerate import Accelerator

class Trainer:
    def __init__(self, model, optimizer, loader):
        self.accelerator = Accelerator({steps})
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self):
        for x in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                {clear}
"""
APART = """
class Worker:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_backward(self, x):
        loss = self.model(x).square().mean()
        {early}
        loss.backward()
        return loss.detach()

    def apply(self):
        self.optimizer.step()
        {late}
"""
LAUNCHED = """
from accelerate import Accelerator

class Trainer:
    def __init__(self, model, optimizer, loader, every):
        self.accelerator, self.every = Accelerator(), every
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def backward_step(self, loss):
        self.accelerator.backward(loss)

    def train(self):
        for i, x in enumerate(self.loader):
            last = (i + 1) % self.every == 0
            with {context}:
                loss = self.model(x).square().mean() / self.every
                self.backward_step(loss){mark}
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
"""
NO_SYNC = """
def train(model, optimizer, loader, every):
    for i, x in enumerate(loader):
        {before}
        with {context}
            (model(x).square().mean() / every).backward()
        update(optimizer, i, every)

def update(optimizer, i, every):
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
INNER = """
def train(model, optimizer, every):
    for _ in range(9):
        for k in range(every):
            model.require_backward_grad_sync = {condition}
            (model(torch.randn(8, 4)).square().mean() / every).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TOKENS = """
class Recipe:
    def __init__(self, model, optimizer, loss_fn, loader, pad_id, every):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.loader, self.pad_id, self.every = loader, pad_id, every

    def loss_of(self, batch):
        labels = batch["labels"].reshape(-1)
        return {loss}

    def train(self):
        for i, batch in enumerate(self.loader):
            loss = self.loss_of(batch)
            loss = loss / self.every{mark}
            loss.backward()
            if (i + 1) % self.every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
"""
DRAW = """
import torch.distributed as dist

def noisy(clean, schedule, group):
    t = torch.randint(0, 1000, (1,))
    dist.broadcast(t, src=0{group})
    noise = torch.randn_like(clean)
    {use}
"""

FORMS = {
    ("FL011", WARM_UP): {
        "FL011 in one branch": {"before": "schedule.step()  # <-"},
        "a scheduler after the training of its branch": {"after": "schedule.step()"},
        "a scheduler that gets the epoch": {"before": "schedule.step(epoch)"},
    },
    ("FL011", TEXT): {
        "FL011 of a scheduler that is passed": """
def train(model, optimizer, scheduler, loader):
    for x in loader:
        scheduler.step()  # <-
        DESCEND optimizer model(x).square().mean()
""",
        "FL011 of a scheduler class of the program, in a function for one epoch": """
class WarmUp(torch.optim.lr_scheduler._LRScheduler):
    def get_lr(self):
        return [base * min(1.0, (self.last_epoch + 1) / 9) for base in self.base_lrs]

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm_up = WarmUp(optimizer)

def train(epoch):
    warm_up.step()  # <-
    for x in batches():
        DESCEND optimizer model(x).square().mean()
""",
    },
    ("FL004", ACCUMULATE): {
        "FL004 under accumulate": {
            "steps": "gradient_accumulation_steps=4",
            "clear": "self.model.zero_grad()  # <-",
        },
        "the model clears at the step": {
            "steps": "gradient_accumulation_steps=4",
            "clear": """if self.accelerator.sync_gradients:
                    self.model.zero_grad()""",
        },
        "an Accelerator that does not accumulate": {"clear": "self.model.zero_grad()"},
    },
    ("FL004", APART): {
        "FL004 in a method apart from the step": {"early": "self.optimizer.zero_grad()  # <-"},
    },
    ("FL116", LAUNCHED): {
        "FL116 through an Accelerator": {"context": "contextlib.nullcontext()", "mark": "  # <-"},
        "an Accelerator with no_sync": {
            "context": "contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)"
        },
    },
    ("FL116", TEXT): {},
    ("FL012", TEXT): {
        "FL012 in a generator": """
import torch.distributed as dist

def for_ever(train_loader):
    iterator = iter(train_loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(train_loader)  # <-

def total(value):
    dist.all_reduce(value)
    return value
""",
        "FL012 in a loop over steps": """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)  # <-
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
iterator = iter(loader)
for _ in range(100):
    try:
        (x,) = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        (x,) = next(iterator)
    DESCEND optimizer model(x).square().mean()
""",
    },
    ("FL037", NO_SYNC): {
        "FL037 through a name": {
            "before": """context = contextlib.nullcontext
        if i % every != 0:  # <-
            context = model.no_sync""",
            "context": "context():",
        },
        "FL037 in Fabric": {
            "before": "",
            "context": "model.no_backward_sync(model, enabled=i % every > 0):  # <-",
        },
        "no_sync on all but the step": {
            "before": "wait = (i + 1) % every != 0",
            "context": "model.no_sync() if wait else contextlib.nullcontext():",
        },
    },
    ("FL037", INNER): {
        "FL037 by a switch of an inner loop": {"condition": "k == 0  # <-"},
        "a switch for the last micro-batch": {"condition": "k == every - 1"},
    },
    ("FL038", TOKENS): {
        "FL038 of a loss that says what it ignores": {
            "loss": 'self.loss_fn(self.model(batch["tokens"]), labels.masked_fill(labels == self.pad_id, self.loss_fn.ignore_index))',
            "mark": "  # <-",
        },
    },
    ("FL038", TEXT): {
        "FL038 of an inner loop": """
def train(model, optimizer, loader, pad_token_id):
    for batch in loader:
        optimizer.zero_grad()
        parts = batch.chunk(4)
        for tokens in parts:
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=pad_token_id)
            (loss / len(parts)).backward()  # <-
        optimizer.step()
""",
        "FL038 in the model, under accumulate": """
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)

def collate(batch, lengths):
    labels = batch["input_ids"].clone()
    labels[torch.arange(9) >= lengths[:, None]] = -100
    return {**batch, "labels": labels}

def train(model, optimizer, loader):
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)  # <-
            optimizer.step()
            optimizer.zero_grad()
""",
    },
    ("FL039", TEXT): {
        "FL039 of a time step": filled(DRAW, {"use": "return schedule.add_noise(clean, noise, t)"}).replace(
            "src=0)", "src=0)  # <-"
        ),
        "FL039 by an Accelerator": """
from accelerate.utils import broadcast

def noisy(clean):
    level = torch.rand(1)
    level = broadcast(level)  # <-
    noise = torch.randn_like(clean)
    return torch.lerp(clean, noise, level)
""",
    },
    ("", TEXT): {
        "a scheduler whose count is set back": """
def train(model, optimizer, scheduler, loader, start):
    scheduler.last_epoch = start - 1
    for epoch in range(start, 9):
        scheduler.step()
        for x in loader:
            DESCEND optimizer model(x).square().mean()
""",
        "an index that is passed on plus one": filled(
            NO_SYNC, {"context": "model.no_sync() if (i + 1) % every else contextlib.nullcontext():"}
        )
        .replace("update(optimizer, i, every)\n\n", "update(optimizer, i + 1, every)\n\n")
        .replace("if (i + 1) % every == 0", "if i % every == 0"),
        "a loader without shards, started again": """
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def for_ever(rank):
    loader = DataLoader(TensorDataset(torch.randn(64, 4)[rank::8]), batch_size=8, shuffle=True)
    while True:
        yield from loader

def total(value):
    dist.all_reduce(value)
    return value
""",
    },
    ("", TOKENS.replace(".reshape(-1)", "")): {
        "one label for each sample": {
            "loss": 'F.cross_entropy(self.model(batch["tokens"]), labels, ignore_index=self.pad_id)'
        },
    },
    ("", DRAW): {
        "a draw for the ranks of one sample": {
            "group": ", group=group",
            "use": "return schedule.add_noise(clean, noise, t)",
        },
        "a draw that chooses a branch": {
            "use": "return schedule.add_noise(clean, noise, t) if t.item() < 500 else clean"
        },
    },
}


def test_the_loop_that_trains_comes_first():
    text = filled("""
        model = nn.DataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches():
            DESCEND optimizer model(x).square().mean()
            torch.cuda.empty_cache()
    """)
    found = check(ScriptProgram.of_text(HEAD + textwrap.dedent(text)))
    assert [f.rule for f in found] == ["FL104", "FL115"]


@pytest.mark.parametrize(("code", "template", "given"), cases(FORMS))
def test_the_form_is_found_on_its_lines(code, template, given):
    assert_found(HEAD, code, template, given, of_all=True)
