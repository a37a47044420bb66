"""Device synchronisations and call counters: recorded with their line, with torch restored afterwards."""

import gc
import inspect

import pytest

from flatout.agent.call_counters import CallCounters, attention_kernel
from flatout.agent.frames import is_user_file
from flatout.agent.ledger import Ledger
from flatout.agent.synchronisations import SyncRecorder

torch = pytest.importorskip("torch")


def ticking():
    """A clock that advances by a microsecond each time it is read."""
    now = [0]

    def read():
        now[0] += 1000
        return now[0]

    return read


@pytest.fixture
def synchronisations():
    ledger = Ledger()
    observed = SyncRecorder(torch, ledger, "cpu", ticking(), lambda: False)
    observed.install()
    yield observed
    ledger.restore()


def here():
    return inspect.currentframe().f_back.f_lineno


def test_each_kind_is_recorded_once_with_its_line(synchronisations):
    x = torch.arange(4.0)
    asked = {}
    x.sum().item()
    asked["item", here() - 1] = 1
    bool(x.sum() > 1)
    asked["item", here() - 1] = 1
    x.tolist()
    asked["item", here() - 1] = 1
    f"{x.sum():.2f}"
    asked["print", here() - 1] = 1
    str(x)
    asked["print", here() - 1] = 1
    x.numpy()
    asked["numpy", here() - 1] = 1
    x[x > 1]
    asked["nonzero", here() - 1] = 1
    torch.where(x > 1)
    asked["nonzero", here() - 1] = 1
    torch.equal(x, x)
    asked["compare", here() - 1] = 1
    x.allclose(x)
    asked["compare", here() - 1] = 1
    for _ in range(3):
        float(x[0])
        asked["item", here() - 1] = 3
    x.to(torch.float64), x[1], torch.where(x > 1, x, x)  # none of these waits
    found = synchronisations.records(1)
    assert {(c.kind, c.place.line): c.calls for c in found} == asked
    assert {c.place.file for c in found} == {__file__}
    assert all(c.ms > 0 for c in found)
    assert {c.place.function for c in found} == {"test_each_kind_is_recorded_once_with_its_line"}


def test_torchs_reads_of_its_own_host_tensors_do_not_count(synchronisations):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert synchronisations.records(1) == []


@pytest.mark.parametrize(("device", "loads"), [("cpu", True), ("xpu", False)])
def test_the_loader_and_tensors_of_the_host_beside_a_device_are_left_out(device, loads):
    ledger = Ledger()
    observed = SyncRecorder(torch, ledger, device, ticking(), lambda: loads)
    observed.install()
    torch.ones(()).item()
    ledger.restore()
    assert observed.records(1) == []


def test_a_copy_to_a_device_has_its_kind():
    ledger = Ledger()
    observed = SyncRecorder(torch, ledger, "meta", ticking(), lambda: False)
    observed.install()
    for _ in range(2):
        torch.ones(8).to("meta", non_blocking=True)
    torch.ones(8).to("meta")
    torch.tensor([1.0, 2.0], device="meta")
    ledger.restore()
    found = [
        (c.calls, c.moved_bytes, c.pinned, c.non_blocking)
        for c in sorted(observed.records(1), key=lambda c: c.place.line)
    ]
    assert found == [(2, 64, False, True), (1, 32, False, False), (1, 8, False, False)]
    assert {c.kind for c in observed.records(1)} == {"to device"}


def test_calls_are_counted_with_their_place():
    ledger = Ledger()
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        gc.collect()
    ledger.restore()
    seen = counters.per_step(steps=2)
    assert {name: event_of["calls"] for name, event_of in seen.items()} == {
        "make_optimizer": 0.5,
        "zero_grad": 2.0,
        "zero_grad_to_zero": 2.0,
        "gc_collect": 2.0,
    }
    assert seen["gc_collect"]["places"][0]["text"] == "gc.collect()"
    assert seen["gc_collect"]["ms"] > 0


@pytest.mark.parametrize("file", ["<string>", torch.__file__, gc.__name__, inspect.__file__, ""])
def test_whose_file(file):
    assert not is_user_file(file) or file == "gc"
    assert is_user_file(__file__)


def test_the_kernels_of_attention_are_named_with_the_reason_against_a_faster_one(monkeypatch):
    ledger, query = Ledger(), torch.ones(1, 2, 8, 16)
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    for mask in (None, None, torch.ones(8, 8)):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, mask, 0.1 * (mask is not None))
    ledger.restore()
    assert list(counters.attention.values()) == [
        "[1, 2, 8, 16] in torch.float32: flash attention",
        "[1, 2, 8, 16] in torch.float32: math",
    ]
    # on a card; this torch says the same of any tensor that is not on one
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    seen = attention_kernel(torch, query, query, query, torch.ones(8, 8), 0.1)
    assert seen.startswith(
        "[1, 2, 8, 16] in torch.float32: math; not flash attention, because: All tensors need to be on cuda"
    )
    assert attention_kernel(torch, query, query, query).endswith("float32: flash attention (FA2)")
