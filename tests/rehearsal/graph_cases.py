"""Modules and optimizers recorded as CUDA graphs compared with plain copies, in one process.

Prints the differences by case as JSON; "" means none.
"""

import contextlib
import gc
import json
import random
import sys
import traceback
import warnings
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.kernels.graph_module import ModuleGraphs
from flatout.levers.graphs import LEVER
from flatout.measure.memory import reserved_for_graphs
from flatout.schema.facts import Facts
from flatout.schema.lever import Skip

warnings.filterwarnings("ignore")
DEVICE = torch.device("cuda:0")
CASES = {}
REPLAYS = [0]
replay = torch.cuda.CUDAGraph.replay


def counted(graph):
    REPLAYS[0] += 1
    replay(graph)


torch.cuda.CUDAGraph.replay = counted


def case(function):
    CASES[function.__name__] = function
    return function


class Training:
    """A model with its optimizer; ``under`` applies the lever after two plain steps."""

    def __init__(self, model, recorded, optimizer="SGD", loss=F.cross_entropy, **more):
        torch.manual_seed(1)
        self.loss = loss
        self.model = model().to(DEVICE)
        more = more or ({"momentum": 0.9} if optimizer == "SGD" else {"fused": True})
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01, **more)
        self.source = torch.Generator().manual_seed(2)
        self.found, self.recorded, self.context, self.undo = [], recorded, None, None
        if recorded:
            self.ledger = Ledger()
            self.context = TrainingContext(torch, Listener(), self.ledger)
            self.context.install()
        self.steps(2)
        if recorded:
            assert not isinstance(LEVER.applies(Facts(), self.context), Skip), LEVER.applies(
                Facts(), self.context
            )
            self.undo = LEVER.apply(self.context, True, Ledger())

    def batch(self, rows=6):
        return torch.randn(rows, 8, generator=self.source).to(DEVICE), torch.randint(
            3, (rows,), generator=self.source
        ).to(DEVICE)

    def step(self, loss=None, **batch):
        x, y = self.batch(**batch)
        self.optimizer.zero_grad()
        value = (loss or self.loss)(self.model(x), y)
        value.backward()
        self.optimizer.step()
        self.found.append(value.detach())

    def steps(self, count, **more):
        for _ in range(count):
            self.step(**more)

    def end(self):
        if self.recorded:
            self.undo()
            self.context.stop_observing()
            self.ledger.restore()
        return [*self.found, *(p.detach() for p in self.model.parameters()), *self.model.buffers()]


def counterparts(train, model, least=20, said="", **more):
    """Trains a plain and a recorded copy.

    Reports any difference, fewer replays than ``least``, and a report that differs from ``said``.
    """
    plain = Training(model, False, **more)
    train(plain)
    expected = [each.clone() for each in plain.end()]
    before = REPLAYS[0]
    recorded = Training(model, True, **more)
    train(recorded)
    found, reports = recorded.end(), " ".join(sentence for _, sentence in recorded.context.reports)
    if said and said not in reports:
        return f"it reported {reports!r}"
    if not said and reports:
        return f"it gave up: {reports}"
    if REPLAYS[0] - before < least:
        return f"{REPLAYS[0] - before} replays"
    off = [
        at
        for at, (one, other) in enumerate(zip(expected, found, strict=True))
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    ]
    return f"{len(off)} of {len(found)} tensors differ, the first is {off[0]}" if off else ""


def copies(model, **more):
    """A case: the function trains a plain and a recorded copy."""

    def made(train):
        CASES[train.__name__] = lambda: counterparts(train, model, **more)
        return train

    return made


def small(*more):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *more, nn.Linear(16, 3))


@copies(lambda: small(nn.BatchNorm1d(16), nn.Dropout(0.3)))
def dropout_and_running_statistics(t):
    t.steps(40)


