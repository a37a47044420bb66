"""Autocast on the CPU keeps in float32 what CUDA's keeps there, wherever an operator is called, and only
while the lever is on.
"""

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.agent.ledger import Ledger
from flatout.levers.autocast import LEVER
from flatout.levers.autocast_policy import HALF_PRECISION, PROMOTED, keep_float32
from flatout.levers.compile import LEVER as COMPILE

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

needs_a_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")),
    reason="not run: there is no C++ compiler here",
)

ONES, CLASSES = torch.ones(4, 8), torch.arange(4)
UP = functional.interpolate

# Each gets [4, 8] in bfloat16, numbers between 0.1 and 0.9. ``test_the_lists_are_those_of_this_torch`` checks that no
# operator is missing; these show what a program calls.
KEPT = {
    "__rpow__": lambda x: 2**x,
    "bilinear": lambda x: UP(x[None, None], scale_factor=2, mode="bilinear"),
    "cdist": lambda x: torch.cdist(x, x),
    "cross_entropy": lambda x: functional.cross_entropy(x, CLASSES),
    "cumsum": lambda x: x.cumsum(1),
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "group_norm": lambda x: functional.group_norm(x, 2),
    "huber_loss": lambda x: functional.huber_loss(x, x + 1),
    "kl_div": lambda x: functional.kl_div(x, x, reduction="batchmean"),
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "log": torch.log,
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean of all": torch.mean,
    "mse_loss": lambda x: functional.mse_loss(x, x + 1),
    "normalize": functional.normalize,
    "nuclear": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "pow": lambda x: torch.pow(x, x),
    "prod": torch.prod,
    "rms_norm": lambda x: functional.rms_norm(x, (8,)),
    "smoothed": lambda x: x.log_softmax(-1).mean(),
    "softmax": lambda x: functional.softmax(x, -1),
    "softplus": functional.softplus,
    "sum over a dimension": lambda x: x.sum(1),
    "vector_norm": torch.linalg.vector_norm,
}
HALF = {
    "linear": lambda x: functional.linear(x, ONES),
    "matmul": lambda x: x @ x.T,
    "add": lambda x: x + x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "mean of rows": lambda x: x.mean(1),
    "sigmoid": torch.sigmoid,
    "sum that names its dtype": lambda x: x.sum(dtype=torch.bfloat16),
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros(4, 8, dtype=torch.long), x),
    "dot": lambda x: torch.dot(x[0], x[1]),
    "softmax that names its dtype": lambda x: x.softmax(-1, torch.bfloat16),
}


class Calls(torch.nn.Module):
    """A root module that passes a half-precision tensor to a function and records the dtypes on
    both sides.
    """

    def __init__(self, function):
        super().__init__()
        self.layer, self.function, self.seen = torch.nn.Linear(8, 8), function, []

    def forward(self, x):
        half = self.layer(x).sigmoid() * 0.8 + 0.1
        found = self.function(half)
        self.seen.append((half.dtype, found.dtype))
        return found


def live(program, module, *after):
    """``module`` as the only root of a training context, under autocast and the levers ``after`` it."""
    made, ledger = program(epochs=0, model=module), Ledger()
    made.context._roots[id(module)] = lambda: module
    made.context._remove_global_hooks()  # as after the second step
    for lever, value in ((LEVER, "bfloat16"), *after):
        lever.apply(made.context, value, ledger)
    return ledger


def seen(program, function, calls=1):
    """The dtypes on both sides of a function inside a module under the lever."""
    module = Calls(function)
    ledger = live(program, module)
    for _ in range(calls):
        module(torch.randn(4, 8))
    ledger.restore()
    return module.seen


@pytest.mark.parametrize("name", KEPT)
def test_operators_that_autocast_of_cuda_keeps_in_float32(program, name):
    module = Calls(KEPT[name])
    ledger = live(program, module)
    output = module(torch.randn(4, 8))
    assert module.seen == [(torch.bfloat16, torch.float32)]
    if output.requires_grad:
        output.sum().backward()
        assert torch.isfinite(module.layer.weight.grad).all()
    ledger.restore()


@pytest.mark.parametrize("name", HALF)
def test_the_rest_stays_in_half_precision(program, name):
    assert seen(program, HALF[name]) == [(torch.bfloat16, torch.bfloat16)]


