"""Transforms are followed wherever the data set's own code calls them, and batches are those of the plain
loader, bit for bit.
"""

import random
import traceback

import pytest
import torch

pytest.importorskip("torchvision")

from feeding import (
    BATCHED,
    FEED_NAMES,
    FEEDS,
    LAZILY,
    Images,
    augmented,
    epochs,
    fixed,
    pil_images,
    run,
    same_as_plain,
)
from shapes import (
    COLLATED,
    FOLLOWED,
    LEFT,
    Fetching,
    Sample,
    Stream,
    Transforming,
    Views,
    base,
    one_view,
    small,
)
from torch.utils.data import DataLoader
from torchvision import transforms as v1

from flatout.data import deferring
from flatout.data.pipeline_tracker import PipelineTracker

each_feed = pytest.mark.parametrize("levers", FEEDS, ids=FEED_NAMES)
EXPECTED_WARNINGS = ("To copy construct from a tensor", "This DataLoader will create", ".*torch.jit.script")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{start}") for start in EXPECTED_WARNINGS]


def computed(monkeypatch, program, *levers):
    """The number of images computed in batches and one by one after their pipelines were recognised, and the
    messages.
    """
    every = {}
    really = PipelineTracker.review

    def reviewed(following):
        every[id(following)] = following
        really(following)

    with monkeypatch.context() as patch:
        patch.setattr(PipelineTracker, "review", reviewed)
        _, _, said = run(program, *levers)
    pipelines = [pipeline for following in every.values() for pipeline in following.pipelines]
    return (
        sum(each.batched_count for each in pipelines),
        sum(each.single_count for each in pipelines),
        [sentence for _, sentence in said],
    )


@pytest.mark.sampled(40)
@each_feed
@pytest.mark.parametrize("name", [*FOLLOWED, *LEFT])
def test_every_shape_of_data_set(name, levers):
    make = {**FOLLOWED, **LEFT}[name]
    same_as_plain(lambda: epochs(make()), *levers)


@pytest.mark.parametrize("name", FOLLOWED)
def test_they_are_really_followed(name, monkeypatch):
    together, alone, said = computed(monkeypatch, lambda: epochs(FOLLOWED[name](), 3), BATCHED)
    assert together >= 24 * (
        3 if name not in ("two parts", "either") else 2
    )  # all except a pipeline that appears late
    assert alone == 0
    assert said == []


@pytest.mark.parametrize("name", LEFT)
def test_data_sets_without_a_gain_are_left_alone_and_say_why(name, monkeypatch):
    _, alone, said = computed(monkeypatch, lambda: epochs(LEFT[name](), 3), BATCHED)
    assert alone == 0
    assert said


def test_a_pipeline_that_is_inspected_later_is_left_alone():
    """The samples that are checked first do not show it."""
    late = [False]
    transform = augmented()

    def make(image, index):
        x = transform(image)
        return (x * 2 if late[0] else x), index

    def program():
        late[0] = False
        return epochs(Sample(make), 3, lambda dataset, epoch, at: late.__setitem__(0, epoch > 0))

    assert any(
        "looks at the images that Compose returns" in sentence for sentence in same_as_plain(program, BATCHED)
    )


# -- collation


@pytest.mark.sampled(12)
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("levers", [FEEDS[0], FEEDS[2]], ids=[FEED_NAMES[0], FEED_NAMES[2]])
@pytest.mark.parametrize("name", COLLATED)
def test_every_collation(name, levers, workers):
    assert (
        same_as_plain(
            lambda: epochs(Images(augmented()), collate_fn=COLLATED[name], num_workers=workers), *levers
        )
        == []
    )


@pytest.mark.parametrize("name", COLLATED)
def test_collation_of_any_kind_is_computed_together(name, monkeypatch):
    assert computed(monkeypatch, lambda: epochs(Images(augmented()), collate_fn=COLLATED[name]), BATCHED)[
        1:
    ] == (0, [])


@each_feed
def test_transforms_that_the_collation_calls(levers, monkeypatch):
    assert (
        same_as_plain(lambda: epochs(Images(lambda image: image), collate_fn=Transforming()), *levers) == []
    )
    together, _, _ = computed(
        monkeypatch, lambda: epochs(Images(lambda image: image), collate_fn=Transforming()), BATCHED
    )
    assert together > 40


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [lambda: Images(Views(augmented())), lambda: Fetching(one_view())],
    ids=["two views", "set_transform"],
)
@pytest.mark.parametrize("levers", [FEEDS[0], FEEDS[2]], ids=[FEED_NAMES[0], FEED_NAMES[2]])
def test_in_workers(make, levers, workers):
    assert same_as_plain(lambda: epochs(make(), num_workers=workers), *levers) == []


# -- what the data set's code does with images


class Collecting(Images):
    """Keeps every image for later."""

    def __init__(self, transform):
        super().__init__(transform)
        self.seen = []

    def __getitem__(self, index):
        image = self.transform(self.images[index])
        self.seen.append(image)
        return image, index


def test_images_kept_by_the_data_set_are_real_once_their_batch_exists():
    def program():
        dataset = Collecting(augmented())
        found = epochs(
            dataset,
            meanwhile=lambda dataset, epoch, at: [type(image) is torch.Tensor for image in dataset.seen],
        )
        assert all(
            image.data_ptr() != other.data_ptr() for image in dataset.seen[:6] for other in dataset.seen[6:]
        )
        return [*found, dataset.seen]

    same_as_plain(program, BATCHED)


