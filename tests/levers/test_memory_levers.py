"""Levers that save memory, on live programs: bitwise the plain losses, fewer bytes, and inactive where they
would not be.
"""

import pytest
from known_bad_levers import KNOWN_BAD

from flatout.agent.applier import Applier
from flatout.agent.ledger import Ledger
from flatout.levers import TABLE
from flatout.schema.enums import Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Skip
from flatout.schema.plan import Choice, Plan

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

LEVER = {lever.name: lever for lever in TABLE}
FACTS = Facts(cores=2, system="Linux")
RECOMPUTE = [{"blocks": 0.5}, {"blocks": 1.0}]


class Residual(nn.Module):
    def __init__(self, activation=nn.GELU):
        super().__init__()
        self.conv, self.norm, self.act, self.drop, self.mix = (
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
            activation(),
            nn.Dropout(0.3),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, x):
        return x + self.drop(self.mix(self.act(self.norm(self.conv(x)))))


class Twice(Residual):
    """The input of its activation is needed again."""

    def forward(self, x):
        y = self.conv(x)
        return x + self.act(y) + y.sigmoid()


class Kept(Residual):
    """The input of its activation is read from outside."""

    def forward(self, x):
        y = self.conv(x)
        self.seen = y.detach()
        return x + self.act(y)


def images(*blocks):
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(block() for block in blocks),
        nn.Flatten(),
        nn.LayerNorm(8 * 144),
        nn.Linear(8 * 144, 16),
        nn.Tanh(),
        nn.Linear(16, 5),
    )


def beside(program, epochs, *blocks):
    """Two programs, one of which has trained for some more epochs; the other one will draw the same numbers."""
    plain, live = (program(model=images(*blocks)) for _ in range(2))
    random = torch.get_rng_state()
    plain.train(epochs)
    torch.set_rng_state(random)
    return plain, live


@pytest.mark.parametrize("value", RECOMPUTE, ids=str)
def test_recompute_is_exact(program, value):
    """Switched on, off and on again between steps; dropout and running statistics must be the same too."""
    plain, live = beside(program, 3, Residual, Residual)
    live.train(0)
    for on in (True, False, True):
        undo = LEVER["recompute"].apply(live.context, value, Ledger()) if on else None
        live.train(1)
        if undo is not None:
            undo()
    assert live.context.reports == []
    assert live.losses == plain.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(live.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh])
@pytest.mark.parametrize("block", [Residual, Twice, Kept])
def test_inplace_only_where_nothing_changes(program, block, activation):
    plain, live = beside(program, 2, *[lambda: block(activation)] * 2)
    undo = LEVER["inplace"].apply(live.context, True, Ledger())
    live.train(2)
    placed = [m.inplace for m in live.model.modules() if type(m) is activation]
    undo()
    assert live.losses == plain.losses
    assert placed == [block is Residual] * 2
    assert not any(getattr(m, "inplace", False) for m in live.model.modules())


def test_inplace_is_tried_no_further_on_a_model_that_does_not_repeat_itself(program):
    """No activation gets the blame either, as where sums differ each time."""

    class Unsteady(Residual):
        calls = 0

        def forward(self, x):
            Unsteady.calls += 1
            return super().forward(x) * (1 + 1e-6 * Unsteady.calls)

    live = program(model=images(*[lambda: Unsteady(nn.ReLU)] * 2))
    live.train(0)
    LEVER["inplace"].apply(live.context, True, live.ledger)
    Unsteady.calls = 0
    live.model(torch.randn(2, 3, 12, 12))
    assert Unsteady.calls == 2 * (1 + 2)  # two blocks: the call itself, and two on copies
    assert not any(m.inplace for m in live.model.modules() if type(m) is nn.ReLU)


def test_inplace_leaves_the_batch_alone(program):
    """A first layer that would overwrite the script's input."""
    model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(432, 5))
    live = program(model=model)
    LEVER["inplace"].apply(live.context, True, Ledger())
    x = torch.randn(4, 3, 12, 12)
    before = x.clone()
    model(x)
    assert torch.equal(x, before)
    assert not model[0].inplace


@pytest.mark.parametrize(
    ("name", "value", "block"),
    [
        ("recompute", {"blocks": 1.0}, Residual),
        ("inplace", True, lambda: Residual(nn.ReLU)),
        ("memory_budget", 0.5, Residual),
    ],
)
def test_the_known_bad_shows_in_the_losses(program, name, value, block):
    """The guard of an exact lever compares bits; the guard of the budget compares gradients."""
    plain, live = beside(program, 1, block, block)
    KNOWN_BAD[name](live.context, value, Ledger())
    live.train(1)
    assert live.losses != plain.losses


def test_programs_left_alone_and_the_reasons(program):
    recompute = LEVER["recompute"]
    assert recompute.applies(FACTS, program(model=images()).context) == Skip(
        "there is no block to recompute: the model has no two blocks of the same class with at least two layers each"
    )
    blocks = program(model=images(Residual, Residual))
    assert recompute.applies(FACTS, blocks.context).values == ({"blocks": 0.5}, {"blocks": 1.0})
    blocks.model[1].conv.register_forward_hook(lambda *_: None)
    blocks.model[2].conv.register_forward_hook(lambda *_: None)
    assert "hook on a Conv2d" in recompute.applies(FACTS, blocks.context).reason
    with pytest.raises(LookupError, match="hook on a Conv2d"):
        recompute.apply(blocks.context, {"blocks": 1.0}, Ledger())
    blocks.context.create_graph_seen = True
    assert isinstance(recompute.applies(FACTS, blocks.context), Skip)
    assert isinstance(LEVER["memory_budget"].applies(FACTS, blocks.context), Skip)


def test_no_block_that_may_be_computed_twice_is_reported(program):
    class Counting(Residual):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    live = program(model=images(Counting, Counting))
    LEVER["recompute"].apply(live.context, {"blocks": 1.0}, Ledger())
    live.train()
    assert [(name, "between calls" in sentence) for name, sentence in live.context.reports] == [
        ("recompute", True)
    ]


def test_the_budget_needs_the_compiler_and_recompute_does_not_go_with_it(program):
    from torch._functorch import config

    live = program(model=images(Residual, Residual))
    applier = Applier(TABLE, FACTS, live.context)
    applier.start(Plan((Choice("memory_budget", 0.5), Choice("recompute", {"blocks": 1.0}))), (Moment.MODEL,))
    said = {o.choice.name: (o.applied, o.reason) for o in applier.outcomes}
    assert said == {
        "memory_budget": (False, "it requires compile, which is not applied"),
        "recompute": (True, ""),
    }
    applier.switch(())
    applier.switch(
        (Choice("compile", "default"), Choice("memory_budget", 0.5), Choice("recompute", {"blocks": 1.0}))
    )
    assert config.activation_memory_budget == 0.5
    assert [c.name for c, _ in applier._applied] == ["compile", "memory_budget"]
    applier.switch(())
    assert config.activation_memory_budget == 1.0
