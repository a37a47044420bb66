"""Precision by name: settings are restored, and unavailable precisions are rejected with an error."""

import logging

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout import Loop  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402


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
        ("fp16", torch.float16, r"Remove model\.half"),
        ("bf16-master", torch.bfloat16, "precision='bf16-master' is not supported. Use one of float32"),
        ("fp8", torch.float32, "precision='fp8' is not supported"),
    ],
)
def test_unavailable_precisions_are_rejected(name, dtype, words):
    model = network(dtype)
    with pytest.raises(LoopError, match=words):
        Loop(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, [], precision=name)