def test_an_image_that_is_changed_after_its_batch_was_made():
    """The batch, its images and other batches share no memory."""

    def program():
        found = []
        for batch, samples in DataLoader(
            Images(augmented()), 6, collate_fn=lambda samples: (torch.stack([x for x, _ in samples]), samples)
        ):
            samples[0][0].zero_()
            found.append((batch.clone(), [x.clone() for x, _ in samples]))
            batch.fill_(5)
            found.append([x.clone() for x, _ in samples])
        return found

    assert same_as_plain(program, BATCHED) == []


class Broken:
    def __call__(self, image):
        if image.getpixel((0, 0))[0] > 200:
            raise ValueError("a bright corner")
        return image


def failing(image, index, transform=v1.Compose([Broken(), *base(), v1.ToTensor()])):  # noqa: B008
    try:
        return transform(image), index
    except ValueError as error:
        places = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return torch.zeros(3, 10, 10), int("failing" in places) + 1000


@each_feed
def test_an_exception_in_a_transform_reaches_the_code_that_called_it(levers):
    same_as_plain(lambda: epochs(Sample(failing)), *levers)


def too_small(image, index, transform=v1.Compose([v1.RandomCrop(12), v1.ToTensor()])):  # noqa: B008
    try:
        return transform(image.resize((13, 13) if index % 5 else (9, 9))), index
    except ValueError as error:
        return torch.zeros(3, 12, 12), str(error)


@each_feed
def test_an_image_that_torchvision_rejects_is_rejected_in_the_same_place(levers):
    same_as_plain(lambda: epochs(Sample(too_small), batch_size=1), *levers)


def test_a_bounded_number_of_images_waits(monkeypatch):
    """Images are computed early whatever the batch size, and the batch is the same."""
    monkeypatch.setattr(deferring, "MAX_PIXEL_BYTES", 5 * 11 * 13 * 3)
    most = [0]
    really = deferring.BatchRecorder._defer

    def answered(recorder, work):
        answer = really(recorder, work)
        most[0] = max(most[0], recorder._pixel_bytes)
        return answer

    monkeypatch.setattr(deferring.BatchRecorder, "_defer", answered)
    assert same_as_plain(lambda: epochs(Images(Views(augmented())), batch_size=24), BATCHED) == []
    assert 0 < most[0] <= 5 * 11 * 13 * 3


def test_nothing_is_held_once_a_batch_is_made():
    import gc

    from flatout.data.pipelines import DeferredWork

    def program():
        alive = []
        for _ in DataLoader(Images(Views(augmented())), 6):
            gc.collect()
            alive.append(sum(type(thing) is DeferredWork for thing in gc.get_objects()))
        return alive

    found, _, _ = run(program, BATCHED)
    assert found == [0, 0, 0, 0]


# -- changes by the script


def replaced(dataset, epoch, at):
    if (epoch, at) == (0, 2):
        dataset.transform.transform = small()


def more_views(dataset, epoch, at):
    if (epoch, at) == (1, 1):
        dataset.transform.count = 3


def other_constant(dataset, epoch, at):
    if (epoch, at) == (0, 1):
        dataset.transform.transform.transforms[-1].mean = [0.1] * 3


@each_feed
@pytest.mark.parametrize("change", [replaced, more_views, other_constant], ids=lambda change: change.__name__)
def test_a_change_in_the_object_around_a_transform_counts_from_the_next_batch_on(change, levers):
    same_as_plain(lambda: epochs(Images(Views(augmented())), 3, change), *levers)
    same_as_plain(lambda: epochs(Images(Views(fixed_10())), 3, change), *levers)


def fixed_10():
    return v1.Compose([v1.CenterCrop(10), *fixed().transforms])


class Labelling:
    """An object around a transform with its own table."""

    def __init__(self, transform):
        self.transform, self.labels = transform, list(range(24))

    def __call__(self, image, index):
        return self.transform(image), self.labels[index]


@each_feed
@pytest.mark.parametrize("transform", [augmented, fixed])
def test_a_change_of_one_sample_in_the_object_around_a_transform(transform, levers):
    """An occasional check of a sample would miss it."""

    def change(dataset, epoch, at):
        if (epoch, at) == (0, 4):
            dataset.make.labels[7] = 99

    same_as_plain(lambda: epochs(Sample(Labelling(transform())), 3, change), *levers)


def test_a_pipeline_that_comes_late_is_followed_too(monkeypatch):
    def program():
        return epochs(
            Images(augmented()),
            1,
            lambda dataset, epoch, at: setattr(dataset, "transform", second),
            batch_size=2,
        )

    second = v1.Compose([v1.RandomCrop(9), v1.ToTensor()])
    assert same_as_plain(program, BATCHED) == []
    calls = [0]
    really = v1.ToTensor.__call__

    def counted(self, image):
        calls[0] += self is second.transforms[1]
        return really(self, image)

    monkeypatch.setattr(v1.ToTensor, "__call__", counted)
    run(program, BATCHED)
    assert 0 < calls[0] < 16  # of 22 images


# -- streams


@pytest.mark.parametrize("levers", [(LAZILY,), (BATCHED,)], ids=["kept", "batched"])
def test_a_stream_is_left_alone(levers):
    (said,) = same_as_plain(lambda: epochs(Stream(augmented()), shuffle=False), *levers)
    assert said.startswith("the data set is an IterableDataset")


# -- undone


@each_feed
def test_two_loaders_in_turns_and_a_transform_that_the_script_calls_itself(levers):
    def program():
        dataset, other = Images(Views(augmented())), Images(augmented())
        found = []
        for batch, second in zip(DataLoader(dataset, 6, shuffle=True), DataLoader(other, 6), strict=True):
            mine = dataset.transform(pil_images(1)[0])
            found += [batch, second, mine, [type(each) for each in mine], random.random()]
        return found

    assert same_as_plain(program, *levers) == []
