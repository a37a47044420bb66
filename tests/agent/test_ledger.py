"""The ledger sets, lists and restores in reverse order; a missing target raises an error."""

import os
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.agent.ledger import Ledger, MissingTarget

torch = pytest.importorskip("torch")


class Thing:
    shared = "class"

    def method(self):
        return "method"


class Switch:
    """As the flags of torch.backends: the value lives behind the setter."""

    state = "off"

    def __setattr__(self, name, value):
        type(self).state = value

    @property
    def flag(self):
        return type(self).state


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers()), max_size=30))
def test_any_patches_are_restored(patches):
    thing = types.SimpleNamespace(a=1, b=[2], c=None)
    before, ledger = dict(vars(thing)), Ledger()
    for name, value in patches:
        ledger.set(thing, name, value)
        assert getattr(thing, name) == value
    assert len(ledger.entries()) == len(patches)
    ledger.restore()
    assert vars(thing) == before
    assert ledger.entries() == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers()), max_size=30))
def test_items_restore_too(patches):
    owner, ledger = {"a": 1, "b": 2}, Ledger()
    for key, value in patches:
        ledger.set_item(owner, key, value)
    ledger.restore()
    assert owner == {"a": 1, "b": 2}


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 20))
def test_restoring_to_a_mark_keeps_earlier_patches(values, at):
    thing, ledger = types.SimpleNamespace(x=-1), Ledger()
    mark, expected = 0, -1
    for index, value in enumerate(values):
        if index == at:
            mark, expected = ledger.mark(), thing.x
        ledger.set(thing, "x", value)
    if at < len(values):
        ledger.restore(mark)
        assert thing.x == expected
        assert len(ledger.entries()) == at
    ledger.restore()
    assert thing.x == -1


def test_the_replaced_value_is_returned():
    thing, ledger = Thing(), Ledger()
    assert ledger.set(Thing, "shared", "patched") == "class"
    assert ledger.set(thing, "method", lambda: "other", new=True)() == "method"
    assert thing.method() == "other"
    ledger.restore()
    assert thing.method() == "method"
    assert Thing.shared == "class"


def test_classes_keep_what_they_inherit():
    class Child(Thing):
        pass

    ledger = Ledger()
    ledger.set(Child, "method", lambda self: "child")
    assert Child().method() == "child"
    ledger.restore()
    assert "method" not in vars(Child)
    assert Child().method() == "method"


def test_a_missing_target_raises_and_changes_nothing():
    thing, ledger = Thing(), Ledger()
    with pytest.raises(MissingTarget, match=r"Thing has no attribute 'nowhere'"):
        ledger.set(thing, "nowhere", 1)
    with pytest.raises(MissingTarget, match="os has no attribute 'nowhere'"):
        ledger.set(os, "nowhere", 1)
    with pytest.raises(MissingTarget, match="nowhere"):
        ledger.set_flag(thing, "nowhere", 1)
    assert vars(thing) == {}
    assert ledger.entries() == []


def test_a_new_attribute_must_be_announced_and_is_removed_again():
    thing, ledger = Thing(), Ledger()
    ledger.set(thing, "fresh", 1, new=True)
    assert thing.fresh == 1
    ledger.restore()
    assert not hasattr(thing, "fresh")


def test_a_flag_goes_through_its_setter_both_ways():
    switch, ledger = Switch(), Ledger()
    ledger.set_flag(switch, "flag", "on")
    assert switch.flag == "on"
    assert Switch.state == "on"
    ledger.restore()
    assert Switch.state == "off"
    assert vars(switch) == {}


def test_the_setter_of_a_module_is_not_called():
    """nn.Module and Optimizer override __setattr__; a patch must bypass that."""
    torch = pytest.importorskip("torch")
    layer, ledger = torch.nn.Linear(2, 2), Ledger()
    keys = list(layer.state_dict())
    ledger.set(layer, "forward", lambda x: x, new=True)
    assert layer(torch.ones(2)).tolist() == [1, 1]
    assert list(layer.state_dict()) == keys
    ledger.restore()
    assert "forward" not in vars(layer)


def test_entries_name_their_targets():
    ledger = Ledger()
    ledger.set(Thing, "shared", 1)
    ledger.set_item({}, "key", 1)
    ledger.on_restore("a hook", lambda: None)
    assert ledger.entries() == ["Thing.shared", "['key']", "a hook"]
    ledger.restore()


def test_one_failure_does_not_stop_the_others_and_is_reported():
    order, ledger = [], Ledger()
    ledger.on_restore("first", lambda: order.append("first"))
    ledger.on_restore("broken", lambda: 1 / 0)
    ledger.on_restore("last", lambda: order.append("last"))
    with pytest.raises(RuntimeError, match="could not undo broken: ZeroDivisionError"):
        ledger.restore()
    assert order == ["last", "first"]
    ledger.restore()
    assert order == ["last", "first"]


def clipped(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_replacement_of_a_torch_function_is_that_function_to_torchscript():
    ledger, really, known = Ledger(), torch.where, dict(torch.jit._builtins._get_builtin_table())
    ledger.set(torch, "where", lambda *args: really(*args))
    ledger.set(torch, "where", lambda *args, within=torch.where: within(*args))
    try:
        assert torch.jit.script(clipped)(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    finally:
        ledger.restore()
    assert torch.jit._builtins._get_builtin_table() == known
