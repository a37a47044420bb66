"""Device synchronisations and call counters: recorded with their line, with torch restored afterwards."""

import gc
import inspect

import pytest

from flatout.agent.call_counters import CallCounters
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


def test_the_kernels_of_attention_are_named_with_the_reason_against_a_faster_one():
    ledger, query = Ledger(), torch.ones(1, 2, 8, 16)
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(query, query, query)
    attention(query, query, query)
    attention(query, query, query, dropout_p=0.1)
    attention(query[:, :, :4], query, query, dropout_p=0.1)
    attention(query, query, query, torch.ones(8, 8, requires_grad=True))
    attention(query.mT.contiguous().mT, query, query, dropout_p=0.0)
    ledger.restore()
    what = "[1, 2, 8, 16] in torch.float32: "
    assert counters.attention_kernels == [
        f"{what}flash attention",
        "[1, 2, 8, 16] and 1 more in torch.float32: math; not flash attention, because of dropout",
        f"{what}math; not flash attention, because of attn_mask",
        f"{what}math; not flash attention, because of the layout",
    ]
    seen = counters.per_step(steps=1)["slow_attention"]
    assert seen["calls"] == 4
    assert seen["places"][0]["text"].startswith("attention(query")


@pytest.mark.parametrize("form", ["two dimensions", "flattened", "mask", "float mask"])
def test_the_share_of_padding_is_measured(form):
    ledger = Ledger()
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    lengths = torch.tensor([8, 2, 2, 4])
    kept = torch.arange(8) < lengths[:, None]
    labels = torch.where(kept, 1, -100)
    for _ in range(8):
        if "mask" in form:
            mask = kept[:, None, None, :].expand(4, 1, 8, 8)
            mask = mask if form == "mask" else torch.zeros(4, 1, 8, 8).masked_fill(~mask, float("-inf"))
            torch.nn.functional.scaled_dot_product_attention(*[torch.ones(4, 2, 8, 16)] * 3, mask)
        elif form == "flattened":
            torch.nn.CrossEntropyLoss()(torch.ones(32, 5), labels.view(-1))
        else:
            torch.nn.functional.cross_entropy(torch.ones(4, 5, 8), labels)
    ledger.restore()
    assert counters.per_step(steps=1)["padding"]["note"] == "0.500"


def test_transposed_logits_are_seen_and_others_are_not():
    ledger = Ledger()
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    logits, labels = torch.ones(4, 8, 5), torch.zeros(4, 8, dtype=torch.long)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.nn.functional.cross_entropy(logits.mT.contiguous(), labels)
    assert "transposed_logits" not in counters.per_step(steps=1)
    torch.nn.functional.cross_entropy(logits.mT, labels)
    ledger.restore()
    assert counters.per_step(steps=1)["transposed_logits"]["note"] == "[4, 5, 8], 0.00064 MB"


def test_values_are_read_in_the_first_calls_alone():
    ledger = Ledger()
    counters = CallCounters(torch, ledger, ticking())
    counters.install()
    whole, padded = torch.ones(2, 8, dtype=torch.long), torch.tensor([[1] * 8, [1] * 4 + [-100] * 4])
    for labels in [whole] * 16 + [padded] * 8:
        torch.nn.functional.cross_entropy(torch.ones(2, 5, 8), labels)
    ledger.restore()
    assert "padding" not in counters.per_step(steps=1)
