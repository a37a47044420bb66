"""Which transforms of a pipeline run on batches, which stay with the single image, and why."""

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from feeding import pil_images
from torchvision import transforms as v1
from torchvision.transforms import v2

from flatout.data.lowering import count_deterministic, flatten, lower, name_of, read
from flatout.data.operation import ImageForm, NotBatchable
from flatout.data.operations import Flip

IMAGES = pil_images(3)
FLIP, CROP, TENSOR, NORMAL = (
    v1.RandomHorizontalFlip(),
    v1.RandomCrop(8),
    v1.ToTensor(),
    v1.Normalize([0.5] * 3, [0.5] * 3),
)
OWN = v1.Lambda(lambda image: image)


def draws(image):
    torch.rand(1)
    return image


def runs(transform, images=IMAGES, **options):
    found = lower(transform, images, **options)
    return found.start, found.end


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([CROP, FLIP, TENSOR, NORMAL], (0, 4)),
        ([TENSOR], (0, 1)),
        ([OWN, CROP, FLIP, TENSOR], (1, 4)),
        ([CROP, FLIP, TENSOR, OWN], (0, 3)),
        ([FLIP, OWN, TENSOR, NORMAL], (2, 4)),  # the longest
        ([FLIP, TENSOR, OWN, FLIP, NORMAL], (3, 5)),  # of two equally long, the last
        ([CROP, FLIP, TENSOR, OWN, NORMAL], (0, 3)),
        ([CROP, FLIP, OWN, FLIP, TENSOR], (3, 5)),  # a run that ends in images is useless
        ([v1.Compose([CROP, v1.Compose([FLIP])]), TENSOR], (0, 3)),
        ([torch.nn.Sequential(CROP, FLIP), TENSOR], (0, 3)),
    ],
    ids=str,
)
def test_the_run_that_is_chosen(steps, wanted):
    transform = v1.Compose(steps)
    found = lower(transform, IMAGES)
    assert (found.start, found.end) == wanted
    every = flatten(transform)
    assert [*every[: wanted[1]], *found.tail] == every == list(found.steps)


@pytest.mark.parametrize(
    ("transform", "images", "says"),
    [
        (v1.Compose([CROP, FLIP]), IMAGES, "none of its transforms makes a tensor"),
        (OWN, IMAGES, "Lambda is not a transform that can run on batches"),
        (v1.Compose([OWN, OWN]), IMAGES, "Lambda is not a transform"),
        (v1.Compose([FLIP, TENSOR, draws]), IMAGES, "function draws random numbers after the transforms"),
        (v1.Compose([TENSOR]), [image.convert("P") for image in IMAGES], "differ in size or kind"),
        (v1.Compose([TENSOR]), [IMAGES[0], IMAGES[1].resize((5, 5)), IMAGES[2]], "differ in size or kind"),
        (v1.Compose([TENSOR]), [IMAGES[0], IMAGES[1].convert("L"), IMAGES[2]], "differ in size or kind"),
        (
            NORMAL,
            [torch.zeros(3, 4, 4, dtype=torch.float64, requires_grad=True)] * 2,
            "differ in size or kind",
        ),
        (v1.Normalize([0.5], [0.5], inplace=True), [torch.zeros(3, 4, 4)] * 2, "in place"),
    ],
)
def test_why_not(transform, images, says):
    with pytest.raises(NotBatchable, match=says) as caught:
        lower(transform, images)
    assert len(str(caught.value).split()) >= 4
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), lambda: np.random.rand(), lambda: __import__("random").random()],
    ids=["torch", "numpy", "random"],
)
def test_no_random_step_follows_the_batch(draw):
    def noisy(image):
        draw()
        return image

    assert runs(v1.Compose([noisy, FLIP, TENSOR])) == (1, 3)
    with pytest.raises(NotBatchable, match="draws random numbers"):
        lower(v1.Compose([FLIP, TENSOR, noisy]), IMAGES)


def test_hooks_children_and_hidden_classes_are_not_recognised():
    class RandomHorizontalFlip(v1.RandomHorizontalFlip):
        pass

    hooked = v1.RandomHorizontalFlip()
    hooked.register_forward_hook(lambda *_: None)
    for transform in (RandomHorizontalFlip(), hooked):
        with pytest.raises(NotBatchable):
            read(transform, ImageForm("pil", mode="RGB"))
    assert name_of(RandomHorizontalFlip()) == ""
    assert name_of(v2.RandomCrop(3)) == "v2.RandomCrop"
    assert name_of(v1.RandomCrop(3)) == "v1.RandomCrop"
    assert name_of(torch.nn.ReLU()) == ""


def test_attributes_of_another_torchvision():
    strange = v1.RandomHorizontalFlip()
    del strange.p
    with pytest.raises(NotBatchable, match="could not be read"):
        read(strange, ImageForm("pil", mode="RGB"))
    assert read(FLIP, ImageForm("pil", mode="RGB")) == [Flip(-1, 0.5)]


def test_heavy_transforms_stay_with_the_single_image_on_request():
    pipeline = v1.Compose([v1.Resize(9), v1.ColorJitter(0.2), CROP, TENSOR, NORMAL])
    assert runs(pipeline) == (0, 5)
    light = lower(pipeline, IMAGES, light=True)
    assert (light.start, light.end) == (2, 5)
    assert any("runs on single images" in reason for reason in light.reasons)


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([v1.Resize(9), v1.CenterCrop(8), TENSOR, NORMAL], 4),
        ([v1.Resize(9), FLIP, TENSOR], 1),
        ([OWN, TENSOR], 0),
        ([CROP], 0),
        ([v1.Pad(2), v1.ColorJitter(0.2)], 1),
        ([], 0),
    ],
    ids=str,
)
def test_the_number_of_steps_without_random_numbers(steps, count):
    assert count_deterministic(steps, IMAGES) == count
