"""Checkpoints in the background: their cost, the single writer, and the messages when they fail."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.saver import CheckpointWriter, WriterClocks
from flatout.checkpoint.values import pack

torch = pytest.importorskip("torch", reason="not run: there is no torch here")


class Time:
    """Clocks that advance only on request. ``worked`` counts for whichever thread asks."""

    def __init__(self):
        self.wall, self.worked = 0.0, 0.0
        self.clocks = WriterClocks(lambda: self.wall, lambda: self.worked)


class Paid(CheckpointFolder):
    """Takes the requested time of the writing thread and keeps nothing."""

    def __init__(self, time, costs):
        super().__init__(Path("nowhere"))
        self.time, self.costs, self.writers, self.most = time, costs, 0, 0

    def write(self, kind, step, states, metadata=None):
        self.writers += 1
        self.most = max(self.most, self.writers)
        self.time.worked += self.costs()
        self.writers -= 1


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=12),
    st.sampled_from([0.01, 0.05, 0.5]),
    st.floats(0.001, 2),
)
def test_checkpoints_stay_within_their_share_whatever_they_cost(costs, share, step_s):
    """After each pause all checkpoints before the last one have cost at most their share of the time so far:
    waiting, packing and writing included.
    """
    time, costs = Time(), list(costs)
    waits, works = [wait for wait, _ in costs], [work for _, work in costs]
    saver = CheckpointWriter(
        torch,
        Paid(time, lambda: works.pop(0)),
        "test",
        time.clocks,
        lambda sentence: pytest.fail(sentence),
        share=share,
    )

    step = 0
    while works and step < 300:
        step += 1
        time.wall += step_s * (1 + 50 * (step % 7 == 0))
        if saver.due(step):
            spent = saver.cost.waited_s + saver.cost.worked_s
            assert spent <= share * time.wall + 1e-6 * (1 + spent), (spent, time.wall)
            began_s = time.wall
            time.wall += waits.pop(0)
            saver.save(step, pack(torch, {}), {}, began_s)
            saver._join()
            assert not saver.due(step)
    assert saver.cost.checkpoints >= 1


def test_one_writer_and_a_copy_that_does_not_change(tmp_path):
    """Training continues while a checkpoint is held up.

    The next one waits for it, and each holds the state of its own moment.
    """
    time, at_work, go_on = Time(), threading.Event(), threading.Event()

    class Slow(CheckpointFolder):
        def begin(self, step):
            at_work.set()
            assert go_on.wait(20)
            return super().begin(step)

    weights = torch.zeros(1000)
    with Slow(tmp_path / "saves") as saves:
        saver = CheckpointWriter(
            torch, saves, "test", time.clocks, lambda sentence: pytest.fail(sentence), every=5
        )
        assert [step for step in range(1, 12) if saver.due(step)] == [5, 10]
        saver.save(5, pack(torch, {"w": weights}), {})
        assert at_work.wait(20)
        weights += 1  # training continues
        free = CheckpointWriter(torch, saves, "test", time.clocks, print)
        free._thread = saver._thread
        assert not free.due(6)  # a write is in progress
        threading.Timer(0.2, go_on.set).start()
        saver.save(10, pack(torch, {"w": weights}), {})
        weights += 1
        saver.wait()
        assert [each.name for each in saves.paths()] == ["step-00000010", "step-00000005"]
        assert saver.last.step == 10
        assert saves.newest()[0].read(torch)["w"].unique().tolist() == [1.0]


def test_a_failure_is_reported_once_and_retried(tmp_path):
    time, said, trouble = Time(), [], [OSError(28, "No space left on device"), KeyError("x"), None]

    class Broken(CheckpointFolder):
        def begin(self, step):
            if trouble[0]:
                raise trouble[0]
            return super().begin(step)

    with Broken(tmp_path / "saves") as saves:
        saver = CheckpointWriter(torch, saves, "test", time.clocks, said.append, every=1)
        packed = pack(torch, {"w": torch.ones(3)})

        def three():
            for step in range(saver.last_step + 1, saver.last_step + 4):
                saver.save(step, packed, {})
                saver.wait()

        three()
        assert said == [
            "step 0 was not saved (OSError: [Errno 28] No space left on device). The training continues."
        ]
        trouble.pop(0)
        three()
        assert said[1:] == ["step 3 was not saved (KeyError: 'x'). The training continues."]
        trouble.pop(0)
        three()
        assert said[2:] == ["step 6 is saved; the 6 attempts before it failed."]
        saver.why_not_write = lambda copy: "its weights are not finite"
        three()
        assert said[3:] == ["step 9 was not saved: its weights are not finite. Earlier checkpoints stay."]
        assert saves.newest()[0].step == 8

        saver.save(12, pack(torch, {"w": torch.ones(1).expand(2**45)}), {})
        assert len(said) == 5
        assert "step 12 was not saved: its state could not be copied (" in said[4]
        assert said[4].endswith("The training continues.")
        assert saver.due(13)
