"""RandomRotation and RandomAffine compared with torchvision, image by image."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchvision")

from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from flatout.data.affine import READERS
from flatout.data.operation import ImageForm, NotBatchable

FAMILIES = pytest.mark.parametrize("family", [v1, v2])
NAMES = ["pil-rgb", "pil-l", "bytes", "tv-bytes", "bytes-1", "floats"]
MODES = pytest.mark.parametrize("mode", [Mode.NEAREST, Mode.BILINEAR])
TURNS = [
    {"degrees": 15},
    {"degrees": 180, "center": (3, 9.5)},
    {"degrees": (30, 400), "fill": 7},
    {"degrees": (0, 0), "center": (0, 0)},
]
MAPS = [
    {"degrees": 15},
    {"degrees": 0, "translate": (0.2, 0.3)},
    {"degrees": 0, "scale": (0.5, 1.9)},
    {"degrees": 0, "shear": 20},
    {"degrees": 30, "translate": (0.1, 0.9), "scale": (0.8, 1.2), "shear": (-10, 10, 5, 25), "fill": 9},
    {
        "degrees": (20, 200),
        "translate": (0.5, 0.0),
        "scale": (0.3, 3.0),
        "shear": (3, 8),
        "center": (4, 5.25),
    },
]


@pytest.mark.sampled(24)
@FAMILIES
@MODES
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", TURNS, ids=str)
def test_random_rotation(same, family, mode, name, arguments):
    same(family.RandomRotation(interpolation=mode, **arguments), name, (17, 23), count=6)


@pytest.mark.sampled(24)
@FAMILIES
@MODES
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
@pytest.mark.parametrize("size", [(8, 8), (7, 5)], ids=str)
@pytest.mark.parametrize("angle", [0, 90, 180, 270, 360, -90, 45])
def test_quarters_of_a_turn(same, family, mode, name, size, angle):
    same(family.RandomRotation((angle, angle), interpolation=mode), name, size, count=3)


@pytest.mark.sampled(24)
@FAMILIES
@MODES
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", MAPS, ids=str)
def test_random_affine(same, family, mode, name, arguments):
    same(family.RandomAffine(interpolation=mode, **arguments), name, (17, 23), count=6)


@pytest.mark.sampled(24)
@FAMILIES
@pytest.mark.parametrize("name", ["pil-rgb", "bytes", "floats"])
@pytest.mark.parametrize("size", [(7, 5), (32, 32), (1, 1), (1, 9)], ids=str)
@pytest.mark.parametrize("count", [1, 20])
def test_sizes(same, family, name, size, count):
    same(family.RandomAffine(40, (0.3, 0.3), (0.5, 1.5), 10), name, size, count)


@FAMILIES
@pytest.mark.parametrize("name", ["pil-rgb", "bytes", "floats"])
def test_a_fill_for_each_channel(same, family, name):
    fill = (0.1, 0.5, 0.9) if name == "floats" else (10, 200.9, 30)
    same(family.RandomRotation(60, fill=fill), name)
    same(family.RandomRotation(60, interpolation=Mode.BILINEAR, fill=fill), name)


def test_no_fill(same):
    same(v2.RandomRotation(60, interpolation=Mode.BILINEAR, fill=None), "bytes")


@FAMILIES
@MODES
@pytest.mark.parametrize("scale", [(1e-4, 2e-4), (1e3, 1e4)])
@pytest.mark.parametrize("degrees", [0, 50])
def test_far_beyond_fixed_point(same, family, mode, scale, degrees):
    same(
        family.RandomAffine(degrees, (0.5, 0.5), scale, interpolation=mode, fill=3),
        "pil-rgb",
        (30, 41),
        count=12,
    )


def hundredths(least: float, most: float):
    return st.integers(round(100 * least), round(100 * most)).map(lambda count: count / 100)


@given(
    hundredths(-360, 360),
    hundredths(0.2, 3),
    hundredths(-60, 60),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 2**32),
)
@settings(max_examples=20)
@MODES
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
def test_any_map(same, mode, name, angle, scale, shear, height, width, seed):
    transform = v2.RandomAffine(
        (angle, angle + 1), (0.4, 0.4), (scale, scale + 0.5), (shear, shear + 5), interpolation=mode
    )
    same(transform, name, (height, width), count=4, seeds=(seed,))


@pytest.mark.parametrize(
    ("transform", "form", "words"),
    [
        (v1.RandomRotation(9, Mode.BICUBIC), ImageForm("pil", mode="RGB"), "with the bicubic filter"),
        (v1.RandomRotation(9, expand=True), ImageForm("tensor"), "expand"),
        (v1.RandomRotation(9), ImageForm("pil", mode="RGBA"), "RGBA"),
        (v1.RandomAffine(9), ImageForm("tensor", torch.float64), "float64"),
        (v1.RandomAffine(9, fill=300), ImageForm("pil", mode="RGB"), "not a byte"),
        (v2.RandomAffine(9, fill={"others": 3}), ImageForm("tensor"), "neither a number"),
        (v1.RandomAffine(9, fill=(1, 2)), ImageForm("pil", mode="RGB"), "neither a number"),
    ],
)
def test_unsupported_cases_are_left_alone(transform, form, words):
    family = "v2" if ".v2." in type(transform).__module__ else "v1"
    with pytest.raises(NotBatchable, match=words):
        READERS[f"{family}.{type(transform).__name__}"](transform, form)
