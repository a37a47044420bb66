"""The lever fused_ops in a program with a vocabulary: found by structure, the same training, inactive where
it must be.
"""

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers import TABLE
from flatout.levers.compile import LEVER as COMPILE
from flatout.levers.fused_ops import LEVER

torch = pytest.importorskip("torch")

from flatout.kernels import deferred_logits as deferred  # noqa: E402


class Tokens(torch.nn.Module):
    """Tied weights, and the loss inside the model, as in nanoGPT."""

    def __init__(self, vocabulary=50, width=16, tied=True):
        super().__init__()
        self.token = torch.nn.Embedding(vocabulary, width)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)
        )
        self.head = torch.nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        logits = self.head(self.body(self.token(tokens)))
        return logits, torch.nn.functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )


class Training:
    """With a training context around it, unless it is ``plain``: two training contexts would observe each
    other's programs.
    """

    def __init__(self, optimizer="AdamW", plain=False, **options):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        if not plain:
            self.context.install()
        torch.manual_seed(0)
        self.model = Tokens(**options)
        self.optimizer = (
            getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01) if optimizer else None
        )
        self.draw = torch.Generator().manual_seed(1)

    def steps(self, count, look=None):
        found = []
        for _ in range(count):
            tokens = torch.randint(50, (4, 9), generator=self.draw)
            logits, loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            if self.optimizer:
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.append(look(logits) if look else loss.item())
        return found


@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_the_same(training, tied):
    plain, live = training(plain=True, tied=tied), training(tied=tied)
    expected = plain.steps(8)
    got = live.steps(2)
    before = deferred.FUSED_LOSSES[0]
    undo = LEVER.apply(live.context, True, Ledger())
    got += live.steps(3)
    assert deferred.FUSED_LOSSES[0] == before + 3
    undo()
    got += live.steps(3)
    assert deferred.FUSED_LOSSES[0] == before + 3
    assert got == pytest.approx(expected, rel=1e-5)
    assert not [m for m in live.model.modules() if "forward" in vars(m)]
    assert live.context.reports == []


def test_logits_that_the_script_reads_after_the_step(training):
    """The accuracy of a batch is computed after the optimizer has updated the weights, as in many scripts."""
    plain, live = training(plain=True), training()
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    plain.model.load_state_dict(live.model.state_dict())
    for which in (plain, live):
        which.optimizer = torch.optim.SGD(which.model.parameters(), lr=0.5)
        which.draw.manual_seed(2)
    read = [t.steps(3, look=lambda logits: logits.detach().clone()) for t in (plain, live)]
    for a, b in zip(*read, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_evaluation_is_plain(training):
    live = training()
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    tokens = torch.randint(50, (2, 5))
    with torch.no_grad():
        logits, _ = live.model(tokens, tokens)
    assert type(logits) is torch.Tensor


def test_a_gradient_that_does_not_come_from_the_loss(training):
    live = training()
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    for _ in range(4):
        live.model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))[
            0
        ].square().mean().backward()
        live.optimizer.step()
    assert live.context.reports == []  # the loss inside the model was still replaced


def test_a_lever_that_did_nothing_says_so(training):
    other = training()
    other.steps(2)
    other.model.forward = lambda tokens, targets: (
        None,
        other.model.head(other.model.body(other.model.token(tokens))).square().mean(),
    )
    LEVER.apply(other.context, True, other.ledger)
    other.steps(4)
    assert [name for name, _ in other.context.reports] == ["fused_ops"]
    assert "do not go straight into cross_entropy" in other.context.reports[0][1]


def test_hooks_that_come_later_see_the_logits(training):
    plain, live = training(plain=True), training()
    seen = {}
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    plain.steps(2)
    for name, which in (("plain", plain), ("live", live)):
        which.model.head.register_forward_hook(
            lambda module, args, output, name=name: seen.__setitem__(name, output.float().mean().item())
        )
        which.steps(1)
    assert seen["live"] == pytest.approx(seen["plain"], rel=1e-5)


class Blocks(torch.nn.Module):
    """Repeated blocks in a list, an embedding of positions with as many rows as each block has outputs, and
    the loss inside the model.
    """

    def __init__(self, vocabulary=50, width=16, layers=3):
        super().__init__()
        self.token, self.position = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(width, width)
        self.parts = torch.nn.ModuleDict(
            {
                "blocks": torch.nn.ModuleList(
                    torch.nn.Sequential(
                        torch.nn.LayerNorm(width),
                        torch.nn.Linear(width, 2 * width),
                        torch.nn.GELU(),
                        torch.nn.Linear(2 * width, width),
                    )
                    for _ in range(layers)
                ),
                "norm": torch.nn.LayerNorm(width),
            }
        )
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.parts["blocks"]:
            x = x + block(x)
        logits = self.head(self.parts["norm"](x))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_layers_as_wide_as_an_embedding_of_positions_are_no_heads(training):
    live = training()
    live.model = Blocks()
    live.context.register_objects([live.model], [live.optimizer], [])
    before = deferred.FUSED_LOSSES[0]
    undo = LEVER.apply(live.context, True, Ledger())
    assert (
        [module for module in live.model.modules() if "forward" in vars(module)]
        == [live.model.head]
        == live.context.uncompiled
    )
    live.steps(1)
    assert deferred.FUSED_LOSSES[0] == before + 1
    undo()
    assert live.context.uncompiled == []


def test_with_compile_the_blocks_are_compiled_and_the_loss_takes_no_logits(monkeypatch):
    """A counting compiler shows one graph for all blocks, made once and called in every step, and the losses
    of the plain program.
    """
    graphs, calls, really = [], [], torch.compile

    def counting(graph, example):
        graphs.append(graph)

        def run(*args):
            calls.append(len(graphs))
            return graph(*args)

        return run

    def train(levers):
        torch.manual_seed(0)
        model, draw, losses = Blocks(), torch.Generator().manual_seed(1), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        context = TrainingContext(torch, Listener(), Ledger())
        context.register_objects([model], [optimizer], [])
        undo = [lever.apply(context, value, Ledger()) for lever, value in levers]
        for step in range(6):
            tokens = torch.randint(50, (4, 9), generator=draw)
            logits, loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [
                loss.item(),
                logits.argmax(-1).float().mean().item() if step == 4 else 0.0,
            ]  # logits that are read after the step
        for each in reversed(undo):
            each()
        assert context.reports == context.uncompiled == []
        assert not [module for module in model.modules() if "forward" in vars(module)]
        return losses

    monkeypatch.setattr(
        torch,
        "compile",
        lambda forward, mode=None, dynamic=None: really(forward, backend=counting, dynamic=dynamic),
    )
    torch._dynamo.reset()
    expected, before = train([]), deferred.FUSED_LOSSES[0]
    assert train([(LEVER, True), (COMPILE, "default")]) == pytest.approx(expected, rel=1e-5)
    assert deferred.FUSED_LOSSES[0] == before + 6
    assert len(graphs) == 1
    assert len(calls) == 6 * 3
    torch._dynamo.reset()
    assert train([(COMPILE, "default")]) == pytest.approx(expected, rel=1e-5)
    assert len(graphs) == 2  # alone, it is all one graph
    torch._dynamo.reset()


def test_the_table_has_it_before_compile():
    """The exclusions from graphs must be known when the graphs are made."""
    names = [lever.name for lever in TABLE]
    assert names.index("fused_ops") < names.index("compile")
    assert not set(LEVER.excludes) | set(COMPILE.excludes)
