"""While it is on, each what-if does what its docstring says; afterwards torch and the program are unchanged."""

import builtins
import gc
import logging
import sys
from types import SimpleNamespace

import pytest
from profiles import healthy

from flatout.agent.ledger import Ledger
from flatout.diagnose import profiling, what_ifs
from flatout.diagnose.what_ifs import TABLE
from flatout.schema.enums import Effect
from flatout.schema.facts import Facts
from flatout.schema.lever import Options, Skip
from flatout.schema.records import TrialRecord

torch = pytest.importorskip("torch")
BY_NAME = {lever.name: lever for lever in TABLE}
VALUES = {
    "loader": True,
    "copies": True,
    "optimizer": True,
    "syncs": "all",
    "logging": True,
    "gc": True,
    "one thread fewer": 1,
    "one thread more": 2,
}


class TrainingContext(SimpleNamespace):
    """The parts of a TrainingContext that a what-if needs. Hashable by identity, as the real one is."""

    __hash__ = object.__hash__


@pytest.fixture
def context():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(12, 2), batch_size=2)
    return TrainingContext(
        torch=torch,
        paused=False,
        loaders=[{}],
        optimizers=[optimizer],
        closure_steps=False,
        backwards=0,
        backwards_in_last_step=1,
        device_type="cpu",
        steps=1,
        model=model,
        loader=loader,
    )


def switched(name, context, value=None):
    ledger = Ledger()
    return BY_NAME[name].apply(context, VALUES[name] if value is None else value, ledger)


def profiled(monkeypatch, budget_s, tick_ms=10.0):
    """A program whose start takes 100 s, and what is measured of it in which order."""
    measured, record, clock = [], healthy(), SimpleNamespace(now=0.0)
    answer = {
        "context": {"loaders": []},
        "record": TrialRecord("finished", "").to_json(),
        "options": {lever.name: {"values": [True]} for lever in TABLE},
    }
    trial = SimpleNamespace(ask=lambda *_: answer, pause=lambda: None)

    def start(program):
        clock.now, program.blocks.tick_ms = 100.0, tick_ms
        return trial

    monkeypatch.setattr(profiling, "seconds", lambda: clock.now)
    monkeypatch.setattr(profiling, "_what_if", lambda _, what_if, *rest: measured.append(what_if.name))
    for name, change in (
        ("start_trial", start),
        ("_copy_record", lambda *_: None),
        ("_copy_watched", lambda *_: None),
    ):
        monkeypatch.setattr(profiling.ProfiledProgram, name, change)
    options = profiling.ProfileOptions(steps=0, budget_s=budget_s)
    program = profiling.ProfiledProgram(None, None, Facts(cores=2), options, record, {})
    monkeypatch.setattr(program.disturbance, "observe", lambda *_: None)
    program.measure()
    profiling._what_ifs(program, trial)
    return measured, {each.name: each.why_not for each in record.what_ifs}


def test_the_start_takes_nothing_of_the_budget_and_the_largest_cost_comes_first(monkeypatch):
    measured, why_not = profiled(monkeypatch, 30.0)
    assert measured[:2] == ["optimizer", "loader"]
    assert not any("no time" in why for why in why_not.values())
    measured, why_not = profiled(monkeypatch, 2.0, tick_ms=1000.0)
    assert not measured
    assert "no time was left" in why_not["loader"]


def test_the_table():
    assert list(BY_NAME) == list(VALUES)
    for lever in TABLE:
        assert lever.live
        assert lever.effect is Effect.CHANGES_MATH  # never part of a tuned plan


@pytest.mark.parametrize("name", VALUES)
def test_everything_is_restored_afterwards(name, context):
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter

    def seen():
        torchs = vars(torch.Tensor).copy(), iterator.__next__, torch.get_num_threads()
        pythons = builtins.print, sys.stdout, sys.stderr, logging.root.manager.disable, gc.isenabled()
        return *torchs, *pythons, vars(context.optimizers[0]).get("step")

    before = seen()
    undo = switched(name, context)
    changed = seen()
    undo()
    assert seen() == before
    assert changed != before or torch.get_num_threads() == VALUES[name]


def test_batches_that_were_there_already(context):
    undo = switched("loader", context)
    taken = [batch.tolist() for batch in (next(each) for each in [iter(context.loader)] * 9)]
    undo()
    assert taken[:4] == taken[4:8]  # four are kept and used in turn
    assert len({str(batch) for batch in taken}) == 4
    iterator = iter(context.loader)
    undo = switched("loader", context)
    assert next(iterator).tolist() == taken[1]  # kept from before
    with torch.no_grad():
        assert next(iterator).tolist() == taken[0]  # an evaluation gets its own
    undo()
    assert next(iterator).tolist() == taken[1]  # and continues from there


