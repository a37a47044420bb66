"""RandomApply, RandomChoice and RandomOrder compared with torchvision, image by image."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from flatout.data import choose, color, tone
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable


def read(transform: Any, form: ImageForm) -> BatchOperation:
    family = "v2" if ".v2." in type(transform).__module__ else "v1"
    return {**color.READERS, **tone.READERS, **choose.readers(read)}[f"{family}.{type(transform).__name__}"](
        transform, form
    )


def jitter(to):
    return to.ColorJitter(0.4, 0.4, 0.4, 0.1)


APPLIED = {
    "settled": lambda to: to.RandomApply([to.Grayscale(3)], p=0.5),
    "drawing": lambda to: to.RandomApply([jitter(to)], p=0.8),
    "several": lambda to: to.RandomApply([jitter(to), to.RandomGrayscale(0.4), to.RandomInvert(0.3)], p=0.6),
    "inside one another": lambda to: to.RandomApply(
        [to.RandomApply([jitter(to)], p=0.5), to.RandomSolarize(128, 0.5)], p=0.7
    ),
    "never": lambda to: to.RandomApply([jitter(to)], p=0.0),
    "always": lambda to: to.RandomApply([jitter(to)], p=1.0),
}
CHOSEN = {
    "one": v2.RandomChoice([jitter(v2)]),
    "of three": v2.RandomChoice([jitter(v2), v2.RandomGrayscale(0.5), v2.RandomPosterize(2, 0.9)]),
    "weighed": v2.RandomChoice([v2.ColorJitter(0.9), v2.RandomInvert(1.0)], p=[0.1, 0.9]),
    "one in order": v2.RandomOrder([jitter(v2)]),
    "in order": v2.RandomOrder(
        [jitter(v2), v2.RandomGrayscale(0.5), v2.RandomPosterize(2, 0.9), v2.RandomInvert(0.5)]
    ),
    "together": v2.RandomApply(
        [v2.RandomOrder([v2.RandomChoice([jitter(v2), v2.RandomInvert()]), v2.RandomSolarize(99)])], p=0.7
    ),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("family", [v1, v2])
@pytest.mark.parametrize("name", ["pil-rgb", "bytes"])
@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("made", APPLIED)
def test_random_apply(same, family, name, count, made):
    same(APPLIED[made](family), name, (7, 5), count, seeds=(3, 4, 5))


@pytest.mark.parametrize("name", ["pil-rgb", "tv-bytes"])
@pytest.mark.parametrize("made", CHOSEN)
def test_random_choice_and_order(same, name, made):
    same(CHOSEN[made], name, (7, 5), 30, seeds=(3, 4))


@pytest.mark.parametrize(("family", "taken"), [(v1, True), (v2, False)])
def test_at_exactly_the_probability_version_1_applies_and_version_2_does_not(family, taken):
    operation = read(family.RandomApply([family.Grayscale(3)], p=0.25), ImageForm("tensor"))
    images = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    assert torch.equal(operation(images, [torch.tensor([0.25])]), images) is not taken


@pytest.mark.parametrize("transform", [v1.RandomChoice([v1.Grayscale(3)]), v1.RandomOrder([v1.Grayscale(3)])])
def test_use_of_pythons_random_is_left_alone(transform):
    with pytest.raises(NotBatchable, match="Python's random"):
        read(transform, ImageForm("tensor"))


def test_branches_that_differ_are_rejected():
    with pytest.raises(NotBatchable, match="some images would become"):
        read(v2.RandomApply([v2.Grayscale(1)]), ImageForm("pil", mode="RGB"))
    with pytest.raises(NotBatchable, match="some images would be"):
        read(v2.RandomApply([v2.Grayscale(1)]), ImageForm("tensor")).shape(ImageShape(3, 8, 8))
