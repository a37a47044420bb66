"""Compares a torchvision transform, image by image, with its recognised form on the whole batch: same seed,
same numbers, same end.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")

from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from flatout.data import color, resample
from flatout.data.draws import BulkNumberSource, draw_columns
from flatout.data.operation import BatchOperation, ImageForm, ImageShape

FORMS = {
    "pil-rgb": ImageForm("pil", torch.uint8, "RGB"),
    "pil-l": ImageForm("pil", torch.uint8, "L"),
    "bytes": ImageForm("tensor", torch.uint8),
    "tv-bytes": ImageForm("tensor", torch.uint8, tv=True),
    "bytes-1": ImageForm("tensor", torch.uint8),
    "floats": ImageForm("tensor", torch.float32),
    "floats-1": ImageForm("tensor", torch.float32),
}
CHANNELS = {"pil-l": 1, "bytes-1": 1, "floats-1": 1}


def read(transform, form):
    family = "v1" if type(transform).__module__ == "torchvision.transforms.transforms" else "v2"
    return READERS[f"{family}.{type(transform).__name__}"](transform, form)


READERS = {**color.READERS, **resample.READERS}


def pil_images(name, height, width, count, seed=0):
    """[B, C, H, W] of the form's dtype: noise, ramps and a flat image; values that round, saturate or have no
    hue.
    """
    make = torch.Generator().manual_seed(seed)
    shape = (count, CHANNELS.get(name, 3), height, width)
    ramps = torch.linspace(0, 255, width).expand(shape) * torch.rand((count, shape[1], 1, 1), generator=make)
    noise = torch.rand(shape, generator=make) * 256
    images = torch.where(torch.rand((count, 1, 1, 1), generator=make) < 0.3, ramps, noise)
    images[::7] = images[::7, :1, :1, :1]
    if FORMS[name].dtype == torch.float32:
        return images / 256
    return images.to(torch.uint8)


def as_items(name, images):
    """As a data set would hold them."""
    if name.startswith("pil"):
        arrays = [np.ascontiguousarray(each.permute(1, 2, 0).numpy()) for each in images]
        return [Image.fromarray(each[:, :, 0] if name == "pil-l" else each) for each in arrays]
    return [tv_tensors.Image(each.clone()) if FORMS[name].tv else each.clone() for each in images]


def plain(transform, items, seed):
    """torchvision's own images, and the generator's state after them."""
    torch.manual_seed(seed)
    done = [transform(each) for each in items]
    state = torch.get_rng_state()
    return torch.stack(
        [each.as_subclass(torch.Tensor) if isinstance(each, Tensor) else pil_to_tensor(each) for each in done]
    ), state


def lowered(operations, images, seed):
    """The same by these operations, applied to the batch."""
    torch.manual_seed(seed)
    shapes = [ImageShape(*images.shape[1:])]
    for operation in operations:
        shapes.append(operation.shape(shapes[-1]))
    kinds = [operation.draws(shape) for operation, shape in zip(operations, shapes, strict=False)]
    numbers: list[Any]
    if any(each is None for each in kinds):
        with BulkNumberSource() as words:
            rows = [
                [operation.draw(shape, words) for operation, shape in zip(operations, shapes, strict=False)]
                for _ in images
            ]
        numbers = [
            operation.to_columns(shapes[at], [row[at] for row in rows])
            for at, operation in enumerate(operations)
        ]
    else:
        left = iter(draw_columns([kind for each in kinds for kind in each], len(images)))
        numbers = [[next(left) for _ in each] for each in kinds]
    before = images.clone()
    done = images
    for operation, shape, given in zip(operations, shapes[1:], numbers, strict=True):
        done = operation(done, given)
        assert tuple(done.shape[1:]) == tuple(shape)
    assert torch.equal(images, before), "the batch was changed in place"
    return done, torch.get_rng_state()


@pytest.fixture
def same():
    """Compares a transform with its operations: values (bit for bit, or within their declared tolerance,
    ``most`` at most) and the final generator state.
    """

    def check(transform, name, size=(33, 47), count=9, seeds=(1, 2), most=0.0):
        found = read(transform, FORMS[name])
        operations = [found] if isinstance(found, BatchOperation) else list(found)
        declared = sum(operation.tolerance for operation in operations)
        assert declared <= most
        for seed in seeds:
            images = pil_images(name, *size, count, seed)
            wanted, wanted_state = plain(transform, as_items(name, images), seed)
            layout = (
                torch.channels_last if seed % 2 else torch.contiguous_format
            )  # in the memory layout of PIL images, and of tensors
            got, state = lowered(operations, images.contiguous(memory_format=layout), seed)
            assert got.dtype == wanted.dtype
            assert got.shape == wanted.shape
            off = (got.double() - wanted.double()).abs().amax().item() / (
                1 if got.is_floating_point() else 255
            )
            assert off <= declared, f"{transform} on {name} {size}, seed {seed}: {off * 255} / 255 apart"
            assert torch.equal(state, wanted_state), f"{transform} leaves the generator in another state"
        return got

    return check
