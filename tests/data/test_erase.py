"""RandomErasing compared with torchvision, image by image."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from flatout.data.erase import READERS
from flatout.data.operation import ImageForm, ImageShape, NotBatchable

FAMILIES = pytest.mark.parametrize("family", [v1, v2])


@pytest.mark.sampled(24)
@FAMILIES
@pytest.mark.parametrize("name", ["floats", "bytes"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"p": 1.0}, {"p": 0.0}, {"p": 1.0, "scale": (0.9, 1.0)}, {"p": 1.0, "scale": (0.0, 0.001)}],
    ids=str,
)
@pytest.mark.parametrize(("size", "count"), [((33, 47), 20), ((7, 5), 20), ((1, 1), 2), ((9, 4), 1)], ids=str)
def test_random_erasing(same, family, name, arguments, size, count):
    same(family.RandomErasing(**arguments), name, size, count)


@FAMILIES
@pytest.mark.parametrize("value", [0.4, (0.1, 0.2, 0.3), [0.7], "random"], ids=str)
def test_values(same, family, value):
    same(family.RandomErasing(0.8, value=value), "floats", count=20, seeds=(1, 2, 3))
    same(family.RandomErasing(0.8, value=value), "floats", (8, 6), count=20, seeds=(1, 2, 3))


@FAMILIES
def test_values_of_bytes(same, family):
    same(family.RandomErasing(0.8, value=(3, 99.7, 255)), "tv-bytes", count=20)
    same(family.RandomErasing(0.8, value=3), "bytes-1", count=20)


def test_pil_images_are_version_twos(same):
    same(v2.RandomErasing(0.8, value=7), "pil-rgb", count=20)
    with pytest.raises(NotBatchable, match="does not run in batches"):
        READERS["v1.RandomErasing"](v1.RandomErasing(), ImageForm("pil", mode="RGB"))


@pytest.mark.parametrize(
    ("arguments", "form", "words"),
    [
        ({"value": "random"}, ImageForm("tensor"), "outside 0"),
        ({"value": 300}, ImageForm("tensor"), "outside 0"),
        ({"value": -1}, ImageForm("tensor"), "outside 0"),
        ({"inplace": True}, ImageForm("tensor", torch.float32), "in place"),
        ({}, ImageForm("tensor", torch.float64), "does not run in batches"),
    ],
)
def test_unsupported_cases_are_left_alone(arguments, form, words):
    for family in (v1, v2):
        with pytest.raises(NotBatchable, match=words):
            READERS[f"{family.__name__.split('.')[-1].replace('transforms', 'v1')}.RandomErasing"](
                family.RandomErasing(**arguments), form
            )


def test_values_for_other_channels_are_rejected():
    with pytest.raises(ValueError, match="2 values"):
        READERS["v1.RandomErasing"](v1.RandomErasing(value=(1, 2)), ImageForm("tensor")).shape(
            ImageShape(3, 8, 8)
        )
