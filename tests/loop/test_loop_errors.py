"""Errors and messages of a Loop, its results in addition to the loss, precision, and the imports of `import
flatout`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass

import pytest
from limits import hang_s

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import flatout  # noqa: E402
from flatout.loop.batches import move, part_of, size_of  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count=4, size=6):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def loop(loss=loss_fn, loader=None, model=None, **more):
    torch.manual_seed(0)
    model = model or nn.Linear(5, 3)
    return flatout.Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        batches() if loader is None else loader,
        **more,
    )


def contrastive(model, batch):
    """Compares each sample with all others of the batch."""
    found = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def over_some(model, batch):
    """The mean over the samples of class 0, without reporting their number."""
    chosen = batch[1] == 0
    return nn.functional.cross_entropy(model(batch[0])[chosen], batch[1][chosen])


def summed_with_a_count(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def by_hand_over_the_batch(model, batch):
    """Batch normalisation in a function, visible in no module, and only in training."""
    x = model(batch[0])
    return nn.functional.cross_entropy((x - x.mean(0)) / x.std(0) if model.training else x, batch[1])


@pytest.mark.parametrize("loss", [contrastive, over_some, by_hand_over_the_batch])
@pytest.mark.parametrize("how", [{"micro_batch": 2}, {"effective_batch": 12}], ids=str)
def test_unsplittable_batches_are_rejected(loss, how):
    with pytest.raises(LoopError, match=r"does not follow from the losses of its parts.*allow_inexact"):
        list(loop(loss, **how))
    assert len(list(loop(loss, allow_inexact=True, on_nan="ignore", **how))) == (
        4 if "micro_batch" in how else 2
    )
    assert len(list(loop(loss, on_nan="ignore"))) == 4  # whole batches need no check


def test_a_count_that_is_not_averaged_over():
    with pytest.raises(LoopError, match="it is a sum"):
        list(loop(summed_with_a_count, micro_batch=2))


def test_a_declared_reduction_is_trusted():
    """Then no check runs, and a number returned with a sum is not used as a divisor."""
    steps = list(loop(summed_with_a_count, micro_batch=2, reduction="sum"))
    whole = list(loop(summed_with_a_count))
    assert [float(step.loss) for step in steps] == pytest.approx(
        [float(step.loss) for step in whole], rel=1e-5
    )


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3, track_running_stats=False)],
    ids=lambda m: type(m).__name__,
)
def test_batch_normalisation_is_rejected_with_its_name(norm):
    with pytest.raises(LoopError, match=r"uses batch normalisation \(module 1\)"):
        list(loop(model=nn.Sequential(nn.Linear(5, 3), norm), micro_batch=2))


def test_frozen_batch_normalisation_can_be_split():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval())
    assert [step.parts for step in loop(model=model, micro_batch=2)] == [3] * 4


def test_the_check_leaves_no_trace():
    """Running statistics and random states are the same whether or not a batch is split."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda module, args, out: module.calls.add_(1) and None)
    steps = iter(loop(model=model, micro_batch=3))
    torch.manual_seed(1)
    next(steps)
    assert model.calls == 2
    after = torch.rand(())
    torch.manual_seed(1)
    nn.functional.dropout(torch.ones(3, 3)), nn.functional.dropout(torch.ones(3, 3))
    assert torch.equal(after, torch.rand(()))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"effective_batch": 2.5}, "effective_batch=2.5"),
        ({"micro_batch": -1}, "micro_batch=-1"),
        ({"clip": 0}, "clip=0"),
        ({"reduction": "average"}, "reduction='average'"),
        ({"metrics": {"a": "median"}}, "median"),
        ({"precision": "half"}, "precision='half'"),
        ({"on_nan": "go"}, "on_nan='go'"),
        ({"effective_batch": 7}, "Use 6 or 12"),
        ({"loader": []}, "no batch"),
        ({"loader": [3]}, "no tensor"),
        ({"loss": lambda model, batch: 3.0}, "gave a float"),
        ({"loss": lambda model, batch: (model(batch[0]).sum(), 1, 2)}, "a tuple of Tensor, int, int"),
        ({"loss": lambda model, batch: model(batch[0]).sum(1), "micro_batch": 2}, r"shape \[6\]"),
        (
            {"loader": [(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long))] * 2, "effective_batch": 2},
            'reduction="mean"',
        ),
    ],
)
def test_a_mistake_gets_a_clear_error(more, words):
    with pytest.raises(LoopError, match=words):
        list(loop(**more))


def test_an_optimizer_of_something_else():
    with pytest.raises(LoopError, match=r"torch\.optim"):
        flatout.Loop(nn.Linear(1, 1), "adam", loss_fn, [])
    with pytest.raises(LoopError, match="LBFGS runs forward and backward several times"):
        flatout.Loop(model := nn.Linear(1, 1), torch.optim.LBFGS(model.parameters()), loss_fn, [])
    with pytest.raises(LoopError, match="nothing to train"):
        flatout.Loop(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], 0.1), loss_fn, [])


def test_an_iterator_is_distinguished_from_a_loader():
    with pytest.raises(LoopError, match="only once"):
        list(loop(loader=iter(batches()), epochs=2))