def test_the_lists_are_those_of_this_torch():
    """torch ships the header that it was built from."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("not run: this torch came without its headers")
    text = header.read_text(encoding="utf-8")

    def listed(macro):
        body = re.search(rf"#define {macro}\(_\)(.*?[^\\])\n", text, re.S).group(1)
        names = {".".join(filter(None, found)) for found in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)}
        return {f"aten::{name}" for name in names | set(re.findall(r'"([\w.]+)"', body))}

    assert listed("AT_FORALL_PROMOTE") <= {f"aten::{name}" for name in PROMOTED}
    in_float32 = listed("AT_FORALL_FP32") | listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    in_float32 |= listed("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE") - {"aten::norm"}
    assert len(in_float32) > 60
    assert not in_float32 & HALF_PRECISION
    ledger = Ledger()
    keep_float32(torch, "cpu", ledger)
    assert in_float32 <= registered()
    ledger.restore()


def registered():
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))


def dtype_of_softmax():
    with torch.autocast("cpu", torch.bfloat16):
        return ONES.bfloat16().softmax(-1).dtype


def test_undone_it_leaves_no_kernel_behind():
    """Two at a time share the kernels; the last one removes them."""
    before, tag, one, other = registered(), torch.compiler.config.cache_key_tag, Ledger(), Ledger()
    assert dtype_of_softmax() is torch.bfloat16
    for _ in range(2):
        keep_float32(torch, "cpu", one)
        assert {"aten::softmax.int", "aten::mean", "aten::dot"} <= registered() - before
        keep_float32(torch, "cpu", other)
        one.restore()
        assert dtype_of_softmax() is torch.float32
        other.restore()
        assert (registered(), torch.compiler.config.cache_key_tag) == (before, tag)
        assert dtype_of_softmax() is torch.bfloat16


@given(
    st.lists(st.sampled_from(sorted(KEPT)), min_size=1, max_size=4, unique=True),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_where_autocast_is_off_nothing_changes(names, dtype, around):
    """The bits and dtypes are the same with and without the kernels, also in a part of the model that
    switches autocast off.
    """

    def outputs(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=around), torch.autocast("cpu", enabled=False):
            return [_result(function, x) for function in functions]

    functions, x, ledger = (
        [KEPT[name] for name in names],
        torch.linspace(0.1, 0.9, 32).view(4, 8).to(getattr(torch, dtype)),
        Ledger(),
    )
    plain = outputs(x)
    keep_float32(torch, "cpu", ledger)
    try:
        assert outputs(x) == plain
    finally:
        ledger.restore()


def _result(function, x):
    """Dtype and numbers, or the error: some operators do not support bfloat16."""
    try:
        found = function(x)
    except RuntimeError as error:
        return type(error), str(error)
    return found.dtype, str(found.tolist())


class Task(torch.nn.Module):
    """Returns its own loss: a hand-written cross entropy with smoothed labels."""

    def __init__(self, loss="smoothed"):
        super().__init__()
        self.body, self.head = (
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU()),
            torch.nn.Linear(16, 5),
        )
        self.loss, self.logits, self.kept = getattr(self, loss), None, False

    def smoothed(self, logits, y):
        chances = logits.log_softmax(-1)
        self.kept = chances.dtype is torch.float32
        return -(0.9 * chances.gather(1, y[:, None])[:, 0] + 0.1 * chances.mean(1)).mean()

    def absolute(self, logits, y):
        return (logits[:, 1:] - logits[:, :-1]).abs().mean()

    def forward(self, x, y):
        logits = self.head(self.body(x))
        self.logits = logits.detach()
        return self.loss(logits, y)


@pytest.mark.parametrize("loss", ["smoothed", "absolute"])
def test_a_loss_that_the_model_computes_by_hand_has_all_bits_of_float32(program, loss):
    """The loss comes from the logits that the model computed in half precision.

    In bfloat16 it would be off by up to a relative 4e-3.
    """
    torch.manual_seed(0)
    module, step_of_bfloat16 = Task(loss), 2.0**-8
    ledger = live(program, module)
    off = []
    for _ in range(8):
        y = torch.randint(5, (16,))
        found = module(torch.randn(16, 8), y)
        assert (found.dtype, module.logits.dtype) == (torch.float32, torch.bfloat16)
        rounded = module.logits[:, 1:] - module.logits[:, :-1] if loss == "absolute" else None
        exact = module.loss(module.logits.double(), y) if rounded is None else rounded.double().abs().mean()
        off.append(abs(found.item() / exact.item() - 1))
    assert max(off) < 1e-6 < step_of_bfloat16
    ledger.restore()


def test_float32_may_be_mixed_with_half_precision(program):
    """Operators that expect one dtype then compute in float32, as on CUDA."""
    index, at = torch.zeros(4, 8, dtype=torch.long), torch.arange(4)
    for function in (
        lambda x: x.scatter_add(0, index, x.softmax(-1)),
        lambda x: x.index_put((at,), x.exp()),
        lambda x: torch.dot(x[0], x.exp()[0]),
        lambda x: torch.cross(x[:, :3], x.exp()[:, :3], dim=1),
        lambda x: torch.tensordot(x, x.exp(), 2),
        lambda x: functional.bilinear(x, x.exp(), torch.ones(1, 8, 8)),
        lambda x: torch.addcmul(x, x, x.exp()),
    ):
        assert seen(program, function) == [(torch.bfloat16, torch.float32)]


class Halves(torch.utils.data.Dataset):
    """Samples that a loader worker makes in half precision."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return str((ONES.bfloat16() + index).softmax(-1).dtype)


@pytest.mark.processes
def test_loader_workers_are_left_alone(program):
    ledger = live(program, Task())
    assert (
        list(torch.utils.data.DataLoader(Halves(), num_workers=1, batch_size=None)) == ["torch.bfloat16"] * 2
    )
    ledger.restore()


def test_on_cuda_only_the_mean_is_added():
    """Fake tensors of a GPU pass the same dispatch keys as real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def dtypes():
        with FakeTensorMode():
            half = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
            torch.set_autocast_enabled("cuda", True)
            try:
                return [half.softmax(-1).dtype, half.mean().dtype, half.mean(1).dtype, torch.relu(half).dtype]
            finally:
                torch.set_autocast_enabled("cuda", False)

    plain, ledger = dtypes(), Ledger()
    keep_float32(torch, "cuda", ledger)
    with_mean = dtypes()
    ledger.restore()
    assert plain == dtypes() == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    assert with_mean == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.processes
@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_with_the_compiler(program):
    torch.manual_seed(0)
    module, x, y = Task(), torch.randn(16, 8), torch.randint(5, (16,))
    ledger, before = live(program, module, (COMPILE, "default")), torch._dynamo.utils.counters["frames"]["ok"]
    try:
        loss = module(x, y)
        loss.backward()
        assert torch._dynamo.utils.counters["frames"]["ok"] > before
        assert module.kept
        assert loss.item() == pytest.approx(module.loss(module.logits.double(), y).item(), rel=1e-3)
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())
    finally:
        ledger.restore()
        torch._dynamo.reset()
