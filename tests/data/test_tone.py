"""Invert, posterize, solarize, autocontrast, equalize and sharpen compared with torchvision,
image by image.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from flatout.data.operation import BatchOperation, ImageForm, NotBatchable
from flatout.data.tone import READERS

PIL = ["pil-rgb", "pil-l"]
BYTES = [*PIL, "bytes", "tv-bytes", "bytes-1"]
ALL = [*BYTES, "floats", "floats-1"]
MADE = {
    "invert": (lambda to: to.RandomInvert(0.5), ALL),
    "posterize": (lambda to: to.RandomPosterize(3, 0.5), BYTES),
    "posterize-8": (lambda to: to.RandomPosterize(8, 1.0), BYTES),
    "solarize": (lambda to: to.RandomSolarize(128, 0.7), BYTES),
    "solarize-between": (lambda to: to.RandomSolarize(100.5, 0.7), BYTES),
    "solarize-all": (lambda to: to.RandomSolarize(-3, 0.7), BYTES),
    "solarize-none": (lambda to: to.RandomSolarize(400, 0.7), PIL),
    "solarize-floats": (lambda to: to.RandomSolarize(0.4, 0.7), ["floats", "floats-1"]),
    "autocontrast": (lambda to: to.RandomAutocontrast(0.8), ALL),
    "equalize": (lambda to: to.RandomEqualize(0.8), BYTES),
    "sharpen": (lambda to: to.RandomAdjustSharpness(2.3, 0.8), BYTES),
    "blur": (lambda to: to.RandomAdjustSharpness(0.1, 0.8), BYTES),
    "sharpen-0": (lambda to: to.RandomAdjustSharpness(0, 1.0), BYTES),
    "sharpen-1": (lambda to: to.RandomAdjustSharpness(1, 1.0), BYTES),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize(
    ("made", "name"), [(made, name) for made, (_, names) in MADE.items() for name in names]
)
def test_tone(same, family, made, name):
    same(MADE[made][0](family), name, (17, 23))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize("size", [(7, 5), (2, 9), (9, 2), (1, 1), (3, 3), (64, 80)])
@pytest.mark.parametrize("made", ["autocontrast", "equalize", "sharpen"])
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
def test_sizes(same, family, size, made, name):
    same(MADE[made][0](family), name, size, count=1 if size == (1, 1) else 8)


def test_posterize_of_floats_is_version_twos(same):
    same(v2.RandomPosterize(3, 0.5), "floats")
    with pytest.raises(NotBatchable):
        READERS["v1.RandomPosterize"](v1.RandomPosterize(3), ImageForm("tensor", torch.float32))


@pytest.mark.parametrize(
    "transform",
    [
        v1.RandomAdjustSharpness(2),
        v2.RandomAdjustSharpness(2),
        v1.RandomEqualize(),
        v2.RandomEqualize(),
        v1.RandomSolarize(2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_floats_that_would_round_differently_are_left_alone(transform):
    family = "v2" if ".v2." in type(transform).__module__ else "v1"
    with pytest.raises(NotBatchable):
        READERS[f"{family}.{type(transform).__name__}"](transform, ImageForm("tensor", torch.float32))


@pytest.mark.parametrize(("family", "done"), [("v1", True), ("v2", False)])
def test_the_probability_is_compared_as_in_torchvision(family, done):
    """0.7 in single precision is below 0.7.

    Version 1 compares Python's numbers and sees that; version 2 does not.
    """
    transform = {"v1": v1, "v2": v2}[family].RandomInvert(0.7)
    read = READERS[f"{family}.RandomInvert"](transform, ImageForm("tensor"))
    assert isinstance(read, BatchOperation)
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    assert bool(read(images, [torch.tensor([0.7])]).any()) is done
    assert ((torch.tensor([0.7]).item() < 0.7) if family == "v1" else bool(torch.tensor([0.7]) < 0.7)) is done
