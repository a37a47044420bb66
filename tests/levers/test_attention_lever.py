"""The lever attention in small programs: found by structure, training the same, explained where nothing was
replaced, combined with other levers.
"""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers import TABLE
from flatout.levers.attention import FLASH, LEVER
from flatout.schema.facts import Facts
from flatout.schema.lever import Options, Skip

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flatout.kernels import attention_deferred  # noqa: E402

BY_NAME = {lever.name: lever for lever in TABLE}
FACTS = Facts(cores=2, system="Linux", cpu_flags=("amx_bf16",))
T, WIDTH, HEADS, LAYERS = 8, 16, 2, 2
needs_a_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")),
    reason="not run: there is no C++ compiler here",
)


def weigh(q, k, mask):
    """The script's own function: the module below does not name a softmax."""
    return F.softmax(
        (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(mask == 0, -math.inf), dim=-1
    )


class ByHand(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.drop = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(dropout),
        )
        self.register_buffer("mask", torch.ones(T, T).tril())

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        self.weights = self.drop(weigh(q, k, self.mask[: x.shape[1], : x.shape[1]]))
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


class Unkept(ByHand):
    """Does not keep the weights: in a graph they would be a result."""

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out((weigh(q, k, self.mask) @ v).transpose(1, 2).flatten(2))


class Fused(ByHand):
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if x.shape[1] == 0:
            return weigh(q, k, self.mask)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """Asks for weights, as is the default, and ignores them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, attn_mask=torch.ones(T, T, dtype=torch.bool).triu(1))[0]


class Model(nn.Module):
    def __init__(self, kind=ByHand, dropout=0.0):
        super().__init__()
        self.token, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "attention": kind(dropout)}) for _ in range(LAYERS)
        )

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x))
        return self.head(x)


class Training:
    def __init__(self, plain=False, **options):
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        if not plain:
            self.context.install()
        torch.manual_seed(0)
        self.model = Model(**options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.draw = torch.Generator().manual_seed(1)

    def steps(self, count, look=None):
        found = []
        for _ in range(count):
            tokens = torch.randint(20, (4, T + 1), generator=self.draw)
            torch.manual_seed(7)
            loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            if look is not None:
                look(self.model)
            self.optimizer.step()
            found.append(loss.item())
        return found


@pytest.mark.parametrize("kind", [ByHand, Multihead])
def test_it_trains_the_same(training, kind):
    expected, live = training(plain=True, kind=kind).steps(9), training(kind=kind)
    got = live.steps(2)
    assert LEVER.applies(FACTS, live.context) == Options((True,))
    before = attention_deferred.FUSED_COUNT[0]
    undo = LEVER.apply(live.context, True, Ledger())
    got += live.steps(5)
    assert attention_deferred.FUSED_COUNT[0] == before + 5 * LAYERS
    undo()
    got += live.steps(2)
    assert attention_deferred.FUSED_COUNT[0] == before + 5 * LAYERS
    assert got == pytest.approx(expected, rel=1e-5)
    assert not [m for m in live.model.modules() if "forward" in vars(m)]
    assert live.context.graph_passes == []
    assert live.context.reports == []


def test_evaluation_is_plain(training):
    live = training()
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    tokens, before = torch.arange(T)[None], attention_deferred.FUSED_COUNT[0]
    with torch.no_grad():
        out = live.model.eval()(tokens)
    assert attention_deferred.FUSED_COUNT[0] == before
    assert type(live.model.layers[0]["attention"].weights) is torch.Tensor
    assert not out.requires_grad


@pytest.mark.parametrize("every", [1, 3])
def test_weights_that_a_module_keeps_can_be_read_at_any_time(training, every):
    """The weights are read after the backward pass: in each step, and once in a while."""

    def read(steps, seen):
        def look(model):
            seen.append(
                model.layers[1]["attention"].weights.detach().clone() if len(seen) % every == 0 else None
            )

        return [steps(6, look), seen]

    plain = training(plain=True)
    plain.steps(2)
    expected = read(plain.steps, [])
    live = training()
    live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    losses, seen = read(live.steps, [])
    assert losses == pytest.approx(expected[0], rel=1e-5)
    for mine, theirs in zip(seen, expected[1], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dropout": 0.3}, "applies dropout to attention weights"),
        ({"kind": Fused}, "already computes attention by scaled_dot_product_attention"),
        ({"kind": Multihead, "dropout": 0.1}, "applies dropout to attention weights"),
    ],
)
def test_a_lever_that_did_nothing_says_why(training, options, says):
    """The program uses the random numbers of the plain one and has its losses bit for bit."""
    expected, live = training(plain=True, **options).steps(8), training(**options)
    got = live.steps(2)
    LEVER.apply(live.context, True, live.ledger)
    got += live.steps(6)
    assert got == expected
    assert [name for name, _ in live.context.reports] == ["attention"]
    assert says in live.context.reports[0][1]


def test_weights_that_are_always_read_are_left_alone_and_reported(training):
    class Read(ByHand):
        def forward(self, x):
            out = ByHand.forward(self, x)
            self.most = self.weights.max().item()
            return out

    live = training(kind=Read)
    live.steps(2)
    assert LEVER.applies(FACTS, live.context) == Options((True,))
    LEVER.apply(live.context, True, live.ledger)
    live.steps(4)
    before = attention_deferred.FUSED_COUNT[0]
    live.steps(2)
    assert attention_deferred.FUSED_COUNT[0] == before


def test_which_attentions_are_found(training, program):
    assert isinstance(LEVER.applies(FACTS, program().context), Skip)  # convolutions
    inside = training(
        kind=lambda dropout: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout, batch_first=True)
    )
    inside.steps(2)
    assert LEVER.applies(FACTS, inside.context) == Options((True,))  # it may be asked for its weights
    live = training()
    live.steps(2)
    live.context.create_graph_seen = True
    assert "no second derivative" in LEVER.applies(FACTS, live.context).reason
    live.context.create_graph_seen, live.context.compiled_by_script = False, True
    assert "recognises attention itself" in LEVER.applies(FACTS, live.context).reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("autocast", "bfloat16"),
        ("recompute", {"blocks": 1.0}),
        ("fused_ops", True),
    ],
)
def test_with_another_lever(training, name, value):
    """Levers apply in the order of the table: the losses are those of the other lever alone, up to rounding,
    and attention is fused under it.
    """
    levers = sorted(
        [(BY_NAME[name], value), (LEVER, True)], key=lambda each: list(BY_NAME).index(each[0].name)
    )
    losses = []
    for chosen in ([(BY_NAME[name], value)], levers):
        live = training()
        live.steps(2)
        before, undo = (
            attention_deferred.FUSED_COUNT[0],
            [lever.apply(live.context, given, Ledger()) for lever, given in chosen],
        )
        losses.append(live.steps(4))
        assert (attention_deferred.FUSED_COUNT[0] >= before + 4 * LAYERS) == (chosen is levers)
        for each in reversed(undo):
            each()
        assert live.context.reports == []
        live.context.stop_observing()
        live.ledger.restore()
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if name == "autocast" else 1e-5)


@pytest.mark.processes
@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles three graphs with a C++ compiler
def test_with_compile(training):
    """With both on, the graph contains the fused kernel, the losses are the same, and each combination is
    compiled once.
    """
    expected, live = training(plain=True, kind=Unkept).steps(14), training(kind=Unkept)
    compile_, compiled = BY_NAME["compile"], torch._dynamo.utils.counters["stats"]
    got = live.steps(2)
    torch._dynamo.reset()
    before, kernels, graphs = compiled["unique_graphs"], [], []
    for levers in ([compile_], [LEVER, compile_], [compile_], [LEVER, compile_]):
        undo = [
            lever.apply(live.context, "default" if lever is compile_ else True, Ledger()) for lever in levers
        ]
        got += live.steps(2)
        with torch.profiler.profile() as profile:
            got += live.steps(1)
        names = {
            event.key: event.count
            for event in profile.key_averages()
            if event.key.startswith("aten::_scaled_dot_product")
        }
        kernels.append(sum(count for key, count in names.items() if "backward" not in key))
        graphs.append(compiled["unique_graphs"] - before)
        for each in reversed(undo):
            each()
    torch._dynamo.reset()
    assert kernels == [0, LAYERS, 0, LAYERS]
    assert graphs == [1, 2, 2, 2]
    assert got == pytest.approx(expected, rel=1e-4)
    assert live.context.reports == []


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="not run: transformers is not installed"
)
def test_models_of_transformers():
    """Models from another library: padding masks, shared key heads, a bias for each head.

    They run in their own process.
    """
    script = Path(__file__).parent / "programs" / "of_transformers.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=hang_s(100), check=False
    )
    assert done.returncode == 0, done.stderr
    for name, ((plain, none), (fused, count)) in json.loads(done.stdout.splitlines()[-1]).items():
        assert (none, count) == (0, 4 * 2), name  # steps, layers
        assert fused == pytest.approx(plain, rel=1e-5), name


class Fused(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = torch.nn.Linear(8, 24), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


def _context(model):
    context = TrainingContext(torch, Listener(), Ledger())
    context.register_objects([model], [torch.optim.SGD(model.parameters(), 0.1)], [])
    return context


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [
        (None, ["FA3", "FA4"], "of compute capability 9 or 10; the parameters are on none"),
        ((8, 0), ["FA3", "FA4"], "of compute capability 9 or 10; this one has 8.0"),
        ((9, 0), [], "no newer FlashAttention is installed (flash-attn-4 or flash-attn-3)"),
        ((10, 0), ["FA3"], "no newer FlashAttention is installed (flash-attn-4)"),
        ((9, 0), ["FA3"], ("FA3",)),
        ((9, 0), ["FA3", "FA4"], ("FA4", "FA3")),
    ],
)
def test_newer_flash_attention_is_offered_where_torch_can_run_it(
    monkeypatch, capability, installed, expected
):
    model = Fused()
    context = _context(model)
    if capability is not None:
        monkeypatch.setattr(type(context), "device_type", "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = LEVER.applies(Facts(versions={FLASH[name][0]: "1" for name in installed}), context)
    if isinstance(expected, tuple):
        assert answer.values == expected
    else:
        assert answer.reason.startswith("the program calls scaled_dot_product_attention itself, and ")
        assert answer.reason.endswith(expected)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_newer_flash_attention_ends_with_the_lever_or_with_dropout(monkeypatch, dropout):
    from torch.nn import attention

    class Handle:
        def remove(self):
            removed.append(True)

    removed, plain = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA3", Handle)
    model = Fused(dropout)
    context = _context(model)
    undo = LEVER.apply(context, "FA3", Ledger())
    model(torch.ones(2, 4, 8))
    assert attention.current_flash_attention_impl() == (None if dropout else "FA3")
    assert context.reports == [("attention", "FA3 has no dropout, so torch's own kernel is used")] * bool(
        dropout
    )
    undo()
    assert removed == [True]
    assert attention.current_flash_attention_impl() is None
    assert torch.nn.functional.scaled_dot_product_attention is plain
