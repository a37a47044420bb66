"""Faults that show only over a whole run: what is left at the end of an epoch, what is reduced twice, what a resume
leaves out, what each sample reads again. Each form is found on its marked lines only, and its twins are clean.
"""

from __future__ import annotations

import textwrap

import pytest

from flatout.diagnose.check import check
from flatout.probe.program import ScriptProgram

HEAD = """
import itertools
import json
import os
import pickle

import h5py
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
"""
WINDOW = """
    def train(model, optimizer, loader, n, epochs):
        {start}
        for epoch in range(epochs):
            {before}
            for i, x in enumerate({loader}):
                (model(x).square().mean() / n).backward()
                {count}
                if {test}:{mark}
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
window = {
    "start": "pass", "before": "pass", "loader": "loader", "count": "pass", "after": "pass", "mark": "",
    "test": "(i + 1) % n == 0",
}  # fmt: skip
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
FORMS = {
    "an index of the epoch": ("FL042", WINDOW.format(**window | {"mark": "  # <-"})),
    "a counter of the epoch": (
        "FL042",
        WINDOW.format(**window | {"before": "k = 0", "count": "k += 1", "test": "k % n == 0", "mark": "  # <-"}),
    ),
    "a method for each batch": ("FL042", IN_CLASS.format(mark="  # <-")),
    "a counter of the run": (
        "FL042",
        WINDOW.format(**window | {"start": "k = 0", "count": "k += 1", "test": "k % n == 0"}),
    ),
    "the last batch": ("FL042", WINDOW.format(**window | {"test": "(i + 1) % n == 0 or i + 1 == len(loader)"})),
    "a step after the loop": ("FL042", WINDOW.format(**window | {"after": "optimizer.step()"})),
    "cleared for each epoch": ("FL042", WINDOW.format(**window | {"before": "optimizer.zero_grad()"})),
    "a loader without end": ("FL042", WINDOW.format(**window | {"loader": "itertools.cycle(loader)"})),
    "a loader that is cut": ("FL042", WINDOW.format(**window | {"start": "assert len(loader) % n == 0"})),
    "a pasted reduction": (
        "FL043",
        REDUCED.format(inside="pass", after="dist.all_reduce(total); dist.all_reduce(total)  # <-"),
    ),
    "a reduction after a log": (
        "FL043",
        REDUCED.format(
            inside="pass",
            after="dist.all_reduce(total)\n        print(total.item())\n        if dist.is_initialized():\n            dist.all_reduce(total)  # <-",
        ),
    ),
    "a running total": ("FL043", REDUCED.format(inside="dist.all_reduce(total)  # <-", after="pass")),
    "two tensors": ("FL043", REDUCED.format(inside="pass", after="dist.all_reduce(total); dist.all_reduce(count)")),
    "two groups": (
        "FL043",
        REDUCED.format(
            inside="pass", after="dist.all_reduce(total, group=group); dist.all_reduce(total, group=other)"
        ),
    ),
    "a mean in between": (
        "FL043",
        REDUCED.format(inside="dist.all_reduce(total); total /= dist.get_world_size()", after="pass"),
    ),
    "a total that is cleared": (
        "FL043",
        REDUCED.format(inside="dist.all_reduce(total); print(total); total.zero_()", after="pass"),
    ),
    "two arms": (
        "FL043",
        REDUCED.format(
            inside="pass",
            after="if group:\n            dist.all_reduce(total)\n        else:\n            dist.all_reduce(total)",
        ),
    ),
    "a largest value": (
        "FL043",
        REDUCED.format(inside="dist.all_reduce(total, op=dist.ReduceOp.MAX)", after="pass"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_found_on_its_line(form):
    code, body = FORMS[form]
    text = HEAD + textwrap.dedent(body)
    found = [f.place.line for f in check(ScriptProgram.of_text(text), [code])]
    assert found == [at for at, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]
