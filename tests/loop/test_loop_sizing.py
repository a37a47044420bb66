"""The fastest micro-batch that fits: with given times, and in a real loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flatout import Loop  # noqa: E402
from flatout.loop.sizing import SizingSample, search_fastest  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402


def played(size, ms_of, fits=lambda size: True):
    """The choice where a step in micro-batches of each size takes this long, and the steps used."""
    search = search_fastest(size)
    candidate, steps = next(search), []
    while True:
        steps.append(candidate)
        try:
            candidate = search.send(SizingSample(ms_of(candidate), fits(candidate)))
        except StopIteration as over:
            return over.value, steps


def test_the_fastest_not_the_largest():
    found, steps = played(64, lambda size: {64: 20.0, 32: 12.0, 16: 11.0, 8: 15.0, 4: 20.0}[size])
    assert found.micro_batch == 16
    assert set(steps) == {64, 32, 16, 8, 4}  # 2 and 1 are not tried after two that were slower
    assert "64: 20 ms" in found.sentence()


def test_sizes_that_do_not_fit_are_not_chosen():
    found, steps = played(64, lambda size: 1000.0 / size, lambda size: size <= 16)
    assert found.micro_batch == 16
    assert found.ms[64] is None
    assert steps.count(64) == steps.count(32) == 1
    assert "32: does not fit" in found.sentence()


def test_of_two_that_are_as_fast_the_one_with_less_memory():
    assert played(8, lambda size: {8: 10.0, 4: 10.1, 2: 12.0, 1: 20.0}[size])[0].micro_batch == 4


@given(st.integers(1, 5000), st.floats(0.01, 10), st.floats(0, 10), st.integers(1, 5000))
def test_whatever_the_times_the_choice_fits_and_is_near_the_best(size, a_part, a_sample, largest):
    """A step has a cost for each part and for each sample."""

    def ms(candidate):
        return a_part * -(-size // candidate) + a_sample * size

    found, steps = played(size, ms, lambda candidate: candidate <= largest)
    tried = {candidate: ms(candidate) for candidate in found.ms if candidate <= largest}
    if tried:
        assert found.micro_batch <= largest
        assert ms(found.micro_batch) <= 1.02 * min(tried.values())
    assert len(steps) < 200


def data():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (32,), generator=generator),
        )
        for _ in range(80)
    ]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), more.pop("loss", loss_fn), data(), **more)
    return [step.loss.item() for step in loop], loop


def test_no_step_is_wasted():
    """Sizes are tried in steps that train: the losses are those of whole batches."""
    plain, _ = trained()
    losses, loop = trained(micro_batch="auto")
    assert losses == pytest.approx(plain, rel=1e-11)
    assert loop.sized is not None
    assert loop.micro_batches.limit == loop.sized.micro_batch
    assert set(loop.sized.ms) >= {32, 16}


def test_sizes_that_run_out_of_memory_are_dropped():
    def small_machine(model, batch):
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_fn(model, batch)

    plain, _ = trained()
    losses, loop = trained(micro_batch="auto", loss=small_machine, reduction="mean")
    assert losses == pytest.approx(plain, rel=1e-11)
    assert loop.sized.micro_batch <= 8
    assert loop.sized.ms[32] is None
    assert loop.sized.ms[16] is None


def test_an_unsplittable_batch_is_rejected_at_once():
    def contrastive(model, batch):
        found = model(batch[0])
        return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))

    with pytest.raises(LoopError, match="does not follow"):
        trained(micro_batch="auto", loss=contrastive)
