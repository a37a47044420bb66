"""Repeated blocks computed twice: found by structure, bitwise the same, left alone where a second computation
would differ.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout.levers.recompute import RecomputedBlock, repeated, spread, why_not  # noqa: E402

WIDTH = 8


class Residual(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Dropout(0.4)

    def forward(self, x):
        return x + self.drop(self.norm(self.first(x)).relu())


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.inner["blocks"]:
            x = block(x)
        return self.head(x)


def again(model):
    """The model with its blocks run through Block, and their reports."""
    said = []
    for module in repeated(torch, model):
        block, forward = RecomputedBlock(torch, module, said.append), module.forward
        module.forward = lambda *args, block=block, forward=forward, **kwargs: block.forward(
            forward, args, kwargs
        )
    return said


def trained(model, steps=4):
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]


def test_blocks_are_found_by_structure():
    stack = Stack(*(Residual() for _ in range(3)))
    assert repeated(torch, stack) == list(stack.inner["blocks"])
    assert repeated(torch, nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))) == []  # layers are no blocks
    siblings = nn.Module()
    siblings.one, siblings.two, siblings.other = Residual(), Residual(), nn.Linear(2, 2)
    assert repeated(torch, siblings) == [siblings.one, siblings.two]
    outer = nn.Sequential(Stack(Residual(), Residual()), Stack(Residual(), Residual()))
    assert repeated(torch, outer) == list(outer)  # the outermost
    assert [spread(list("abcdef"), share) for share in (0.5, 1.0, 0.34, 0.01)] == [
        list("bdf"),
        list("abcdef"),
        list("cf"),
        ["a"],
    ]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d,
        lambda width: nn.BatchNorm1d(width, momentum=None),
        nn.LayerNorm,
        lambda width: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
    ],
    ids=["batch", "cumulative", "layer", "spectral"],
)
def test_computing_twice_equals_once_bit_for_bit(norm):
    """Dropout uses the same random numbers, running statistics change once, and blocks with their own state
    are left alone.
    """
    torch.manual_seed(0)
    model = Stack(*(Residual(norm) for _ in range(3)))
    counterpart = copy.deepcopy(model)
    said = again(counterpart)
    for plain, mine in zip(trained(model), trained(counterpart), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, mine, strict=True)
        )
    assert bool(said) == any("parametrizations" in name for name, _ in model.named_modules())
    counterpart.eval()
    model.eval()
    assert torch.equal(counterpart(torch.ones(2, WIDTH)), model(torch.ones(2, WIDTH)))


class Changing(Residual):
    def forward(self, x):
        return super().forward(x.mul_(1.5))


class Counting(Residual):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Listing(Residual):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Changing, "changes its own input"), (Counting, "between calls"), (Listing, "between calls")],
)
def test_a_block_that_cannot_run_twice_is_left_alone(kind, says):
    torch.manual_seed(0)
    model = Stack(kind(), kind())
    counterpart = copy.deepcopy(model)
    said = again(counterpart)
    for plain, mine in zip(trained(model), trained(counterpart), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, mine, strict=True)
        )
    assert len(said) == 2
    assert all(says in sentence for sentence in said)


def test_facts_known_without_running():
    block = Residual()
    assert why_not(torch, block) == ""
    block.first.register_forward_hook(lambda *_: None)
    assert "hook on a Linear" in why_not(torch, block)
    assert "SyncBatchNorm" in why_not(torch, nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert "torch.jit" in why_not(torch, torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
