"""ColorJitter, Grayscale and RandomGrayscale compared with torchvision, image by image."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchvision")

from PIL import Image
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from flatout.data.color import FLOAT_MEAN, READERS, rotate_byte_hue
from flatout.data.operation import ImageForm, ImageShape, NotBatchable

NAMES = ["pil-rgb", "pil-l", "bytes", "tv-bytes", "bytes-1", "floats", "floats-1"]
JITTERS = [
    {"brightness": 0.4},
    {"contrast": 0.7},
    {"saturation": (0.2, 2.5)},
    {"hue": 0.3},
    {"brightness": (1.1, 3.0), "hue": (-0.5, 0.5)},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    {"contrast": (0, 5), "saturation": (0, 0)},
    {},
]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", JITTERS, ids=lambda each: "-".join(each) or "nothing")
def test_color_jitter(same, family, name, arguments):
    same(
        family.ColorJitter(**arguments), name, (17, 23), most=FLOAT_MEAN if name.startswith("floats") else 0.0
    )


@pytest.mark.parametrize("size", [(7, 5), (32, 32), (1, 1), (300, 300)])
@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
def test_sizes_and_batches(same, size, count, name):
    same(v2.ColorJitter(0.4, 0.4, 0.4, 0.1), name, size, count if size[0] < 300 else 1)


@given(
    brightness=st.floats(0.1, 3),
    contrast=st.floats(0.1, 3),
    saturation=st.floats(0.1, 3),
    hue=st.floats(0.1, 0.5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
def test_any_range(same, family, name, brightness, contrast, saturation, hue, seed):
    same(family.ColorJitter(brightness, contrast, saturation, hue), name, (5, 8), 6, seeds=(seed,))


def test_hue_of_every_colour_on_a_grid():
    """Every fourth level of each channel, and the levels next to 0 and 255; here compared with Pillow,
    through torchvision's function.
    """
    levels = torch.tensor(sorted({*range(0, 256, 4), 1, 2, 253, 254, 255}), dtype=torch.uint8)
    colours = torch.cartesian_prod(levels, levels, levels).view(1, -1, len(levels), 3)
    for turn in (0.0, 0.123, -0.5):
        wanted = v1.F.adjust_hue(Image.fromarray(colours[0].numpy()), turn)
        got = rotate_byte_hue(colours.permute(0, 3, 1, 2).float(), torch.tensor([turn]))
        assert torch.equal(got[0].permute(1, 2, 0).to(torch.uint8), torch.from_numpy(np.array(wanted)))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kind", "value"),
    [("Grayscale", 1), ("Grayscale", 3), ("RandomGrayscale", 0.5), ("RandomGrayscale", 1.0)],
)
def test_grey(same, family, name, kind, value):
    same(getattr(family, kind)(value), name)


@pytest.mark.parametrize(
    "form",
    [
        ImageForm("pil", mode="RGBA"),
        ImageForm("tensor", torch.float64),
        ImageForm("tensor", torch.int16),
        ImageForm("numpy"),
    ],
)
def test_other_images_are_left_alone(form):
    for transform in (v2.ColorJitter(0.1), v2.Grayscale(), v2.RandomGrayscale()):
        with pytest.raises(NotBatchable, match="do not run in batches"):
            READERS[f"v2.{type(transform).__name__}"](transform, form)


def test_four_channels_are_rejected():
    with pytest.raises(ValueError, match="1 or 3 channels"):
        READERS["v2.ColorJitter"](v2.ColorJitter(0.1), ImageForm("tensor")).shape(ImageShape(4, 8, 8))
