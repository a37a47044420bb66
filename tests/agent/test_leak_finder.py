"""The leak finder: the name of the container with tensors of earlier steps, and the line that puts them
there.
"""

import gc
from itertools import cycle

import pytest

from flatout.agent.leak_finder import LeakFinder

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("thawed"), pytest.mark.slow]
KEPT = []


class Keeper:
    def __init__(self):
        self.history = {"loss": []}
        self.total = 0

    def note(self, loss):
        self.history["loss"].append(loss)


def steps(once, model):
    """Twelve steps with four inspections, as a trial makes them."""
    holders = LeakFinder(torch)
    for step in range(1, 13):
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        once(loss)
        del loss
        if step % 3 == 0:
            holders.inspect(step)
    found = holders.leak(list(model.parameters()) + [p.grad for p in model.parameters()])
    KEPT.clear()
    gc.collect()
    return found


@pytest.fixture
def model():
    return torch.nn.Linear(3, 1)


def line(words):
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, text in enumerate(file, 1) if words in text)


def test_a_list_of_the_module(model):
    held = steps(lambda loss: KEPT.append(loss), model)
    assert held.holder == "list `KEPT`"
    assert held.place.line == line("KEPT.append(loss)")
    assert held.graph
    assert held.tensors_a_step == pytest.approx(1.0, abs=0.1)


@pytest.mark.full
def test_a_list_in_a_table_of_an_object(model):
    reaper = Keeper()
    held = steps(lambda loss: reaper.note(loss.detach()), model)
    assert "history" in held.holder
    assert held.place.line == line('self.history["loss"].append(loss)')
    assert not held.graph


def test_a_local_list_without_graphs(model):
    mine = []
    held = steps(lambda loss: mine.append(loss.detach().clone()), model)
    assert held.holder.startswith("list `mine`")
    assert held.place.line == line("mine.append(loss.detach().clone())")
    assert not held.graph


def test_a_sum_that_keeps_every_graph(model):
    reaper = Keeper()

    def add(loss):
        reaper.total = reaper.total + loss

    held = steps(add, model)
    assert held.graph
    assert held.holder == "variable `self.total` of Keeper"
    assert held.place.line == line("reaper.total = reaper.total + loss")


def test_an_iterator_that_repeats_its_items(model):
    batches = cycle([torch.ones(2)] for _ in range(99))
    held = steps(lambda loss: next(batches), model)
    assert held.holder.startswith("cycle `batches`")
    assert held.place.line == line("batches = cycle(")


def test_nothing_is_held(model):
    last = []

    def keep_the_last(loss):
        last[:] = [loss]

    assert steps(keep_the_last, model) is None
    assert steps(lambda loss: KEPT.append(loss.item()), model) is None


def test_one_tensor_that_only_grows():
    """The tensors joined to it are recreated in each step, so no tensor of an earlier step remains."""
    holders, replay = LeakFinder(torch), torch.zeros(4, 2)
    for step in range(1, 13):
        replay = torch.cat([replay, torch.ones(4, 2)])
        if step % 3 == 0:
            holders.inspect(step)
    held = holders.leak([])
    assert held is not None
    assert held.holder == "tensor `replay`"
    assert held.place.line == line("replay = torch.cat(")


def test_a_list_of_numbers_in_a_data_set():
    class Noted:
        def __init__(self):
            self.given, self.seen = [], {"once": 1}

        def fetch(self, i):
            self.given.append([i] * 8)

    data = Noted()
    holders = LeakFinder(torch, [data])
    for step in range(1, 13):
        data.fetch(step)
        if step % 3 == 0:
            holders.inspect(step)
    fullest = holders.growing_container()
    assert fullest is not None
    assert fullest.holder == "list `self.given` of Noted"
    assert fullest.place.line == line("self.given.append(")