def test_metrics_are_combined_as_requested():
    def with_metrics(model, batch):
        scores = model(batch[0])
        right = (scores.argmax(1) == batch[1]).sum()
        return loss_fn(model, batch), {
            "right": right,
            "accuracy": right / len(batch[1]),
            "largest": scores.max(),
            "last": len(batch[1]),
        }

    metrics = {"right": "sum", "largest": "max", "last": "last"}
    whole, divided = (
        list(loop(with_metrics, metrics=metrics)),
        list(loop(with_metrics, metrics=metrics, micro_batch=4)),
    )
    for a, b in zip(whole, divided, strict=True):
        assert a.metrics["right"] == b.metrics["right"]
        assert float(a.metrics["accuracy"]) == pytest.approx(float(b.metrics["accuracy"]))
        assert float(a.metrics["largest"]) == pytest.approx(float(b.metrics["largest"]), rel=1e-5)
        assert (a.metrics["last"], b.metrics["last"]) == (6, 3)
        assert not a.metrics["largest"].requires_grad


def test_steps_end_the_loop_and_it_continues_from_there():
    again = loop(epochs=3, steps=5)
    assert [step.index for step in again] == [0, 1, 2, 3, 4]
    assert [step.index for step in again] == [5, 6, 7, 8, 9]


def test_samples_per_s_counts_processed_samples():
    steps = list(loop(epochs=20))
    assert steps[-1].samples_per_s > 0
    assert "Step(79" in repr(steps[-1])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision_trains_with_weights_in_float32(precision):
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    losses = [
        float(step.loss)
        for step in loop(model=model, precision=precision, epochs=40, effective_batch=12, micro_batch=3)
    ]
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_scaler_skips_a_step_and_the_scheduler_waits():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss(model, batch):
        return loss_fn(model, batch) * (1e30 if infinite.pop(0) else 1.0)

    infinite = [False, True, False, False]
    steps = list(
        flatout.Loop(model, optimizer, loss, batches(), precision="fp16", scheduler=scheduler, clip=1.0)
    )
    assert [bool(step.skipped) for step in steps] == [False, True, False, False]
    assert "loss scale" in steps[1].skipped
    assert [step.lr for step in steps] == [1.0, 0.5, 0.5, 0.25]
    assert all(p.isfinite().all() for p in model.parameters())


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def test_a_nan_is_traced_to_its_module_before_any_weight_moves():
    model = nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.ReLU(), Root()), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(100.0)

    model[1][0].register_forward_hook(lambda module, args, out: -out if steps.index == 2 else out)
    steps, weights = loop(model=model), []

    def train():
        for _ in steps:
            weights.append([p.detach().clone() for p in model.parameters()])

    with pytest.raises(
        LoopError,
        match=r"the loss of step 2 is nan: module 1\.1 \(Root\) made it from finite inputs.*before this step",
    ):
        train()
    assert len(weights) == 2
    assert all(torch.equal(a, b) for a, b in zip(weights[-1], model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model, batch: batch[0].fill_(float("nan")), "inputs of module .* are not finite"),
        (lambda model, batch: model.weight.data.fill_(float("inf")), "parameter weight is not finite"),
    ],
    ids=["batch", "weights"],
)
def test_a_nan_of_the_batch_or_of_the_weights(spoil, words):
    def loss(model, batch):
        spoil(model, batch)
        return loss_fn(model, batch)

    with pytest.raises(LoopError, match=words):
        list(loop(loss))
    assert len(list(loop(loss, on_nan="ignore"))) == 4


# -- batches

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: list[str]
    scale: float = 2.0


X = torch.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[2:4]),
        ((X, X[:, 0]), (X[2:4], X[2:4, 0])),
        ([X, "abc"], [X[2:4], "abc"]),
        ({"x": X, "names": list("abcdef")}, {"x": X[2:4], "names": ["c", "d"]}),
        (Pair(X, {"z": (X, torch.tensor(3.0))}), Pair(X[2:4], {"z": (X[2:4], torch.tensor(3.0))})),
        (Sample(X, list("abcdef")), Sample(X[2:4], ["c", "d"])),
        ((X, torch.eye(3)), (X[2:4], torch.eye(3))),
    ],
    ids=["tensor", "tuple", "list", "mapping", "named tuple", "dataclass", "a tensor of the whole batch"],
)
def test_parts_of_batches_of_every_type(batch, expected):
    part = part_of(batch, 2, 4, 6)
    assert type(part) is type(batch)
    assert str(part) == str(expected)
    assert size_of(batch) == 6
    assert size_of(part) == 2
    assert str(move(batch, torch.device("cpu"))) == str(batch)


@pytest.mark.processes
def test_importing_flatout_stays_light():
    """The library's names are loaded on first use."""
    code = "import sys, flatout; assert 'torch' not in sys.modules; flatout.Plan; assert 'torch' not in sys.modules; flatout.Loop; flatout.Step"
    assert subprocess.run([sys.executable, "-c", code], timeout=hang_s(60)).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Looop'"):
        _ = flatout.Looop
