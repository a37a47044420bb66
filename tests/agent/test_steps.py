"""The ends of steps, learned only from the order of events."""

from hypothesis import given
from hypothesis import strategies as st

from flatout.agent.steps import MAX_MISSED_EVENTS, StepBoundaries

counts = st.integers(1, 30)


def cycle_ends(boundaries, cycles, cycle):
    """Feed ``cycle`` (a list of optimizer keys, and "b" for a backward pass) that many times; return the
    cycle of each step end.
    """
    ended = []
    for at in range(cycles):
        for event in cycle:
            if event == "b":
                if boundaries.forward_or_backward_begins():
                    ended.append(at)
                boundaries.backward_ended()
            elif boundaries.optimizer_stepped(event):
                ended.append(at)
    return ended


def knowing(*keys):
    boundaries = StepBoundaries()
    for key in keys:
        boundaries.optimizer_created(key)
    return boundaries


@given(counts, st.integers(0, 8), st.booleans(), st.lists(st.integers(1, 20), min_size=1, max_size=100))
def test_any_cycle_of_any_optimizers(cycles, backwards, each, repetitions):
    """One step per cycle, however many optimizers there are (a GAN) and however often each steps in it
    (a critic); the last one ends it. There are any number of backward passes at first, or one before each step.
    """
    steps = [key for key, times in enumerate(repetitions) for _ in range(times)]
    cycle = [event for key in steps for event in ("b", key)] if each else ["b"] * backwards + steps
    steps = cycle_ends(knowing(*range(len(repetitions))), cycles, cycle)
    if repetitions[-1] == 1 and sum(repetitions) < MAX_MISSED_EVENTS:
        assert steps == list(range(cycles))
    else:
        assert set(steps) == set(range(cycles))


@given(counts, st.integers(2, 300))
def test_one_optimizer_a_layer(cycles, layers):
    """Each layer's optimizer steps in a hook, as its gradient is ready: last layer first."""
    assert cycle_ends(knowing(*range(layers)), cycles, ["b", *reversed(range(layers))]) == list(range(cycles))


@given(counts)
def test_an_optimizer_that_was_not_seen_being_made(cycles):
    assert cycle_ends(StepBoundaries(), cycles, ["b", 7]) == list(range(cycles))


@given(st.integers(2, 30), st.integers(1, 4))
def test_no_optimizer_object(cycles, unused):
    """A step ends where the next pass begins, so the last one has no end yet."""
    boundaries = StepBoundaries()
    assert boundaries.by_backward
    ended = cycle_ends(boundaries, cycles, ["b"])
    assert ended == list(range(1, cycles))
    for _ in range(unused):  # forward passes between two backward passes end it once
        ended.append(boundaries.forward_or_backward_begins())
    assert ended[cycles - 1 :] == [True] + [False] * (unused - 1)


@given(st.integers(1, 40))
def test_an_optimizer_that_never_steps_is_given_up(cycles):
    """A script may create one and then update its parameters itself."""
    steps = cycle_ends(knowing(1), MAX_MISSED_EVENTS + cycles, ["b"])
    assert len(steps) == cycles
    assert steps == list(range(MAX_MISSED_EVENTS, MAX_MISSED_EVENTS + cycles))


@given(st.integers(1, 40))
def test_one_of_two_optimizers_never_steps(cycles):
    steps = cycle_ends(knowing(1, 2), MAX_MISSED_EVENTS + cycles, ["b", 1])
    assert steps == list(range(MAX_MISSED_EVENTS, MAX_MISSED_EVENTS + cycles))


@given(st.integers(1, 10), st.integers(1, 10), st.booleans())
def test_a_recreated_optimizer(epochs, steps_an_epoch, old_goes_first):
    """A new optimizer each epoch.

    ``optimizer = Adam(...)`` frees the old one only once the new one exists.
    """
    boundaries, steps = StepBoundaries(), 0
    for epoch in range(epochs):
        if old_goes_first and epoch:
            boundaries.optimizer_deleted(epoch - 1)
        boundaries.optimizer_created(epoch)
        if not old_goes_first and epoch:
            boundaries.optimizer_deleted(epoch - 1)
        steps += len(cycle_ends(boundaries, steps_an_epoch, ["b", epoch]))
    assert steps == epochs * steps_an_epoch


@given(st.integers(1, 20), st.integers(1, 20))
def test_a_second_phase_with_its_own_optimizer(first, second):
    """The old optimizer still exists but no longer steps: the cycle is learned again after a timeout."""
    boundaries = knowing(1)
    assert len(cycle_ends(boundaries, first, ["b", 1])) == first
    boundaries.optimizer_created(2)
    assert len(cycle_ends(boundaries, MAX_MISSED_EVENTS + second, ["b", 2])) >= second


@given(
    st.lists(
        st.sampled_from(["make", "gone", "step", "b", "f"]).flatmap(
            lambda what: st.tuples(st.just(what), st.integers(0, 3))
        ),
        max_size=300,
    )
)
def test_any_order_of_events(events):
    """There are never more steps than optimizer steps and passes together, and the answer is always yes or
    no.
    """
    boundaries, ends, chances = StepBoundaries(), 0, 0
    for what, key in events:
        if what == "make":
            boundaries.optimizer_created(key)
        elif what == "gone":
            boundaries.optimizer_deleted(key)
        elif what == "b":
            boundaries.backward_ended()
        else:
            answer = (
                boundaries.optimizer_stepped(key)
                if what == "step"
                else boundaries.forward_or_backward_begins()
            )
            assert answer in (True, False)
            ends += answer
            chances += 1
    assert ends <= chances