def test_a_script_may_change_its_batch(context):
    rows = [{"x": torch.full((2,), float(number)), "y": number} for number in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    undo = switched("loader", context)
    iterator, seen = iter(loader), []
    for _ in range(12):
        batch = next(iterator)
        seen.append(batch.pop("y").tolist())
        batch["x"].add_(1000)
        seen.append(batch["x"][0, 0].item() % 1000)
    undo()
    assert seen[:8] == seen[8:16] == seen[16:]
    assert batch["x"].max() < 2000


def test_entries_removed_from_a_batch_are_back_the_next_time(context, monkeypatch):
    """This also holds for batches that are too large to be kept twice."""
    monkeypatch.setattr(what_ifs, "MAX_SPARE_BYTES", 0)
    loader = torch.utils.data.DataLoader([{"x": 1.0, "y": number} for number in range(24)], batch_size=2)
    undo = switched("loader", context)
    iterator = iter(loader)
    seen = [next(iterator).pop("y").tolist() for _ in range(12)]
    undo()
    assert seen[:4] == seen[4:8] == seen[8:]


def test_an_evaluation_with_gradients_ends_without_the_loader(context):
    loader = torch.utils.data.DataLoader(torch.arange(80.0), batch_size=1)
    undo = switched("loader", context)
    iterator = iter(loader)
    for _ in range(200):  # training goes on for longer than an epoch
        next(iterator)
        context.backwards += 1
    assert 80 < len(list(iter(loader))) < 200
    undo()


def test_an_optimizer_that_does_nothing_still_calls_its_hooks(context):
    from torch.optim import optimizer as hooks

    (optimizer,), observed = context.optimizers, []
    handles = [
        hooks.register_optimizer_step_pre_hook(lambda *_: observed.append("before")),
        hooks.register_optimizer_step_post_hook(lambda *_: observed.append("after")),
    ]
    weights = context.model.weight.detach().clone()
    undo = switched("optimizer", context)
    context.model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.step(lambda: observed.append("closure") or 3.0) == 3.0
    assert torch.equal(weights, context.model.weight)
    undo()
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert observed == ["before", "after", "before", "closure", "after", "before", "after"]
    assert not torch.equal(weights, context.model.weight)


def test_stale_values(context):
    def read(tensor):
        return tensor.item()

    undo = switched("syncs", context)
    assert [read(torch.tensor(float(value))) for value in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert torch.tensor(9.0).item() == 9.0  # another place
    undo()
    assert read(torch.tensor(4.0)) == 4.0
    undo = switched("syncs", context, "floats")
    lengths = [read(torch.tensor(value)) for value in (1, 2, 3)]
    undo()
    assert lengths == [1, 2, 3]


def test_a_loop_controlled_by_a_value_ends(context):
    undo = switched("syncs", context)
    error, turns = torch.tensor(1.0), 0
    while error.item() > 1e-300 and turns < 10_000:
        error, turns = error * 0.5, turns + 1
    undo()
    assert turns < 10_000


def test_muted_output(context, capsys):
    logger = logging.getLogger("a script's")
    logger.setLevel(logging.INFO)
    undo = switched("logging", context)
    print("nothing")
    sys.stdout.write("of")
    sys.stderr.write("this")
    assert not logger.isEnabledFor(logging.CRITICAL)
    assert sys.stdout.isatty() in (True, False)
    undo()
    print("this")
    assert logger.isEnabledFor(logging.INFO)
    out, err = capsys.readouterr()
    assert (out, err) == ("this\n", "")


def test_unavailable_what_ifs_have_a_reason(context):
    bare = TrainingContext(**{**vars(context), "loaders": [], "optimizers": []})
    for name, facts in (
        ("loader", Facts()),
        ("copies", Facts()),
        ("optimizer", Facts()),
        ("one thread more", Facts(cores=1)),
    ):
        answer = BY_NAME[name].applies(facts, bare)
        assert isinstance(answer, Skip)
        assert len(answer.reason.split()) > 3
    lbfgs = TrainingContext(**{**vars(context), "closure_steps": True, "backwards_in_last_step": 20})
    assert isinstance(BY_NAME["optimizer"].applies(Facts(), lbfgs), Skip)
    assert isinstance(BY_NAME["optimizer"].applies(Facts(), context), Options)
