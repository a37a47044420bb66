"""The parent's side of a trial: control passes to the program and back, levers are switched in between, and
time is recorded where it was spent.
"""

import json
import os
import sys
import time

import pytest
from trials import warm_programs

from flatout.job.folder import TrialFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.measure.statistics import median
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

SLEEP_MS = 40.0

LEVERS = f"""
import time
from flatout.schema.lever import Lever, Options
from flatout.schema.enums import Effect, Moment

def wait(scene, value, ledger):
    def wrapper(forward):
        def slow(*args, **kwargs):
            time.sleep({SLEEP_MS / 1000} * value)
            return forward(*args, **kwargs)
        return slow
    for root in scene.roots:
        scene.wrap_forward(root, wrapper, ledger)
    return ledger.restore

def fail(scene, value, ledger):
    ledger.set(scene.torch, "manual_seed", None)
    raise RuntimeError("it does not work here")

def table(name, apply):
    return Lever(name, Moment.MODEL, Effect.EXACT, lambda facts, scene: Options((1, 2)), lambda value: "pass", apply=apply, live=True)

def wrong(scene, value, ledger):
    for root in scene.roots:
        scene.wrap_forward(root, lambda forward: lambda *args: 1.01 * forward(*args), ledger)
    return ledger.restore

TABLE = (table("slow", wait), table("broken", fail), table("wrong", wrong))
"""
PROGRAM = """
import os, sys
import torch
model = torch.nn.Linear(4, 1)
steps = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    os.write(steps, b".")
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """``trial, steps = begin()``: a program under a table of test levers, and a function that counts its
    steps.

    With ``ranks`` torchrun starts that many processes, and the function returns the text that one of them has
    written.
    """
    (tmp_path / "levers_of_test.py").write_text(LEVERS)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "work").mkdir()
    (tmp_path / "trial").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    counter = tmp_path / "steps"
    begun = []

    def start(plan=None, program=PROGRAM, ranks=0):
        (tmp_path / "train.py").write_text(program)
        first = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks else [sys.executable]
        command = parse_command([*first, str(tmp_path / "train.py"), str(counter)])
        begun.append(
            Trial(
                command,
                TrialFolder(tmp_path / "trial"),
                plan or Plan(),
                Facts(),
                TrialOptions(table="levers_of_test:TABLE"),
            )
        )
        return begun[-1].start(), (
            lambda rank: (tmp_path / f"steps.{rank}").read_text().split()
        ) if ranks else lambda: counter.stat().st_size

    with warm_programs():
        yield start
    for trial in begun:
        trial.close()
    sys.modules.pop("levers_of_test", None)


def soon():
    return seconds() + 60


def test_the_baton(begin):
    trial, steps = begin()
    ready = trial.wait_ready(soon())
    assert ready["unit"] == "step"
    assert ready["device"] == "cpu"
    assert ready["tick_ms"] > 0
    trial.pause()
    # This program takes no step while another one runs.
    before = steps()
    time.sleep(0.3)
    assert steps() == before
    # It runs the requested number of steps and reports each.
    times = trial.run_ticks(7, soon())
    assert len(times) == 7
    assert 7 <= steps() - before <= 9
    # A lever acts from the next step on, and is gone when it is switched off.
    plain = median(trial.run_ticks(10, soon()))
    assert trial.switch([Choice("slow", 1)], soon())["skipped"] == []
    trial.run_ticks(1, soon())
    slow = trial.run_ticks(5, soon())
    assert min(slow) >= SLEEP_MS
    trial.switch([Choice("slow", 2)], soon())
    trial.run_ticks(1, soon())
    assert min(trial.run_ticks(5, soon())) >= 2 * SLEEP_MS
    trial.switch([], soon())
    trial.run_ticks(1, soon())
    assert median(trial.run_ticks(10, soon())) < SLEEP_MS
    assert plain < SLEEP_MS
    # A lever that cannot be applied is named and affects no other lever.
    answer = trial.switch([Choice("broken", 1), Choice("slow", 1), Choice("unknown", True)], soon())
    assert [outcome["name"] for outcome in answer["applied"]] == ["slow"]
    assert {outcome["name"]: outcome["reason"] for outcome in answer["skipped"]} == {
        "broken": "it failed to start (RuntimeError: it does not work here)",
        "unknown": "it cannot be switched while the program runs",
    }
    options = trial.ask({"do": "options"}, soon())["options"]
    assert options == {name: {"values": [1, 2], "effect": None} for name in ("slow", "broken", "wrong")}
    record = trial.finish()
    assert record.status == "finished"
    assert record.steps >= 7 + 10 + 5 + 5 + 10
    assert json.loads(trial.folder.result.read_text())["status"] == "finished"
    assert trial.finish() is record


def test_a_plan_holds_from_the_first_step_on(begin):
    trial, _ = begin(Plan((Choice("slow", 1), Choice("broken", 1))))
    ready = trial.wait_ready(soon())
    assert [outcome["name"] for outcome in ready["applied"]] == ["slow"]
    assert [outcome["name"] for outcome in ready["skipped"]] == ["broken"]
    assert min(trial.run_ticks(3, soon())) >= SLEEP_MS
    assert [entry["name"] for entry in trial.finish().applied] == ["slow"]


ENDS = {
    "ends": ("for _ in range(60):", "", "ended", ""),
    "is killed": ("while True:", "os.kill(os.getpid(), 9)", "failed", "killed by signal 9"),
    "stops answering": ("while True:", "import time; time.sleep(1000)", "hung", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_in_its_turn(begin, end):
    loop, line, status, reason = ENDS[end]
    program = PROGRAM.replace("while True:", loop)
    trial, _ = begin(program=program + f"    if os.fstat(steps).st_size == 60: {line}\n" if line else program)
    trial.wait_ready(soon())
    with pytest.raises(ProgramGone) as caught:
        trial.run_ticks(1000, seconds() + 2 if status == "hung" else soon())
    record = caught.value.record
    assert record.status == status
    assert reason in record.reason
    if status == "ended":
        assert (len(record.losses), record.exit_code) == (60, 0)
    if status == "hung":
        assert trial.ready
        trial.close()
        assert not os.path.exists(trial.folder.files)


RANKS = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = os.open(f"{sys.argv[1]}.{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    os.write(seen, b"slow " if "forward" in vars(model) else b"plain ")
"""


