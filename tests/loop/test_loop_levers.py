"""A plan on the objects of a Loop.

Levers apply or say why not, results are those of the plain loop, and everything is undone at the end.
"""

import logging

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler, TensorDataset  # noqa: E402

from flatout import Loop, Plan  # noqa: E402
from flatout.agent.loaders import arguments_of  # noqa: E402
from flatout.schema.errors import LoopError, PlanError  # noqa: E402
from flatout.schema.plan import Choice  # noqa: E402

pytestmark = pytest.mark.processes


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(64, 3, 8, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    )


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make(**loader):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        DataLoader(data(), batch_size=16, shuffle=True, **loader),
    )


LOOPS = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while LOOPS:
        LOOPS.pop().close()


def trained(plan, **loader):
    model, optimizer, batches = make(**loader)
    torch.manual_seed(1)
    loop = Loop(model, optimizer, loss_fn, batches, plan=plan, epochs=2)
    LOOPS.append(loop)
    return [step.loss.item() for step in loop], loop


def plan(**choices):
    return Plan(tuple(Choice(name, value) for name, value in choices.items()))


def test_levers_hold_and_the_losses_are_the_plain_ones(caplog):
    caplog.set_level(logging.INFO, "flatout")
    plain, _ = trained(None)
    losses, loop = trained(
        plan(malloc="tcmalloc", channels_last=True, fused_optimizer=True, loader={"workers": 1})
    )
    assert losses == pytest.approx(plain, rel=1e-4)
    held = {outcome.choice.name: outcome.applied for outcome in loop.outcomes}
    assert held == {"malloc": False, "loader": True, "channels_last": True, "fused_optimizer": True}
    assert "before the program starts" in next(o.reason for o in loop.outcomes if not o.applied)
    assert loop.optimizer.param_groups[0]["fused"]
    assert loop.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert loop.loader.num_workers == 1
    assert "applied" in caplog.text
    assert "malloc is not applied" in caplog.text
    loop.close()
    assert not loop.optimizer.param_groups[0]["fused"]


def test_an_exact_lever_of_the_loader_is_exact():
    plain, _ = trained(None, num_workers=2)
    losses, loop = trained(plan(loader={"workers": 0}), num_workers=2)
    assert losses == plain
    assert loop.loader.num_workers == 0


def test_the_plan_of_a_file(tmp_path):
    file = tmp_path / "flatout.toml"
    file.write_text(plan(channels_last=True).to_toml())
    _, loop = trained(file)
    assert [o.choice.name for o in loop.outcomes if o.applied] == ["channels_last"]
    with pytest.raises(PlanError, match="there is no plan"):
        trained(tmp_path / "none.toml")
    with pytest.raises(LoopError, match="plan is a dict"):
        trained({"channels_last": True})


def test_without_a_plan_nothing_is_patched():
    init, loader = DataLoader.__init__, torch.utils.data.dataloader._BaseDataLoaderIter.__init__
    trained(None)
    assert DataLoader.__init__ is init
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__init__ is loader


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle": True},
        {
            "batch_size": 7,
            "drop_last": True,
            "num_workers": 2,
            "persistent_workers": True,
            "prefetch_factor": 3,
        },
        {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        {"sampler": RandomSampler(data(), num_samples=20)},
        {"batch_sampler": [[0, 1], [2, 3, 4]]},
        {"batch_size": None},
        {"collate_fn": list, "batch_size": 2},
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_a_recreated_loader_gives_the_same_batches(arguments):
    """The arguments are read back from the loader itself."""

    def batches(loader):
        torch.manual_seed(4)
        if loader.generator is not None:
            loader.generator.manual_seed(3)
        return [str(batch) for batch in loader]

    first = DataLoader(data(), **arguments)
    assert batches(DataLoader(**arguments_of(first, torch))) == batches(first)