@copies(lambda: small(nn.BatchNorm1d(16)))
def a_layer_in_evaluation_mode_for_a_while(t):
    t.steps(8)
    t.model[2].eval()
    t.steps(8)
    t.model[2].train()
    t.steps(8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.factor = small(), 1.0

    def forward(self, x):
        return self.body(x) * self.factor


@copies(Scaled)
def an_attribute_that_the_script_sets(t):
    t.steps(12)
    t.model.factor = 0.5
    t.steps(12)


@copies(small)
def weights_that_get_other_memory(t):
    t.steps(12)
    for p in t.model.parameters():
        p.data = p.data.clone()
    t.steps(12)


@copies(small)
def layers_that_are_frozen_and_thawed(t):
    for frozen in (True, False, True):
        t.model[0].requires_grad_(not frozen)
        t.steps(8)


OUTSIDE = {"factor": 1.0}


class Global(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()
        OUTSIDE["factor"] = 1.0

    def forward(self, x):
        return self.body(x) * OUTSIDE["factor"]


@copies(Global, least=0, said="does not repeat its recording")
def a_number_outside_of_the_modules_is_found_by_a_check(t):
    """The value is set before the second replay, which is compared with an eager pass; the replays until then
    were right.
    """
    t.steps(3)  # monitored, recorded at the third call
    OUTSIDE["factor"] = 2.0
    t.steps(6)


class Varying(Global):
    def forward(self, x):
        return [self.body(x), *[x.sum()] * int(OUTSIDE["factor"])]


@copies(
    Varying,
    least=0,
    said="does not repeat its recording",
    loss=lambda found, y: F.cross_entropy(found[0], y),
)
def a_number_of_outputs_that_depends_on_something_outside(t):
    t.steps(3)
    OUTSIDE["factor"] = 0.5
    t.steps(6)


TABLE = {}


class Elsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()
        TABLE["bias"] = torch.ones(3, device=DEVICE)

    def forward(self, x):
        return self.body(x) + TABLE["bias"]


@copies(Elsewhere, least=0, said="uses a tensor that is neither an input nor belongs to a module")
def a_tensor_outside_of_the_modules(t):
    t.steps(8)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()
        random.seed(0)

    def forward(self, x):
        return self.body(x) * (1.0 if random.random() < 0.5 else 0.5)


@copies(Drawing, least=0, said="draws random numbers on the host")
def random_numbers_of_the_host(t):
    t.steps(8)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.calls = small(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) / self.calls


@copies(Counting, least=0, said="sets Counting.calls")
def a_pass_that_counts_its_calls(t):
    t.steps(8)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.RNN(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cells(x.view(-1, 2, 4))[0][:, -1])


@copies(Recurrent)
def recurrent_layers(t):
    t.steps(12)


@copies(small)
def outputs_and_gradients_that_are_kept(t):
    outputs, gradients = [], []
    t.model[0].weight.register_hook(gradients.append)
    for _ in range(12):
        x, y = t.batch()
        t.optimizer.zero_grad()
        outputs.append(t.model(x))
        F.cross_entropy(outputs[-1], y).backward()
        gradients += [p.grad for p in t.model.parameters()]
        t.optimizer.step()
    t.found += [*(each.detach() for each in outputs), *gradients]
    t.steps(24)


@copies(small)
def gradients_that_add_up(t):
    for _ in range(8):
        t.optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            x, y = t.batch()
            F.cross_entropy(t.model(x), y).backward()
        t.optimizer.step()


@copies(lambda: small(nn.Dropout(0.3)))
def two_passes_before_their_backward_passes(t):
    for _ in range(12):
        (a, b), (c, d) = t.batch(), t.batch()
        t.optimizer.zero_grad()
        first, second = t.model(a), t.model(c)
        F.cross_entropy(first, b).backward()
        F.cross_entropy(second, d).backward()
        t.optimizer.step()
        t.found += [first.detach(), second.detach()]


@copies(lambda: small(nn.Dropout(0.3)))
def a_graph_that_is_retained(t):
    for _ in range(12):
        x, y = t.batch()
        t.optimizer.zero_grad()
        output = t.model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        t.model(x)  # must not change what the second backward pass needs
        output.square().sum().backward()
        t.optimizer.step()
        t.found.append(output.detach())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.other = small(), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.body(x)
        return {"one": self.one(hidden), "other": self.other(hidden)}


@copies(TwoHeads, optimizer="AdamW", loss=lambda found, y: F.cross_entropy(found["one"], y))
def an_output_that_is_used_later_only(t):
    """Weights that no gradient reaches keep None: an optimizer with weight decay would change
    them otherwise.
    """
    t.steps(8)
    t.found.append(torch.tensor([p.grad is None for p in t.model.other.parameters()]))
    t.steps(8, loss=lambda found, y: F.cross_entropy(found["other"], y))
    t.steps(8)


@copies(small)
def autocast_of_the_script(t):
    for _ in range(12):
        x, y = t.batch()
        t.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(t.model(x).float(), y)
        loss.backward()
        t.optimizer.step()
        t.found.append(loss.detach())


@copies(small, optimizer="AdamW")
def a_state_that_is_loaded_again(t):
    t.steps(8)
    state = (
        {name: value.clone() for name, value in t.model.state_dict().items()},
        json_free(t.optimizer.state_dict()),
    )
    t.steps(8)
    t.model.load_state_dict(state[0])
    t.optimizer.load_state_dict(state[1])
    t.steps(8)


def json_free(state):
    return {
        "state": {
            at: {name: value.clone() for name, value in each.items()} for at, each in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


@copies(small, optimizer="AdamW")
def a_rate_that_changes_now_and_then(t):
    for rate in (0.01, 0.005, 0.0025):
        t.optimizer.param_groups[0]["lr"] = rate
        t.steps(24)


@case
def hooks_of_an_optimizer():
    """They are called once a step, and not while its update is recorded."""
    calls = []

    def train(t):
        t.optimizer.register_step_post_hook(lambda *_: calls.append(t.recorded))
        t.steps(12)

    off = counterparts(train, small, optimizer="RAdam", capturable=True)
    return off or (
        ""
        if calls.count(True) == calls.count(False) == 12
        else f"{calls.count(True)} and {calls.count(False)} calls"
    )


@copies(small)
def a_scheduler_that_is_made_afterwards(t):
    t.steps(4)
    schedule = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    for _ in range(3):
        t.steps(24)
        schedule.step()


@copies(small)
def shapes_that_come_once(t):
    for rows in (6, 6, 6, 6, 2, 6, 6, 3, 6, 6, 6, 6):
        t.step(rows=rows)


@copies(small)
def a_shape_that_changes_for_good(t):
    for rows in (6, 3, 9):
        t.steps(12, rows=rows)


@copies(lambda: small(nn.BatchNorm1d(16), nn.Dropout(0.3)))
def evaluations_between_steps(t):
    """The first comes before anything is recorded. One of them records gradients that nothing uses."""
    for _ in range(4):
        t.model.eval()
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                t.found += [t.model(t.batch(rows)[0]).detach() for rows in (6, 6, 6, 2) for _ in range(3)]
        t.model.train()
        t.steps(10)


def not_finite(t, value):
    x, y = t.batch()
    t.optimizer.zero_grad()
    loss = F.cross_entropy(t.model(x * value), y)
    loss.backward()
    t.found.append(loss.detach())
    return loss


@copies(lambda: small(nn.BatchNorm1d(16), nn.Dropout(0.3)), optimizer="AdamW")
def losses_that_are_nan_from_a_step_on(t):
    """The check of the 32nd replay compares outputs that are NaN."""
    t.steps(12)
    not_finite(t, float("nan"))
    t.optimizer.step()
    t.steps(40)


@copies(lambda: small(nn.Dropout(0.3)))
def steps_that_are_left_out_because_their_loss_is_nan(t):
    for _ in range(6):
        t.steps(5)
        for value in (float("nan"), float("inf")):
            if not not_finite(t, value).isfinite():
                t.optimizer.zero_grad()


@copies(small, loss=lambda found, y: F.cross_entropy(found.float(), y), momentum=0.9)
def a_scaler_that_skips_steps_of_infinite_gradients(t):
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**120, growth_interval=4)
    for _ in range(40):
        x, y = t.batch()
        t.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(t.model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(t.optimizer)
        scaler.update()
        t.found += [loss.detach(), torch.tensor(scaler.get_scale())]


@case
def checks_of_replays_are_not_timed():
    """The second replay is compared with an eager pass, which is no part of a measured step."""
    training = Training(small, True)
    inside, eager, run_eagerly = [], [], ModuleGraphs.run_eagerly

    @contextlib.contextmanager
    def untimed():
        inside.append(REPLAYS[0])
        yield
        inside.append(REPLAYS[0])

    def counted_pass(graphs, call):
        eager.append(len(inside))
        return run_eagerly(graphs, call)

    training.undo()
    training.context.untimed = untimed
    with mock.patch.object(ModuleGraphs, "run_eagerly", counted_pass):
        training.undo = LEVER.apply(training.context, True, Ledger())
        training.steps(8)
    training.end()
    ok = len(inside) == 2 and inside[1] == inside[0] + 1 and eager == [0, 0, 1]
    return "" if ok else f"{inside}, {eager}"


@case
def memory_of_a_recording_is_counted_and_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(lambda: nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 3)), True)
    before = reserved_for_graphs(torch, DEVICE)
    training.steps(6)
    held = reserved_for_graphs(torch, DEVICE)
    training.end()
    torch.cuda.empty_cache()
    after = reserved_for_graphs(torch, DEVICE)
    return "" if held > before + 6 * 4096 * 4 and after < held else f"{before}, {held}, {after} bytes"


@case
def hooks_of_the_script_keep_a_module_eager():
    model = small().to(DEVICE)
    model[0].register_forward_hook(lambda *_: None)
    context = TrainingContext(torch, Listener(), Ledger())
    context.register_objects([model], [], [])
    answer = LEVER.applies(Facts(), context)
    return "" if isinstance(answer, Skip) and "has hooks on Linear" in answer.reason else repr(answer)


def came_of(made):
    try:
        return made()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main():
    print(
        json.dumps(
            {name: came_of(made) for name, made in CASES.items() if not sys.argv[1:] or name in sys.argv[1:]}
        )
    )


if __name__ == "__main__":
    main()