@pytest.mark.timeout(200)
def test_ranks_switch_together_and_a_replica_does_not_disturb_them(begin):
    """The other rank has the lever too.

    A step repeated on one rank leaves the averaging of gradients unchanged.
    """
    trial, seen = begin(program=RANKS, ranks=2)
    trial.wait_ready(soon() + 60)
    trial.pause()
    trial.run_ticks(3, soon())
    assert {last for rank in (0, 1) for last in seen(rank)[-2:]} == {"plain"}
    trial.switch([Choice("slow", 1)], soon())
    trial.run_ticks(4, soon())
    assert [seen(rank)[-1] for rank in (0, 1)] == ["slow", "slow"]
    trial.switch([], soon())
    trial.run_ticks(4, soon())
    assert [seen(rank)[-1] for rank in (0, 1)] == ["plain", "plain"]
    answer = trial.ask({"do": "replica", "choices": [Choice("slow", 1).to_json()]}, soon())["replica"]
    assert answer["checks"]
    assert all(check["passed"] for check in answer["checks"]), answer
    trial.pause()
    assert len(trial.run_ticks(5, soon())) == 5  # both ranks still step together
    info = seen(0), seen(1)
    assert len(set(zip(*info, strict=False))) == 2  # and none of them had the lever alone at any time
    assert trial.finish().status == "finished"


def test_a_replica_repeats_passes_where_a_step_is_a_long_closure(begin):
    trial, passes_done = begin(
        program="""
import os, sys, time
import torch
passes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=40, max_eval=10**9, tolerance_grad=0, tolerance_change=0)
def closure():
    time.sleep(0.05)
    os.write(passes, b".")
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1))
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
"""
    )
    assert trial.wait_ready(soon())["unit"] == "backward"
    trial.pause()
    trial.run_ticks(45, soon())  # the second step
    for name, sound in (("slow", True), ("wrong", False)):
        before = passes_done()
        answer = trial.ask({"do": "replica", "choices": [Choice(name, 1).to_json()]}, soon())["replica"]
        assert all(check["passed"] for check in answer["checks"]) is sound, answer
        assert len(answer["checks"]) > 3
        assert passes_done() - before < 10
    assert trial.finish().status == "finished"
