"""Forms of a mistake that a rule's page does not show: the rule finds them, on the marked line only."""

import pytest
from forms import TEXT, assert_found

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model, other = nn.Linear(4, 2), nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)), batch_size=8, shuffle=True)
"""
FORMS = {
    "FL020": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(other(x), y).backward()
    optimizer.step()  # <-
""",
    "FL201": """
def accuracy(model, loader):
    correct = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()  # <-
    return correct

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        DESCEND optimizer nn.functional.cross_entropy(model(x), y)
    print(accuracy(model, loader))
""",
    "FL311": """
def scaled(x, by=1.0):
    if isinstance(by, float):
        by = torch.tensor(by)
    return x * by

print(scaled(torch.ones(3), torch.ones(1)), torch.tensor(torch.ones(2)))  # <-
""",
    "FL119": """
optimizer = torch.optim.AdamW([{"params": p, "lr": 1e-3} for p in model.parameters()])  # <-
for x, y in loader:
    DESCEND optimizer nn.functional.cross_entropy(model(x), y)
""",
    "FL036": """
import numpy as np

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.seed = 3

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.zeros(4) + np.random.default_rng(self.seed + 1).random()  # <-
""",
}


@pytest.mark.parametrize("code", FORMS)
def test_the_second_form_is_found_on_its_line(code):
    assert_found(HEAD, code, TEXT, FORMS[code], of_all=True)
