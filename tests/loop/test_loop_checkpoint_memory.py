"""Levers that save memory in a Loop, and the savings of accumulation: bitwise the same losses,
fewer bytes.
"""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout import Loop, Plan  # noqa: E402
from flatout.schema.plan import Choice  # noqa: E402

WIDTH, BATCH = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.drop, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Dropout(0.2),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Kept:
    """The peak of the bytes that autograd keeps, without parameters and batches."""

    def __init__(self, *known):
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.live, self.now, self.most = {}, 0, 0
        meter = self

        class Packed:
            def __init__(self, tensor):
                storage = tensor.untyped_storage()
                self.tensor, self.place = tensor.detach(), storage.data_ptr()
                if self.place not in meter.known:
                    count = meter.live.get(self.place, (0, 0))[0]
                    meter.live[self.place] = count + 1, storage.nbytes()
                    meter.now += storage.nbytes() if not count else 0
                    meter.most = max(meter.most, meter.now)

            def __del__(self):
                if self.place not in meter.known:
                    count, size = meter.live.pop(self.place)
                    if count > 1:
                        meter.live[self.place] = count - 1, size
                    else:
                        meter.now -= size

        self.hooks = torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor)


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


def trained(steps=4, meter=False, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    batches = [(torch.randn(BATCH, WIDTH),) for _ in range(steps)]
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, batches, **more)
    kept = Kept(*model.parameters(), *(batch[0] for batch in batches))
    losses = []
    for step in loop:
        losses.append(step.loss.item())
        if meter and step.index == 1:
            kept.hooks.__enter__()
    if meter:
        kept.hooks.__exit__(None, None, None)
    return losses, kept.most, loop


@pytest.mark.parametrize(
    ("value", "most"),
    [({"blocks": 0.5}, 0.65), ({"blocks": 1.0}, 0.15)],
    ids=str,
)
def test_a_plan_that_saves_memory(value, most):
    plain, whole, _ = trained(meter=True)
    losses, kept, loop = trained(meter=True, plan=Plan((Choice("recompute", value),)))
    assert losses == plain
    assert [outcome.applied for outcome in loop.outcomes] == [True]
    assert kept <= most * whole
    loop.close()
    assert all("forward" not in vars(module) for module in loop.model.modules())


def test_activations_of_four_micro_batches_are_at_most_three_tenths():
    _, whole, _ = trained(meter=True, reduction="mean")
    shares = [
        trained(meter=True, reduction="mean", micro_batch=BATCH // parts)[1] / whole for parts in (2, 4, 8)
    ]
    assert shares[1] <= 0.30
    assert shares[0] <= 0.55
    assert shares[2] <= 0.18


def test_both_together():
    _, whole, _ = trained(meter=True, reduction="mean")
    _, kept, _ = trained(
        meter=True,
        reduction="mean",
        micro_batch=BATCH // 4,
        plan=Plan((Choice("recompute", {"blocks": 0.5}),)),
    )
    assert kept <= 0.15 * whole
