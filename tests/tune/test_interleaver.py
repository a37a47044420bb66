"""Interleaved programs that are compared at the same step, so that with one seed they do the same work."""

import sys

import pytest

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.plan import Plan
from flatout.trial.blocks import BlockTimer
from flatout.tune.comparison import Member, ProgramResult, compare_running, take_turns
from flatout.tune.interleaver import Interleaver

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

# Each step reports its own random amount of work, as episodes and sentences have.
PROGRAM = """
import os, random, sys, torch
model = torch.nn.Linear(64, 64)
random.seed(0)
work = os.open(f"{sys.argv[1]}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in range(%d):
    length = random.randint(1, 40)
    loss = sum(model(torch.ones(8, 64)).square().mean() for _ in range(length))
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():  # by hand: an optimizer of torch's own takes two seconds to import
            p -= 0.01 * p.grad
    os.write(work, b"%%d " %% length)
"""


@pytest.fixture
def interleaver(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    made = []

    def make(steps=10**9, program=PROGRAM):
        (tmp_path / "project" / "train.py").write_text(program % steps)
        made.append(
            Interleaver(
                parse_command([sys.executable, "train.py", str(tmp_path / "work")]),
                JobFolder(tmp_path / "job").make(),
                look(),
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.full
def test_a_program_that_is_behind_catches_up_before_it_is_measured(interleaver, tmp_path):
    ring = interleaver()
    plain, tuned, third = (ring.start_paused(Plan(), 0, 60.0) for _ in range(3))
    ring.tick_ms = max(plain.trial.ready["tick_ms"], 1.0)
    plain.trial.run_ticks(
        17 + max(tuned.trial.ticks_done - plain.trial.ticks_done, 0), seconds() + 60
    )  # each needs steps of its own number to be warm
    assert plain.trial.ticks_done > tuned.trial.ticks_done
    compare_running(ring, plain.trial, tuned.trial, seconds())
    assert plain.trial.ticks_done == tuned.trial.ticks_done
    members = [Member(candidate.trial, (None,) * 3, ProgramResult()) for candidate in (plain, tuned, third)]
    take_turns(ring, members, seconds() + 60)
    assert [len(member.result.blocks) for member in members] == [3, 3, 3]
    begun = [[block.at_s for block in member.result.blocks] for member in members]
    assert ring.slices > 1
    assert begun[0] == begun[1] == begun[2]  # their slices alternated
    assert tuned.trial.ticks_done == third.trial.ticks_done == plain.trial.ticks_done
    ticks = min(candidate.trial.ticks_done for candidate in (plain, tuned, third))
    for candidate in (plain, tuned, third):
        candidate.trial.finish()
    # The same step is the same work, counted by the program itself.
    work = [[int(word) for word in path.read_text().split()] for path in tmp_path.rglob("work.*")]
    assert len(work) == 3
    assert len({tuple(lengths[:ticks]) for lengths in work}) == 1
    assert len(set(work[0][:ticks])) > 5


def test_a_program_that_ends_leaves_the_others_their_blocks(interleaver):
    ring = interleaver(steps=60)
    short = ring.start_paused(Plan(), 0, 60.0)
    endless = interleaver().start_paused(Plan(), 0, 60.0)
    ring.tick_ms = 10.0
    members = [Member(candidate.trial, (None,) * 4, ProgramResult()) for candidate in (short, endless)]
    take_turns(ring, members, seconds() + 60)
    assert members[0].result.end_record.status == "ended"
    assert len(members[0].result.blocks) < 4
    assert members[1].result.end_record is None
    assert len(members[1].result.blocks) == 4


def test_on_a_gpu_blocks_are_whole(interleaver):
    """A pause would empty its queue of kernels. No such device is here: only its name is another."""
    ring = interleaver()
    found = []
    for device in ("cpu", "cuda"):
        member = Member(ring.start_paused(Plan(), 0, 60.0).trial, (None,), ProgramResult())
        member.trial.ready["device"] = device
        found.append(member)
    ring.tick_ms = 10.0
    take_turns(ring, found, seconds() + 60)
    assert found[0].result.blocks[0].at_s < found[1].result.blocks[0].at_s


@pytest.mark.full
def test_a_pair_whose_plain_program_ends_keeps_what_was_measured(interleaver):
    ring = interleaver(steps=300)
    plain, tuned = (ring.start_paused(Plan(), 0, 60.0) for _ in range(2))
    ring.tick_ms = max(plain.trial.ready["tick_ms"], 5.0)
    ratio = compare_running(ring, plain.trial, tuned.trial, seconds() + 60)
    assert 1 <= ratio.n <= 300 / ring.block_ticks


class Scripted:
    """A program, stopped for long, whose ticks take these milliseconds, and then the last of them."""

    def __init__(self, times):
        self.times, self.ticks_done, self.stopped_s, self.core, self.ready = times, 0, -100.0, None, {}

    def run_ticks(self, ticks, deadline_s, max_s=1e9, core=None):
        self.ticks_done += ticks
        self.stopped_s = seconds()
        return [
            self.times[min(at, len(self.times) - 1)] for at in range(self.ticks_done - ticks, self.ticks_done)
        ]


@pytest.mark.parametrize(
    ("times", "ms", "most_ticks"),
    [
        ([5862.0, 5100.0, 4394.0, 2900.0, 1436.0, 741.0], 741.0, 8),  # every other one was recorded
        ([2800.0, 690.0], 690.0, 4),
        ([1400.0], 1400.0, 5),  # slow, and not cold
        ([400.0], 400.0, 3),
    ],
)
def test_a_block_counts_once_its_program_is_steady_again(monkeypatch, times, ms, most_ticks):
    monkeypatch.setattr("flatout.tune.comparison.busy_cores", lambda seconds: 0.0)
    timer, trial = BlockTimer(), Scripted(times)
    timer.tick_ms = 690.0
    member = Member(trial, (None,), ProgramResult(), fresh=False)
    take_turns(timer, [member], seconds() + 60)
    assert [block.ms for block in member.result.blocks] == [ms]
    assert trial.ticks_done <= most_ticks
