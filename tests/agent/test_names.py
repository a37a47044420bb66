"""The user's names for objects: found in running functions, in attributes of `self` and in lists.

Finding a name does not extend an object's life.
"""

import sys
import weakref

from flatout.agent.names import names_of, visible_objects


class Thing:
    pass


# These act as user files: files next to the tests do not belong to a library.
def deep(call):
    inner = Thing()
    return call(sys._getframe(), inner)


class Model:
    def eval(self):
        return self


class Trainer:
    def __init__(self):
        self.model = Thing()

    def fit(self, call):
        return call(sys._getframe(), self.model)


def named(frame, *things):
    return [names_of(things, visible_objects(frame)).get(id(thing)) for thing in things]


# The inspected code has no assert: pytest would rewrite it to use its own variables.
def some():
    first, second = Thing(), Thing()
    nets, by_letter = [Thing(), first], {"D": second}
    before = named(sys._getframe(), first, second, nets[0], Thing())
    del second
    return before, named(sys._getframe(), by_letter["D"])


def one_that_evaluates():
    thing = Model().eval()
    return named(sys._getframe(), thing)


def one_that_goes():
    held = Thing()
    gone = weakref.ref(held)
    before = named(sys._getframe(), held)
    del held
    return before, gone()


def one_that_asks():
    before = 1
    mine = locals()
    thing = Thing()
    list(visible_objects(sys._getframe()))
    return before, dict(mine), thing


def test_variables_attributes_and_lists():
    assert some() == (["first", "second", "nets[0]", None], ["by_letter['D']"])
    assert Trainer().fit(lambda frame, model: named(frame, model)) == ["model"]
    assert deep(lambda frame, thing: named(frame, thing)) == ["inner"]
    assert one_that_evaluates() == ["thing"], "model.eval() does not read the variables of the function"


def test_lookups_extend_no_lifetime():
    """Before Python 3.13, reading the variables of a running function keeps their values alive
    until it ends.
    """
    assert one_that_goes() == (["held"], None)


def test_a_function_that_asks_for_its_own_variables_keeps_them():
    before, mine, _ = one_that_asks()
    assert mine["before"] == before
    assert "thing" not in mine
