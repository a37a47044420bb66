"""Random pipelines of known and unknown transforms of both families, compared with the plain loader."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchvision")

from feeding import AT_ONCE, BATCHED, LAZILY, Images, difference, run
from PIL import Image
from shapes import Loop, Views
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import v2

from flatout.data.lowering import lower

PIPELINES = 130
taken = []  # whether each pipeline ran on batches


class Mine:
    """The script's own callable, which uses random numbers."""

    def __call__(self, image):
        return (
            image
            if torch.rand(1) < 0.5
            else image.transpose(Image.Transpose.ROTATE_180)
            if hasattr(image, "getbands")
            else image.flip(-1)
        )


class Numpys:
    def __call__(self, image):
        return (
            image
            if np.random.rand() < 0.5
            else (image.rotate(90) if hasattr(image, "getbands") else image.clone())
        )


p = st.sampled_from([0.0, 0.3, 0.5, 1.0])
fills = st.sampled_from([0, 7, (1, 2, 3)])
modes = st.sampled_from(["constant", "edge", "reflect", "symmetric"])
kinds = st.sampled_from([Mode.NEAREST, Mode.BILINEAR, Mode.BICUBIC])
some = st.floats(0.0, 0.6)


@st.composite
def known(draw, family):
    """A transform that flatout recognises, with parameters of any kind."""
    t = family
    return draw(
        st.sampled_from(
            [
                lambda: t.RandomHorizontalFlip(draw(p)),
                lambda: t.RandomVerticalFlip(draw(p)),
                lambda: t.Pad(
                    draw(st.sampled_from([1, (1, 2), (0, 1, 2, 3)])),
                    fill=draw(fills),
                    padding_mode=draw(modes),
                ),
                lambda: t.RandomCrop(
                    draw(st.integers(4, 12)),
                    padding=draw(st.sampled_from([None, 2, (1, 3)])),
                    pad_if_needed=draw(st.booleans()),
                    fill=draw(fills),
                    padding_mode=draw(modes),
                ),
                lambda: t.CenterCrop(draw(st.integers(4, 18))),
                lambda: t.Resize(draw(st.sampled_from([6, (7, 9), 15])), interpolation=draw(kinds)),
                lambda: t.RandomResizedCrop(draw(st.integers(5, 12)), interpolation=draw(kinds)),
                lambda: t.ColorJitter(draw(some), draw(some), draw(some), draw(st.sampled_from([0, 0.2]))),
                lambda: t.RandomGrayscale(draw(p)),
                lambda: t.Grayscale(draw(st.sampled_from([1, 3]))),
            ]
        )
    )()


@st.composite
def unknown(draw, family):
    t = family
    return draw(
        st.sampled_from(
            [
                lambda: t.Lambda(lambda image: image),
                lambda: Mine(),
                lambda: Numpys(),
                lambda: t.GaussianBlur(3),
                lambda: t.AutoAugment(),
                lambda: t.RandAugment(),
                lambda: t.TrivialAugmentWide(),
                lambda: t.ElasticTransform(5.0),
                lambda: t.RandomPerspective(0.3),
                lambda: t.RandomRotation(20),
                lambda: t.RandomEqualize(0.5),
                lambda: t.RandomApply([t.RandomHorizontalFlip(0.5), t.RandomInvert(0.5)], p=0.6),
                lambda: t.RandomChoice([t.RandomHorizontalFlip(0.5), t.RandomInvert(0.5)]),
            ]
        )
    )()


@st.composite
def of_floats(draw, family):
    t = family
    return draw(
        st.sampled_from(
            [
                lambda: t.Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3], inplace=draw(st.booleans())),
                lambda: t.Normalize([0.5], [0.25]),
                lambda: t.RandomErasing(draw(p), value=draw(st.sampled_from([0, 1.5, "random"]))),
                lambda: t.RandomHorizontalFlip(draw(p)),
                lambda: t.RandomCrop(6, padding=2),
                lambda: t.ConvertImageDtype(torch.float64),
                lambda: t.Lambda(torch.flatten),
                lambda: t.Lambda(lambda x: x * 2),
                lambda: t.ColorJitter(0.4),
                lambda: Mine(),
            ]
        )
    )()


