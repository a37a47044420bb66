"""The public calls of a program on a CPU: memory, errors, torchvision's bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from limits import hang_s

torch = pytest.importorskip("torch")

from flatout.kernels.augment.op import augment  # noqa: E402
from flatout.kernels.layer_norm.op import layer_norm, rms_norm  # noqa: E402
from flatout.kernels.linear_cross_entropy.op import chunk_rows, linear_cross_entropy  # noqa: E402

PEAK = """
import torch
from flatout.kernels.linear_cross_entropy.op import linear_cross_entropy as ours
from flatout.kernels.linear_cross_entropy.reference import linear_cross_entropy as plain
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
    """The process's own peak, at a vocabulary of 50,000: the goal of the kernel."""
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


def test_the_loss_differentiates_once():
    x = torch.randn(4, 3, requires_grad=True)
    loss = linear_cross_entropy(x, torch.randn(5, 3), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(RuntimeError, match="is differentiable only once"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad(2 * loss, x)[0].shape == (4, 3)


def test_mismatched_arguments_are_explained():
    x, w, t = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64)
    for arguments, says in (
        ((x[0], w, t), "are not"),
        ((x, w[:, :2], t), "are not"),
        ((x, w, t[:2]), "are not"),
    ):
        with pytest.raises(ValueError, match=says):
            linear_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="reduction 'none' is not one of mean, sum"):
        linear_cross_entropy(x, w, t, reduction="none")
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, w, t + 7)
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    where, flip, mean = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), torch.zeros(3)
    with pytest.raises(ValueError, match=r"images are torch\.float32"):
        augment(images.float(), where, where, flip, [8, 8], mean, mean + 1)
    with pytest.raises(ValueError, match="2 images have 1"):
        augment(images, where[:1], where, flip, [8, 8], mean, mean + 1)
    with pytest.raises(ValueError, match="3 channels, 2 means"):
        augment(images, where, where, flip, [8, 8], mean[:2], mean + 1)
    for call in (layer_norm, rms_norm):
        for weight in (torch.ones(5), torch.ones(3).double()):
            with pytest.raises(ValueError, match="must have the type and device of x"):
                call(x, weight)
    with pytest.raises(ValueError, match=r"target is torch\.int32"):
        linear_cross_entropy(x, w, t.int())
    with pytest.raises(ValueError, match="mean and std must be float32"):
        augment(images, where, where, flip, [8, 8], mean.double(), mean.double())


@pytest.mark.parametrize("channels_last", [False, True])
def test_torchvisions_bits(channels_last):
    """RandomCrop, RandomHorizontalFlip, ToTensor and Normalize, image by image, with the same
    random numbers.
    """
    transforms = pytest.importorskip("torchvision.transforms")
    functional = transforms.functional
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 32, 32, 3), generator=draw, dtype=torch.uint8)
    top, left = (torch.randint(9, (6,), generator=draw) for _ in range(2))
    flip = torch.rand(6, generator=draw) < 0.5
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = []
    for at, image in enumerate(images):
        pil = functional.crop(
            functional.pad(functional.to_pil_image(image.numpy()), 4), int(top[at]), int(left[at]), 32, 32
        )
        expected.append(
            functional.normalize(functional.to_tensor(functional.hflip(pil) if flip[at] else pil), mean, std)
        )
    got = augment(
        images,
        top,
        left,
        flip,
        [32, 32],
        torch.tensor(mean),
        torch.tensor(std),
        padding=4,
        layout="hwc",
        channels_last=channels_last,
    )
    assert torch.equal(got, torch.stack(expected))
    assert got.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_crops_far_outside_are_fill():
    images = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    got = augment(
        images,
        torch.tensor([-50, 50]),
        torch.tensor([0, 0]),
        torch.tensor([False, True]),
        [4, 4],
        torch.zeros(1),
        torch.ones(1),
        fill=51,
    )
    assert torch.equal(got, torch.full((2, 1, 4, 4), 0.2))


@pytest.mark.parametrize("call", [layer_norm, rms_norm])
def test_norms_of_nothing_of_nan_and_of_what_is_not_contiguous(call):
    weight = torch.ones(6)
    assert call(torch.empty(0, 6), weight).shape == (0, 6)
    assert call(torch.tensor([[1.0, float("nan")]]), None).isnan().all()
    x = torch.randn(6, 4, requires_grad=True)
    got = call(x.t(), weight)
    got.sum().backward()
    assert got.shape == (4, 6)
    assert x.grad.shape == (6, 4)


def test_a_compiled_program_keeps_them_whole():
    """fullgraph: torch.compile knows the operators and their gradients; the backend that compiles nothing is
    enough to show it.
    """
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    t = torch.tensor([0, 3, 8, 1])

    def program(x, w):
        return linear_cross_entropy(layer_norm(x, torch.ones(8)), w, t)

    plain = torch.autograd.grad(program(x, w), (x, w))
    whole = torch.autograd.grad(torch.compile(program, backend="aot_eager", fullgraph=True)(x, w), (x, w))
    for a, b in zip(plain, whole, strict=True):
        torch.testing.assert_close(a, b)
