"""What may happen to a value between its computation and its read, with the lever `early_values` on.

Prints the errors of each case as JSON.
"""

import json
import random
import tempfile
import threading
import traceback
import warnings
import weakref
from types import SimpleNamespace

import torch
from torch import nn

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.early.copies import HostCopies
from flatout.levers.early_values import LEVER

warnings.filterwarnings("ignore")
DEVICE = torch.device("cuda:0")
LATER = 9  # steps after which a value was read and found right a few times
STEPS = 18
CASES = {}
WAITS = []  # for events: the waits of a read that is answered from a copy
plainly = torch._C.TensorBase.item


def case(function):
    CASES[function.__name__] = function
    return function


def answered(count):
    """The number of reads of the case that were answered from a copy."""
    assert len(WAITS) >= count, f"{len(WAITS)} reads were answered from a copy, and not {count}"


class Training:
    """A model whose loss is read in each step by ``between(loss, step)``."""

    def __init__(self, device=DEVICE):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        self.context.install()
        self.lever = Ledger()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x = torch.randn(8, 4, device=device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lever.restore()
        self.context.stop_observing()
        self.ledger.restore()

    def apply(self):
        LEVER.apply(self.context, True, self.lever)

    def steps(self, between, count=STEPS, loss_of=lambda outputs: outputs.square().mean()):
        for step in range(count):
            if step == 1:
                self.apply()
            self.optimizer.zero_grad()
            loss = loss_of(self.model(self.x))
            loss.backward()
            self.optimizer.step()
            between(loss, step)


def same(loss, step):
    assert loss.item() == plainly(loss)


@case
def a_write_that_torch_counts():
    def written(loss, step):
        with torch.no_grad():
            if step > LATER:
                loss.mul_(2)
        same(loss, step)

    with Training() as training:
        training.steps(written)


@case
def a_write_through_data_in_each_step():
    def written(loss, step):
        loss.data.mul_(2)
        same(loss, step)

    with Training() as training:
        training.steps(written)
        assert any("does not count" in sentence for _, sentence in training.context.reports)


@case
def a_collective():
    """gloo counts its writes. NCCL does not, and has no stand-in, so the test makes the write itself."""

    def exchanged(loss, step):
        torch.distributed.broadcast(loss.data, 0)
        if step > LATER:
            loss.data.add_(1)
        same(loss, step)

    with tempfile.TemporaryDirectory() as folder, Training() as training:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(f"{folder}/store", 1), rank=0, world_size=1
        )
        training.steps(exchanged)
        torch.distributed.destroy_process_group()


@case
def a_replay_of_a_graph():
    static, graph, side = torch.zeros(8, 1, device=DEVICE), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        output = static.square().mean()

    def replayed(loss, step):
        if step > LATER:
            static.fill_(float(step))
            graph.replay()
        same(loss, step)

    with Training() as training, side:
        training.steps(replayed, loss_of=lambda outputs: Held.apply(outputs, output))


class Held(torch.autograd.Function):
    """The loss stays where the graph has written it."""

    @staticmethod
    def forward(ctx, outputs, where):
        ctx.shape = outputs.shape
        return where.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape), None


@case
def another_tensor_in_the_same_memory():
    freed, kept = set(), []

    def read(loss, step):
        same(loss, step)
        freed.add(loss.data_ptr())

    with Training() as training:
        training.steps(read)
        # what is kept takes free memory, block by block, until that of a loss is taken
        for _ in range(4096):
            kept.append(training.x.square().sum() + 7)
            same(kept[-1], STEPS)
            if kept[-1].data_ptr() in freed:
                return
        raise AssertionError("the memory was not reused")


@case
def a_time_that_a_read_waits_for():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(loss, step):
        end.record()
        float(loss)
        assert start.elapsed_time(end) >= 0
        start.record()

    start.record()
    with Training() as training:
        training.steps(timed)


@case
def a_copy_that_a_read_waits_for():
    there = torch.zeros(4).pin_memory()

    def copied(loss, step):
        value, host = torch.full((4,), float(step), device=DEVICE), there
        if step % 3 == 1:
            host.copy_(value, non_blocking=True)
        elif step % 3 == 2:
            host = value.to("cpu", non_blocking=True)
        float(loss)
        assert not step % 3 or host.tolist() == [step] * 4

    with Training() as training:
        training.steps(copied)


@case
def another_stream_and_a_recording():
    copies, side = HostCopies(torch), torch.cuda.Stream()
    with side:
        elsewhere = torch.ones((), device=DEVICE)
    here = torch.ones((), device=DEVICE)
    copies.begin([("elsewhere", elsewhere), ("here", here)])
    assert copies.valid_copy(elsewhere) is None
    assert copies.valid_copy(here) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        copies.begin([("elsewhere", elsewhere), ("recorded", elsewhere * 2)])
    assert copies.valid_copy(elsewhere) is None


@case
def a_view_of_its_bits():
    def looked_at(loss, step):
        assert loss.detach().view(torch.int32).item() == plainly(loss.detach().view(torch.int32))
        assert loss.view(1, 1).tolist() == [[plainly(loss)]]
        with torch.inference_mode():
            assert loss.detach().item() == plainly(loss)
        held = loss.data
        held.add_(1)
        same(held, step)

    with Training() as training:
        training.steps(looked_at)


