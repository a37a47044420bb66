"""No tick holds work of flatout. The clock of these trials counts operators, so a tick's time is their number."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flatout.measure.clock import HostClock  # noqa: E402
from flatout.measure.parity import digest  # noqa: E402
from flatout.measure.phases import PhaseRecorder  # noqa: E402
from flatout.trial.spec import TrialSpec  # noqa: E402
from flatout.trial.worker import Worker  # noqa: E402
from flatout.trial.worker_commands import StopTrial  # noqa: E402

BATCH, OF_LOSSES = 4, 2  # detach and clone of each loss, which a script may scale in place


class Operators(TorchDispatchMode):
    name, count = "host", 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))

    def mark(self):
        return self.count

    def elapsed_ms(self, start, end):
        return float(end - start)

    synchronize = HostClock.synchronize


class Commands:
    """A channel whose parent sends these commands, and keeps the answers."""

    def __init__(self, *commands):
        self.commands, self.answers = list(commands), []

    def receive(self):
        return self.commands.pop(0)

    def send(self, message):
        self.answers.append(message)


def train(steps, after_step=lambda: None):
    """The number of operators of each step, with its batch. A new process would seed in the same way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(80 * BATCH, 3), torch.randint(2, (80 * BATCH,)))
    for _, (x, y) in zip(range(steps), torch.utils.data.DataLoader(data, BATCH), strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after_step()
    return model


def trial(tmp_path, operators, *commands):
    files = SimpleNamespace(bypass=nullcontext)
    with mock.patch("flatout.trial.worker_record.overlay_of_process", return_value=files):
        worker = Worker(TrialSpec(folder=str(tmp_path), address="", sketches=True), torch)
    worker.channel, worker.clock = Commands(*commands), operators
    worker.phases = PhaseRecorder(operators)
    worker.context.install()
    try:
        with operators, pytest.raises(StopTrial):
            train(80)
    finally:
        worker.ledger.restore()
    return worker


def test_digests_sketches_and_descriptions_of_batches_are_no_part_of_a_tick(tmp_path):
    plain, counts = Operators(), []
    with plain:
        train(4, lambda: counts.append(plain.count))
    of_a_step = counts[-1] - counts[-2]
    worker = trial(tmp_path, Operators(), {"do": "run", "ticks": 40}, {"do": "finish"})
    assert len(worker.ticks_ms) >= 8
    assert {*worker.ticks_ms, *worker.measured} == {of_a_step + OF_LOSSES}
    ready, block, _ = worker.channel.answers[-3:]
    assert ready["tick_ms"] == block["ms"][0] == of_a_step + OF_LOSSES
    record = worker.record("", "")
    assert list(record.weights_digests) == ["1", "2", "4", "8", "16", "32"]
    assert list(record.weights_sketches) == list(record.weights_digests)
    assert len(record.batch_hashes) == len(set(record.batch_hashes)) >= 9
    model = train(8)
    assert record.weights_digests["8"] == digest([*model.parameters(), *model.buffers()], torch)


def test_steps_that_a_replica_copies_are_no_part_of_a_phase(tmp_path):
    worker = trial(
        tmp_path,
        Operators(),
        {"do": "replica", "choices": []},
        {"do": "run", "ticks": 3},
        {"do": "finish"},
    )
    assert any("replica" in answer for answer in worker.channel.answers)
    steps = [
        sum(end - start for phase, start, end in spans if phase != "data")
        for _, _, spans in worker.phases._steps
    ]
    assert len(steps) >= 2
    assert len(set(steps)) == 1