@st.composite
def pipelines(draw):
    """Steps, and the kind of image that enters them."""
    family = draw(st.sampled_from([v1, v2]))
    source = draw(
        st.sampled_from(
            ["RGB", "RGB", "RGB", "RGB", "L", "RGBA", "P", "1", "I;16", "array", "bytes", "floats", "tv"]
        )
    )
    one = st.one_of(known(family), known(family), known(family), unknown(family))
    steps = draw(st.lists(one, max_size=3))
    if source in ("RGB", "L", "RGBA", "P", "1", "I;16", "array"):
        if family is v1:
            steps.append(draw(st.sampled_from([v1.ToTensor, v1.ToTensor, v1.PILToTensor]))())
        else:
            steps += draw(
                st.sampled_from(
                    [
                        [v2.ToTensor()],
                        [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)],
                        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
                        [v2.ToImage(), v2.ToDtype(torch.float32), v2.ToPureTensor()],
                    ]
                )
            )
    elif source != "floats":
        steps.append(
            v1.ConvertImageDtype(torch.float32)
            if family is v1
            else v2.ToDtype(torch.float32, scale=draw(st.booleans()))
        )
    steps += draw(st.lists(of_floats(family), max_size=2))
    steps = steps or [family.RandomHorizontalFlip(0.5)]
    transform = (
        family.Compose(steps)
        if draw(st.integers(0, 4))
        else family.Compose([family.Compose(steps[:2]), *steps[2:]])
    )
    return (
        transform,
        source,
        draw(st.integers(8, 17)),
        draw(st.integers(8, 17)),
        draw(st.sampled_from([False, False, False, True])),
    )


def images_of(source, height, width, mixed):
    make = np.random.RandomState(height * 31 + width)
    found = []
    for at in range(11):
        array = make.randint(0, 256, (height + (at % 3 if mixed else 0), width, 3), dtype=np.uint8)
        if source == "array":
            found.append(array)
        elif source in ("bytes", "floats", "tv"):
            tensor = torch.from_numpy(array).permute(2, 0, 1).contiguous()
            found.append(
                tensor / 255
                if source == "floats"
                else __import__("torchvision").tv_tensors.Image(tensor)
                if source == "tv"
                else tensor
            )
        else:
            image = Image.fromarray(array)
            found.append(
                image.convert("L").convert("I").convert("I;16") if source == "I;16" else image.convert(source)
            )
    return found


def called(manner, transform):
    """Called by the script's own object: unchanged, twice, or step by step."""
    steps = transform.transforms
    parts = [type(transform)(steps[:2]), *steps[2:]]
    return {"alone": transform, "views": Views(transform), "steps": Loop(steps), "parts": Loop(parts)}[manner]


@pytest.mark.parametrize("seed", range(8))
def test_arrays_pass_through_transforms_of_images(seed):
    """torchvision's v2 leaves an array as it is, and v1 fails where it draws a change."""
    for family in (v1, v2):
        asked = family.Compose([family.RandomHorizontalFlip(0.3), family.ToTensor()])

        def program(asked=asked):
            torch.manual_seed(seed)
            batches = iter(DataLoader(Images(asked, images_of("array", 8, 8, False)), 4))
            outcomes = []
            for _ in range(3):
                try:
                    outcomes.append(next(batches))
                except TypeError as error:
                    outcomes.append(str(error))
            return outcomes

        plain, fed = run(program)[0], run(program, BATCHED)[0]
        assert difference(plain, fed) == ""


@pytest.mark.slow
@settings(max_examples=PIPELINES)
@given(
    pipelines(),
    st.sampled_from(["alone", "views", "steps", "parts"]),
    st.sampled_from(
        [
            (BATCHED,),
            (BATCHED,),
            (LAZILY,),
            (BATCHED, LAZILY),
            (BATCHED, AT_ONCE),
            (("batched_transforms", "light"),),
        ]
    ),
)
def test_any_pipeline_is_bitwise_the_plain_one_or_rejected_with_a_reason(drawn, manner, levers):
    transform, *kind = drawn
    asked = called(manner, transform)

    def program():
        found = []
        taking = iter(DataLoader(Images(asked, images_of(*kind)), 4))
        for _ in range(3):
            try:
                found += [next(taking), torch.rand(1)]
            except Exception as error:  # an invalid pipeline fails as the plain one does
                found.append(f"{type(error).__name__}: {error}")
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, plain_end, _ = run(program)
        fed, end, said = run(program, *levers)
    assert difference(plain, fed) == ""
    assert end == plain_end
    assert all(len(sentence.split()) >= 4 for _, sentence in said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            lower(transform, images_of(*kind)[:2])
        except Exception:
            taken.append(False)
        else:
            taken.append(True)


@pytest.mark.slow
def test_many_of_them_ran_on_batches():
    """Without this the test above shows nothing: rejecting everything would pass it."""
    assert len(taken) >= 100
    assert sum(taken) > len(taken) / 3, f"{sum(taken)} of {len(taken)}"
