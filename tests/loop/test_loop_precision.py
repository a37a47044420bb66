"""Precision by name: settings are restored, master weights are exact, and unavailable precisions are rejected
with an error.
"""

from __future__ import annotations

import copy
import logging

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout import Loop  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402

NARROW = {"bf16-master": torch.bfloat16, "fp16-master": torch.float16}
FIRST_SCALE = 2.0**16  # GradScaler's


def data(dtype=torch.float32, count=6):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 6, generator=generator).to(dtype), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def by_hand(model, batches, scale, parts, clip, lost=()):
    """Float32 copies with gradients accumulated in them, one update, rounded back.

    Batches with these numbers are skipped.
    """
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for at, (x, y) in enumerate(batches):
        if at in lost:
            scale /= 2
            continue
        optimizer.zero_grad()
        for few, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss_fn(model, (few, wanted)) / parts * scale).backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad = p.grad.float() + (0 if master.grad is None else master.grad)
                p.grad = None
        for master in masters:
            master.grad /= scale
        if clip:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return masters


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", NARROW)
def test_master_weights_are_those_of_a_loop_by_hand(name, parts, clip):
    """Equal to the last bit, with micro-batches, clipping, the scaler, and a step that it skips."""
    dtype = NARROW[name]
    model = network(dtype)
    other, keys, lost = copy.deepcopy(model), list(model.state_dict()), (2,) if name == "fp16-master" else ()
    batches = data(dtype)

    def loss(model, batch):
        return loss_fn(model, batch) * (1e30 if loop.index in lost else 1.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = list(model.parameters())
    loop = Loop(
        model, optimizer, loss, batches, precision=name, micro_batch=8 // parts, clip=clip, reduction="mean"
    )
    skipped = [step.index for step in loop if step.skipped]
    masters = by_hand(other, batches, FIRST_SCALE if name == "fp16-master" else 1.0, parts, clip, lost)
    assert skipped == list(lost)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optimizer.param_groups[0]["params"], masters, strict=True))
    assert list(model.state_dict()) == keys
    assert all(a is b and a.dtype == dtype for a, b in zip(own, model.parameters(), strict=True))
    loop.close()
    assert all(a is b for a, b in zip(own, optimizer.param_groups[0]["params"], strict=True))
    assert optimizer.state[own[0]]["exp_avg"].dtype == dtype


def test_small_updates_lost_in_narrow_weights_are_kept():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    batches = [torch.ones(1, 1, dtype=torch.bfloat16)] * 8
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        lambda m, b: m(b).sum(),
        batches,
        precision="bf16-master",
    )
    assert [float(model.weight.detach()) for _ in loop][-1] == 0.9921875
    assert float(loop.optimizer.param_groups[0]["params"][0].detach()) == pytest.approx(0.992)


def test_out_of_memory_with_master_weights():
    """The step is repeated, and no gradient of the failed attempt remains."""
    batches, weights = data(torch.bfloat16), []
    for failing in (False, True):
        model, once = network(torch.bfloat16), iter([failing])

        def loss(model, batch, once=once):
            found = loss_fn(model, batch)
            if len(batch[0]) < 8 and next(once, False):
                raise torch.OutOfMemoryError("out of memory")
            return found

        loop = Loop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss,
            batches,
            precision="bf16-master",
            micro_batch=4,
            reduction="mean",
        )
        list(loop)
        weights.append([p.detach().clone() for p in loop.parameters])
    assert all(torch.allclose(a, b, rtol=2e-2, atol=1e-3) for a, b in zip(*weights, strict=True))
    assert loop.micro_batches.limit == 2


def test_weights_loaded_between_two_steps_are_used():
    model = network(torch.bfloat16)
    saved = {name: value.clone() for name, value in network(torch.bfloat16).state_dict().items()}
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn,
        data(torch.bfloat16),
        precision="bf16-master",
    )
    for step in loop:
        if step.index == 2:
            model.load_state_dict({name: value + 1 for name, value in saved.items()})
    assert all(torch.equal(value, saved[name] + 1) for name, value in model.state_dict().items())


def test_a_recreated_loop_takes_over_the_optimizer():
    """As in a notebook cell that runs twice."""
    model = network(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        list(Loop(model, optimizer, loss_fn, data(torch.bfloat16), precision="bf16-master"))
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}
    assert len(optimizer.state) == 4


def test_tf32_is_switched_and_restored(caplog):
    caplog.set_level(logging.WARNING, "flatout")
    owners = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = (
        torch.get_float32_matmul_precision(),
        [owner.fp32_precision for owner in owners],
        torch.backends.cudnn.allow_tf32,
    )
    model = network(torch.float32)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, data(), precision="tf32")
    assert torch.get_float32_matmul_precision() == "high"
    list(loop)
    loop.close()
    assert (
        torch.get_float32_matmul_precision(),
        [owner.fp32_precision for owner in owners],
        torch.backends.cudnn.allow_tf32,
    ) == before
    if not torch.cuda.is_available():
        assert "changes nothing here" in caplog.text


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("bf16-master", torch.float32, r"those of this model are float32\. Call model\.bfloat16"),
        ("fp16-master", torch.bfloat16, r"Call model\.half"),
        ("fp16", torch.float16, "fp16-master"),
        ("fp8", torch.float32, "precision='fp8' is not supported"),
    ],
)
def test_unavailable_precisions_are_rejected(name, dtype, words):
    model = network(dtype)
    with pytest.raises(LoopError, match=words):
        Loop(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, [], precision=name)
