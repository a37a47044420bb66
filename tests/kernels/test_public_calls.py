"""The public calls of a program on a CPU: gradients against float64, memory, errors."""

import os
import subprocess
import sys

import pytest
from limits import hang_s

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from flatout.kernels import chunked_loss  # noqa: E402
from flatout.kernels.chunked_loss import chunk_rows, linear_cross_entropy  # noqa: E402
from flatout.kernels.layer_norm.op import layer_norm  # noqa: E402

PEAK = """
import torch
from torch.nn import functional as F
from flatout.kernels.chunked_loss import linear_cross_entropy as ours
def plain(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)
x, w, t = torch.randn(384, 32, requires_grad=True), torch.randn(50_000, 32, requires_grad=True), torch.randint(50_000, (384,))
def peak():  # of this program alone; what getrusage says is handed down from the process that started it
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
for call in (plain, ours):
    call(x[:2], w[:9], t[:2] % 9).backward()
for call in (ours, plain):  # the peak only grows, so the smaller goes first
    before = peak()
    call(x, w, t).backward()
    print(peak() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the peak of a process is read from Linux's /proc"
)
def test_the_loss_takes_a_quarter_of_the_memory_at_most():
    """The process's own peak, at a vocabulary of 50,000."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=hang_s(120), env=environment
    )
    ours, plain = map(int, done.stdout.split())
    logits = 384 * 50_000 * 4
    assert plain > 1.9 * logits
    assert 4 * ours < plain, (ours, plain)


@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 1), (768, 50_000), (8192, 128_256), (12, 65), (0, 9), (3, 10**8), (10**6, 100)]
)
def test_chunks_hold_little_and_cover_all(rows, classes):
    step = chunk_rows(rows, classes, "cpu")
    assert step >= 1
    if rows > 16 and 4 * rows * classes > 1 << 20:
        assert step <= max(-(-rows // 16), 16)


# rows, width, classes, bias, share of ignored targets, reduction, label smoothing, scale of x
LOSSES = [
    (5, 4, 7, True, 0.0, "mean", 0.0, 1.0),
    (6, 8, 33, False, 0.5, "mean", 0.1, 1.0),
    (3, 2, 1, True, 0.0, "sum", 0.0, 1.0),
    (9, 6, 1000, False, 0.2, "sum", 0.2, 1.0),
    (0, 4, 8, True, 0.0, "sum", 0.0, 1.0),
    (4, 4, 9, True, 1.0, "sum", 0.0, 1.0),
    (4, 4, 9, True, 1.0, "mean", 0.0, 1.0),  # no target counts: the loss is NaN, the gradients are zero
    (4, 4, 12, True, 0.0, "mean", 0.0, 60.0),
    (20, 3, 14_000, True, 0.1, "mean", 0.0, 1.0),  # two chunks
]


@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_as_near_to_float64_as_the_plain_ones(dtype, extra, monkeypatch):
    """``extra`` rows of zeros at the end of the weight, as for Tensor Cores, change nothing."""
    monkeypatch.setattr(chunked_loss, "_extra_rows", lambda *_: extra)

    def plain(x, weight, target, bias=None, **more):
        logits = F.linear(x, weight, bias)
        return F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), target, **more)

    for rows, width, classes, bias, ignored, reduction, smoothing, scale in LOSSES:
        draw = torch.Generator().manual_seed(rows)
        target = torch.randint(classes, (rows,), generator=draw)
        target[torch.rand(rows, generator=draw) < ignored] = -100
        leaves = [
            scale * torch.randn(rows, width, generator=draw),
            torch.randn(classes, width, generator=draw),
        ]
        leaves += [torch.randn(classes, generator=draw)] if bias else []
        leaves = [leaf.to(dtype) for leaf in leaves]

        def of(call, kind, leaves=leaves, target=target, reduction=reduction, smoothing=smoothing):
            x, weight, *b = held = [leaf.to(kind).requires_grad_() for leaf in leaves]
            loss = call(x, weight, target, *b, reduction=reduction, label_smoothing=smoothing)
            found = [loss.detach(), *torch.autograd.grad(3 * loss, held)]
            assert [tensor.dtype for tensor in found[1:]] == [kind] * len(held)
            return [tensor.double() for tensor in found]

        right, ours, theirs = of(plain, torch.float64), of(linear_cross_entropy, dtype), of(plain, dtype)
        for exact, of_ours, of_theirs in zip(right, ours, theirs, strict=True):
            # Sums of 1,000 products in float32 round by up to 16 units, depending on the processor
            units = 32 if dtype is torch.float32 else 8
            allowed = 3 * (of_theirs - exact).abs() + units * torch.finfo(dtype).eps * exact.abs()
            allowed = allowed.max() if exact.numel() else 0.0
            torch.testing.assert_close(
                of_ours, exact, rtol=0.0, atol=0.0 if exact.isnan().any() else float(allowed), equal_nan=True
            )


def test_wrong_uses_of_the_loss_are_errors():
    x, w, t = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3), torch.tensor([0, 1, 2, 3])
    loss = linear_cross_entropy(x, w, t)
    with pytest.raises(RuntimeError, match="is differentiable only once"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad(2 * loss, x)[0].shape == (4, 3)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, w, t + 7)


def test_layer_norm_of_other_types_and_shapes_is_an_error():
    for weight in (torch.ones(5), torch.ones(3).double()):
        with pytest.raises(ValueError, match="must have the type and device of x"):
            layer_norm(torch.randn(4, 3), weight)


def test_layer_norm_of_nothing_of_nan_and_of_what_is_not_contiguous():
    weight = torch.ones(6)
    assert layer_norm(torch.empty(0, 6), weight).shape == (0, 6)
    assert layer_norm(torch.tensor([[1.0, float("nan")]]), None).isnan().all()
    x = torch.randn(6, 4, requires_grad=True)
    got = layer_norm(x.t(), weight)
    got.sum().backward()
    assert got.shape == (4, 6)
    assert x.grad.shape == (6, 4)


def test_a_compiled_program_keeps_the_operator_whole():
    """fullgraph: torch.compile knows the operator and its gradient; the backend that compiles nothing is
    enough to show it.
    """
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def program(x, w):
        return layer_norm(x, w).square().sum()

    plain = torch.autograd.grad(program(x, w), (x, w))
    whole = torch.autograd.grad(torch.compile(program, backend="aot_eager", fullgraph=True)(x, w), (x, w))
    for a, b in zip(plain, whole, strict=True):
        torch.testing.assert_close(a, b)
