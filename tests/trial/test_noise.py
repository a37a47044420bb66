"""The probe for gradient noise: it sees each batch's own gradient and leaves weights, buffers and scale
unchanged.
"""

import copy

import pytest
import torch

from flatout.agent.ledger import Ledger
from flatout.agent.listener import EVENTS, Listener
from flatout.agent.training_context import TrainingContext
from flatout.trial.probes.active import ActiveProbe
from flatout.trial.probes.probe import ProbeTools

BATCH = 4


class Passing(Listener):
    """Trains before a probe is open, then passes on its measurements, as a trial does."""

    wants_phases = True
    listening = None

    def __init__(self):
        for name in (name for name in EVENTS if name != "step_end"):
            setattr(self, name, lambda *what, name=name: self._pass(name, *what))

    def _pass(self, name, *what):
        if self.listening is not None and self.listening.probe is not None:
            getattr(self.listening.probe, name)(*what)

    def step_end(self):
        if self.listening is not None and self.listening.probe is not None:
            self.listening.tick()


class Program:
    """Linear regression with a normalisation; samples in a fixed order."""

    def __init__(self, accumulate=1, scaler=False, clip=False, samples=22 * BATCH, drop=""):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaler)
        self.accumulate, self.clip, self.drop = accumulate, clip, drop
        self.data = [(torch.randn(3), torch.randn(2)) for _ in range(samples)]
        self.loader = torch.utils.data.DataLoader(self.data, BATCH)
        self.batches = []

    def loss(self, model, x, y):
        return (model(x) - y).square().mean() / self.accumulate

    def train(self, steps):
        left = steps
        while left:
            for at, (x, y) in enumerate(self.loader):
                self.batches.append((x, y))
                self.scaler.scale(self.loss(self.model, x, y)).backward()
                if (at + 1) % self.accumulate:
                    continue
                if self.clip:
                    self.scaler.unscale_(self.optimizer)
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=self.drop != "zeros")
                if self.drop == "moves":
                    with torch.no_grad():
                        self.model[1].weight.mul_(0.99)
                left -= 1
                if not left:
                    break


@pytest.fixture
def context():
    ledger = Ledger()
    made = TrainingContext(torch, Passing(), ledger)
    made.install()
    yield made
    made.stop_observing()
    ledger.restore()


def listen(context, program, ticks, before=2):
    """The measurements of that many steps, after some training; None where the probe could not be opened, and
    the reason.
    """
    program.train(before)
    listening = ActiveProbe(ProbeTools(torch, context, Ledger))
    context.listener._listener.listening = listening
    program.batches.clear()
    failed = listening.begin({"probe": "noise", "ticks": ticks})
    if failed:
        return {"why_not": failed}
    program.train(ticks)
    return listening.end()


@pytest.mark.parametrize(
    "options",
    [{}, {"drop": "zeros"}, {"accumulate": 2, "scaler": True, "clip": True}],
    ids=["plain", "zeros", "accumulated"],
)
def test_each_batch_is_measured_by_its_own_gradient(context, options):
    """The gradient is taken before clipping, without the scale, for each micro-batch; and everything is
    restored.
    """
    program = Program(**options)
    program.train(2)
    before = copy.deepcopy(
        (program.model.state_dict(), program.optimizer.state_dict(), program.scaler.state_dict())
    )
    step, frozen = type(program.optimizer).step, copy.deepcopy(program.model)
    recorded = listen(context, program, 10, before=0)
    expected = []
    for x, y in program.batches[:20]:
        frozen.zero_grad()
        program.loss(frozen, x, y).backward()
        expected.append(torch.cat([p.grad.flatten() for p in frozen.parameters()]).double())
    gram = torch.stack(expected) @ torch.stack(expected).T
    count = recorded["gradients"]
    assert count >= 10 * program.accumulate - 1
    assert (recorded["batch"], recorded["step"], recorded["not_finite"]) == (BATCH, 2, 0)
    torch.testing.assert_close(
        torch.tensor(recorded["products"], dtype=torch.float64), gram[:count, :count], rtol=1e-4, atol=1e-7
    )
    torch.testing.assert_close(
        torch.tensor(recorded["squares"], dtype=torch.float64), gram.diagonal()[:count], rtol=1e-4, atol=1e-7
    )
    after = (program.model.state_dict(), program.optimizer.state_dict(), program.scaler.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert "step" not in vars(program.optimizer) or program.optimizer.step.__func__ is step
    program.train(1)
    assert not torch.equal(program.model[1].weight, before[0]["1.weight"])  # and it learns again


def test_the_short_last_batch_is_left_out(context):
    """Three epochs of seven batches and a short one: neither the short batch nor the adjacent one counts."""
    recorded = listen(context, Program(samples=7 * BATCH + 2), 24, before=8)
    assert recorded["batch"] == BATCH
    assert 17 <= recorded["gradients"] <= 19


def test_several_optimizers_are_rejected(context):
    program = Program()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert "2 optimizers" in listen(context, program, 8, before=0)["why_not"]
    del other


def test_no_optimizer_is_rejected(context):
    program = Program()
    program.optimizer = None
    assert "without an optimizer" in listen(context, program, 8, before=0)["why_not"]


def test_weights_changed_outside_the_optimizer_are_reported(context):
    assert "outside its optimizer" in listen(context, Program(drop="moves"), 10)["why_not"]


def test_too_few_steps_are_reported(context):
    assert "are needed" in listen(context, Program(), 5)["why_not"]
