"""The rule of accumulation: however a batch is split, the gradient and the trajectory are those of the whole
effective batch.
"""

import copy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout import Loop  # noqa: E402

TIGHT = {torch.float64: 1e-12, torch.float32: 1e-6}
CLASSES, VOCABULARY, LENGTH = 5, 11, 6


class Tagger(nn.Module):
    """Tokens [B, L] -> scores [B, L, V]; dropout of 0 still uses random numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.drop, self.cell, self.head = (
            nn.Embedding(VOCABULARY, 12),
            nn.Dropout(0.0),
            nn.GRU(12, 8, batch_first=True),
            nn.Linear(8, VOCABULARY),
        )

    def forward(self, tokens):
        return self.head(self.cell(self.drop(self.table(tokens)))[0])


def perceptron():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


def mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def summed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def by_tokens(model, batch):
    """The mean over the tokens that are not padding (0); each sample has a different number of them."""
    scores, wanted = model(batch["tokens"]), batch["wanted"]
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0), (
        wanted != 0
    ).sum()


def by_tokens_counted(model, batch):
    loss, count = by_tokens(model, batch)
    return loss, int(count)


def images(count, dtype, generator):
    return [
        torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype),
        torch.randint(0, CLASSES, (count,), generator=generator),
    ]


def sentences(count, dtype, generator):
    wanted = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
    return {
        "tokens": torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator),
        "wanted": wanted * (torch.arange(LENGTH) < lengths[:, None]),
        "names": [f"sentence {at}" for at in range(count)],
    }


def parts(batch, size):
    """The batches of a loader with this batch size."""
    count = len(batch[0]) if isinstance(batch, list) else len(batch["names"])
    cut = [slice(at, at + size) for at in range(0, count, size)]
    return [
        [t[each] for t in batch] if isinstance(batch, list) else {name: v[each] for name, v in batch.items()}
        for each in cut
    ]


CASES = {
    "perceptron, mean": (perceptron, mean, images),
    "perceptron, sum": (perceptron, summed, images),
    "convolution, mean": (convolutional, mean, images),
    "tokens, a tensor": (Tagger, by_tokens, sentences),
    "tokens, a number": (Tagger, by_tokens_counted, sentences),
}


def model_of(make, dtype):
    torch.manual_seed(7)
    return make().to(dtype)


def trained(make, dtype, loss_fn, loader, optimizer=torch.optim.SGD, **more):
    """Losses and gradients of each step, and the final weights."""
    model = model_of(make, dtype)
    losses, gradients = [], []
    for step in Loop(model, optimizer(model.parameters(), lr=1e-2), loss_fn, loader, **more):
        losses.append(step.loss.clone())
        gradients.append([p.grad.clone() for p in model.parameters()])
    return losses, gradients, [p.detach().clone() for p in model.parameters()]


def distance(ours, theirs):
    """Of two lists of tensors, relative to the second."""
    ours, theirs = torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs])
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
@given(
    count=st.integers(2, 40),
    loaders=st.integers(2, 9),
    window=st.integers(1, 5),
    micro=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_the_gradient_is_the_whole_batchs(name, dtype, count, loaders, window, micro, seed):
    make, loss_fn, data = CASES[name]
    batch = data(count, dtype, torch.Generator().manual_seed(seed))
    divided = trained(
        make, dtype, loss_fn, parts(batch, loaders), effective_batch=window * loaders, micro_batch=micro
    )
    whole = trained(make, dtype, loss_fn, parts(batch, window * loaders))
    assert len(divided[0]) == len(whole[0])
    assert distance(divided[1][0], whole[1][0]) < TIGHT[dtype]
    assert distance(divided[0][:1], whole[0][:1]) < TIGHT[dtype]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("more", [{}, {"clip": 0.05}], ids=["plain", "clipped"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_trajectory_of_twenty_steps(name, more, optimizer):
    make, loss_fn, data = CASES[name]
    batch = data(20 * 12 - 5, torch.float64, torch.Generator().manual_seed(3))  # the last window is short
    divided = trained(
        make, torch.float64, loss_fn, parts(batch, 4), optimizer, effective_batch=12, micro_batch=3, **more
    )
    whole = trained(make, torch.float64, loss_fn, parts(batch, 12), optimizer, **more)
    assert len(divided[0]) == len(whole[0]) == 20
    assert distance(divided[0], whole[0]) < 1e-11
    assert distance(divided[2], whole[2]) < 1e-11


def raw(make, loss_fn, loader, window, *, divide, zero_inside=False):
    """Hand-written accumulation. ``divide`` by the window or by the count."""
    model = model_of(make, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for start in range(0, len(loader), window):
        batches = loader[start : start + window]
        counts = [float(loss_fn(model, batch)[1]) for batch in batches]
        optimizer.zero_grad()
        for batch, count in zip(batches, counts, strict=True):
            if zero_inside:
                optimizer.zero_grad()
            loss, _ = loss_fn(model, batch)
            (loss / len(batches) if divide == "window" else loss * count / sum(counts)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_silent_mistakes_are_distinguished():
    """Hand-written variants against the Loop: the right one is equal to it, the known-bad ones are not."""
    batch = sentences(48, torch.float64, torch.Generator().manual_seed(5))
    loader = parts(batch, 4)
    ours = trained(Tagger, torch.float64, by_tokens, loader, effective_batch=16)[2]
    assert distance(ours, raw(Tagger, by_tokens, loader, 4, divide="tokens")) < 1e-12
    assert distance(ours, raw(Tagger, by_tokens, loader, 4, divide="window")) > 1e-6
    assert distance(ours, raw(Tagger, by_tokens, loader, 4, divide="tokens", zero_inside=True)) > 1e-6


def test_a_micro_batch_without_a_token_has_no_weight():
    batch = sentences(8, torch.float64, torch.Generator().manual_seed(5))
    batch["wanted"][4:6] = 0
    divided, whole = (
        trained(Tagger, torch.float64, by_tokens, [batch], micro_batch=2),
        trained(Tagger, torch.float64, by_tokens, [batch]),
    )
    assert distance(divided[1][0], whole[1][0]) < 1e-12
    assert divided[0][0].item() == pytest.approx(whole[0][0].item(), rel=1e-12)


def test_one_micro_batch_is_the_raw_loop_bit_for_bit():
    batch = images(100, torch.float32, torch.Generator().manual_seed(1))
    loader = parts(batch, 8)
    model = model_of(
        lambda: nn.Sequential(perceptron(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)), torch.float32
    )
    other = copy.deepcopy(model)
    optimizer, losses = torch.optim.AdamW(other.parameters()), []
    torch.manual_seed(0)
    for _ in range(2):
        for each in loader:
            optimizer.zero_grad()
            loss = mean(other, each)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.manual_seed(0)
    assert [
        step.loss.item()
        for step in Loop(model, torch.optim.AdamW(model.parameters()), mean, loader, epochs=2)
    ] == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_schedulers_count_optimizer_steps_and_the_optimizer_sees_each_effective_batch_once():
    batch = images(50, torch.float32, torch.Generator().manual_seed(1))
    model = model_of(perceptron, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps = list(
        Loop(
            model,
            optimizer,
            mean,
            parts(batch, 5),
            effective_batch=20,
            micro_batch=2,
            scheduler=scheduler,
            epochs=2,
        )
    )
    assert len(stepped) == len(steps) == 6  # 20, 20 and 10 samples an epoch
    assert [step.samples for step in steps] == [20, 20, 10] * 2
    assert [step.lr for step in steps] == [0.5**at for at in range(6)]
    assert [step.parts for step in steps] == [12, 12, 6] * 2
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 1]
    assert [step.ends_epoch for step in steps] == [False, False, True] * 2
    assert all(a.index + 1 == b.index for a, b in pairwise(steps))