@case
def a_thread_that_reads():
    def read(loss, step):
        found = []
        thread = threading.Thread(target=lambda: found.append(loss.item()))
        thread.start()
        thread.join()
        assert found == [plainly(loss)]

    with Training() as training:
        training.steps(read)
    answered(LATER)


@case
def a_scaled_loss():
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with Training(torch.device("cuda:1")) as training:
        for step in range(STEPS):
            if step == 1:
                training.apply()
            training.optimizer.zero_grad()
            held = SimpleNamespace(loss=training.model(training.x).square().mean())
            scaler.scale(held.loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            same(held.loss, step)
    answered(LATER)


@case
def a_loss_that_is_read_a_step_late():
    before = []

    def late(loss, step):
        if before:
            same(before.pop(), step)
        before.append(loss)

    with Training() as training:
        training.steps(late)
    answered(LATER)


@case
def values_that_the_script_holds():
    class Metrics:
        def read(self, training):
            for step in range(STEPS):
                if step == 1:
                    training.apply()
                outputs = training.model(training.x)
                largest, several, self.least = (
                    outputs.max().detach(),
                    {"mean": outputs.mean().detach(), "both": 1},
                    outputs.min().detach(),
                )
                listed = [outputs.sum().detach(), None]
                outputs.square().mean().backward()
                norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
                training.optimizer.step()
                for value in (largest, several["mean"], self.least, listed[0], norm):
                    same(value, step)

    with Training() as training:
        Metrics().read(training)
    answered(5 * LATER)


@case
def a_model_that_is_compiled():
    whole = torch.compile(
        lambda x, held: held.copy_(x).to("cuda:0").square().mean(), backend="eager", fullgraph=True
    )
    parts = torch.compile(lambda x: x * x.max().item(), backend="eager")
    with Training() as training:
        training.steps(
            same, loss_of=lambda outputs: whole(outputs, torch.zeros_like(outputs)) + parts(outputs).mean()
        )


@case
def nothing_is_kept_alive():
    held = []

    def noted(loss, step):
        same(loss, step)
        held.append((weakref.ref(loss), torch.cuda.memory_allocated()))

    with Training() as training:
        training.steps(noted, 40)
    assert all(ref() is None for ref, _ in held[:-1])
    assert held[-1][1] == held[LATER][1]


@case
def a_program_that_reads_nothing():
    with Training() as training:
        training.steps(lambda loss, step: None)
        assert [name for name, _ in training.context.reports] == ["early_values"]
        assert "reads no value" in training.context.reports[0][1]


@case
def switched_off_and_on():
    def switched(loss, step):
        same(loss, step)
        if step > 2:
            training.lever.restore() if step % 2 else training.apply()

    with Training() as training:
        training.steps(switched, 31)
        assert training.context.reports == []
    answered(LATER)


@case
def anything_in_any_order():
    """Random writes and reads, each compared with the value on the device."""
    chance = random.Random(0)
    aliases = [
        lambda x: x,
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.view(1),
        lambda x: x.detach().view(1, 1),
        lambda x: x * 1,
    ]
    writes = [
        lambda x: None,
        lambda x: None,
        lambda x: x.detach().add_(1),
        lambda x: x.detach().view(1).zero_(),
        lambda x: x.detach().copy_(torch.ones(())),
    ]
    reads = [
        lambda x: x.item(),
        float,
        lambda x: float(int(x)),
        lambda x: x.flatten().tolist()[0],
        lambda x: float(f"{x.sum():.9e}"),
        lambda x: x.cpu().item(),
        lambda x: x.to("cpu").item(),
        lambda x: x.to(device=torch.device("cpu")).item(),
        lambda x: float(bool(x)),
    ]
    seen = [
        plainly,
        plainly,
        lambda x: float(int(plainly(x))),
        plainly,
        lambda x: float(f"{plainly(x):.9e}"),
        plainly,
        plainly,
        plainly,
        lambda x: float(bool(plainly(x))),
    ]

    def by_chance(loss, step):
        if step < 4 or chance.randrange(2):
            same(loss, step)
        for _ in range(chance.randrange(4)):
            with torch.no_grad():
                chance.choice(writes)(loss)
            tensor, at = chance.choice(aliases)(loss), chance.randrange(len(reads))
            assert reads[at](tensor) == seen[at](tensor), (step, at)

    with Training() as training:
        training.steps(by_chance, 300)
    answered(50)


@case
def a_read_while_a_graph_is_recorded():
    """The last case: a failed recording leaves the allocator in the pool of its graph."""
    failed = []

    def recorded(loss, step):
        same(loss, step)
        if step == STEPS - 1:
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    loss.item()
            except RuntimeError as error:
                failed.append(str(error))

    with Training() as training:
        training.steps(recorded)
    assert failed, "it was answered"


def main():
    wrong, really = {}, torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = lambda event: WAITS.append(event) or really(event)
    for name, run in CASES.items():
        WAITS.clear()
        try:
            run()
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
