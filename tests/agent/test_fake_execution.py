"""Fake execution, on shapes only: the program stays unchanged, memory is counted as it would be allocated,
and reads are answered.
"""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.agent.batches import batch_dimension, resized, samples_in
from flatout.agent.fake_execution import FakeExecution
from flatout.agent.ledger import Ledger
from flatout.measure.memory_blocks import MemoryBlockTracker
from flatout.measure.nests import tensors_in

torch = pytest.importorskip("torch")


@pytest.fixture
def fake_run():
    """``fake_run(blocks)`` installs the fake execution; afterwards everything is restored."""
    ledger = Ledger()

    def install(blocks, device_type="cpu", **more):
        fake_execution = FakeExecution(
            torch,
            ledger,
            lambda size, real: blocks.allocate(size, "real" if real else "temporary"),
            blocks.free,
            device_type,
            **more,
        )
        fake_execution.install()
        return fake_execution

    yield install
    ledger.restore()
    assert torch.ones(2).sum().item() == 2.0


def test_products_of_matrices_are_seen_in_both_passes(fake_run):
    convolution, linear, seen = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(4, 4), []
    fake_run(MemoryBlockTracker(), on_matmul=lambda: seen.append(1))
    convolution(torch.zeros(1, 1, 8, 8)).sum().backward()
    assert not seen
    loss = linear(torch.zeros(2, 4)).sum()
    forward = len(seen)
    loss.backward()
    assert 0 < forward < len(seen)


def test_a_step_changes_nothing_and_its_memory_is_counted(fake_run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 1000),
        torch.nn.BatchNorm1d(1000),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(1000, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    before = [t.detach().clone() for t in model.state_dict().values()]
    random, blocks = torch.get_rng_state(), MemoryBlockTracker()
    fake_execution = fake_run(blocks)
    x = torch.randn(50, 100)
    loss = model(x).square().mean()
    hidden = 50 * 1000 * 4
    living = blocks.peak().kinds
    parameters = sum(p.numel() * 4 for p in model.parameters())
    # Needed by the backward pass: the input of the normalisation, the rectified values, the noise of the
    # dropout, the input of the last layer.
    assert 4 * hidden < living["temporary"] < 4.3 * hidden
    loss.backward()
    optimizer.step()
    optimizer.step()  # bias corrections divide by the number of steps
    assert type(optimizer.state[model[0].weight]["exp_avg"]).__name__ == "FakeTensor"
    assert blocks.peak().peak_bytes > living["temporary"] + parameters
    del x, loss
    gc.collect()
    assert blocks.in_use_bytes < 5 * parameters  # itself, gradients, two moments, and little else
    with fake_execution.real_execution():
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
        assert torch.equal(random, torch.get_rng_state())


def test_reads_are_answered(fake_run):
    weights = torch.nn.Parameter(torch.randn(4, 3))
    fake_run(MemoryBlockTracker())
    tokens = torch.tensor([[5, 7, 0], [5, 0, 0]])
    lengths = (tokens != 0).sum(1)
    assert lengths.max().item() == 2
    assert tokens[tokens != 0].shape == (3,)
    assert torch.arange(7)[2:].tolist() == [2, 3, 4, 5, 6]
    logits = torch.randn(2, 3) @ weights.t()
    assert logits.shape == (2, 4)
    assert not torch.isnan(logits).any()
    assert torch.isfinite(logits.sum())
    assert logits[logits > 0].shape == (8,)  # unknown: all of them
    assert f"{logits.sum():.2f}" == "1.00"
    assert logits.detach().numpy().shape == (2, 4)
    assert [len(torch.zeros(500)[start : start + 10]) for start in torch.randint(100, (3,))] == [10, 10, 10]
    torch.distributions.Categorical(logits.softmax(1)).sample()  # its arguments are checked
    counter, mean = torch.tensor(3), torch.tensor(2.0)
    counter += 4
    mean += logits.sum()  # writing into a single number leaves it unchanged
    assert (counter.item(), mean.item()) == (7, 2.0)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weights], lr=1.0)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    scaler.scale(logits.sum()).backward()
    scaler.step(optimizer)
    assert stepped, "nothing infinite was found, so the step is made"


def test_an_lstm_keeps_what_onednn_keeps(fake_run):
    model, x = torch.nn.LSTM(32, 64, num_layers=2, batch_first=True), torch.randn(24, 40, 32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage()) or t, lambda t: t
    ):
        model(x)
    truth = (
        sum(s.nbytes() for s in {s.data_ptr(): s for s in saved}.values())
        - x.nbytes
        - sum(p.nbytes for p in model.parameters())
    )
    blocks = MemoryBlockTracker()
    fake_run(blocks)
    kept = model(x)
    assert kept[0].shape == (24, 40, 64)
    assert blocks.peak().kinds["temporary"] == pytest.approx(truth, rel=0.1)


BATCHES = st.recursive(
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def filled(thing, samples):
    """Tuples of integers become tensors of that shape, with the samples first."""
    if isinstance(thing, tuple) and all(isinstance(part, int) for part in thing):
        return torch.zeros((samples, *thing))
    if isinstance(thing, dict):
        return {key: filled(part, samples) for key, part in thing.items()}
    return type(thing)(filled(part, samples) for part in thing)


@given(BATCHES, st.integers(5, 9), st.integers(1, 20))
def test_a_batch_in_another_size(shape, samples, wanted):
    batch = filled(shape, samples)
    found = samples_in(batch, samples)
    assert found == (samples if list(tensors_in(batch)) else None)
    made = resized(
        batch,
        samples,
        wanted,
        lambda t, at: t.new_zeros([wanted if i == at else n for i, n in enumerate(t.shape)]),
    )
    assert type(made) is type(batch)
    for before, after in zip(tensors_in(batch), tensors_in(made), strict=True):
        assert after.shape == (wanted, *before.shape[1:])


def test_samples_in_another_dimension():
    steps_first, boxes = torch.zeros(35, 20, 8), [torch.zeros(n, 4) for n in (3, 1, 2)]
    assert samples_in([steps_first, torch.zeros(35)], 20) == 20
    assert [
        batch_dimension(shape, 20) for shape in ((20, 20), (35, 20), (20,), (3, 20, 20), (35, 8), ())
    ] == [0, 1, 0, None, None, None]
    assert samples_in((torch.zeros(6, 3), torch.zeros(6)), 64) == 6  # a data set smaller than its batch
    made = resized(
        {"x": torch.zeros(3, 2), "boxes": boxes, "name": "three"},
        3,
        7,
        lambda t, at: t if at is None else t.new_zeros(7, *t.shape[1:]),
    )
    assert made["x"].shape == (7, 2)
    assert [len(box) for box in made["boxes"]] == [7 if len(box) == 3 else len(box) for box in made["boxes"]]
    assert made["name"] == "three"
