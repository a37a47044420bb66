"""Division by a number, on a device that multiplies by its reciprocal instead, as CUDA does
(BinaryDivTrueKernel.cu of torch 2.14).
"""

import pytest

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402

from flatout.data.color import PillowColorArithmetic, TensorColorArithmetic, rotate_hue  # noqa: E402
from flatout.data.operations import ScaleBytes  # noqa: E402

BYTES = torch.arange(256, dtype=torch.uint8)
NUMBERS = (torch.Tensor.div, torch.Tensor.div_, torch.Tensor.__truediv__, torch.Tensor.true_divide, torch.div)


class OfCuda(TorchFunctionMode):
    """A division by a host number is a multiplication; one by a tensor is a division."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in NUMBERS and not isinstance(args[1], torch.Tensor):
            inverse = torch.tensor(
                1.0 / args[1], dtype=args[0].dtype if args[0].is_floating_point() else torch.float32
            )
            found = args[0].mul(inverse)
            return args[0].copy_(found) if func is torch.Tensor.div_ else found
        return func(*args, **(kwargs or {}))


def test_the_emulated_device_rounds_differently():
    with OfCuda():
        other = BYTES.float() / 255
    assert int((other != BYTES.float() / 255).sum()) == 126


OPERATIONS = {
    "scale": lambda images: ScaleBytes(torch.float32)(images, ()),
    "scale of version 2": lambda images: ScaleBytes(torch.float32, divide=False)(images, ()),
    "hue of bytes": lambda images: TensorColorArithmetic(is_bytes=True, v2=False).hue(
        images.float(), torch.linspace(-0.3, 0.4, len(images))
    ),
    "hue of floats": lambda images: rotate_hue(
        images.float().mul(1 / 255), torch.linspace(-0.3, 0.4, len(images)), False
    ),
    "contrast of Pillow": lambda images: PillowColorArithmetic().contrast(
        images.float(), torch.linspace(0.5, 1.5, len(images))
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_same_bits_on_such_a_device(name):
    images = torch.randint(256, (24, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given = images.clone()
    expected = OPERATIONS[name](images)
    with OfCuda():
        assert OPERATIONS[name](images).equal(expected)
    assert images.equal(given)
