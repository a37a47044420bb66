"""The promise of a feed: batches and side effects are those of the plain loader.

Real loaders, a real training context, the real levers.
"""

import itertools
import random
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from feeding import (
    AT_ONCE,
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
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms as v1
from torchvision.transforms import v2

from flatout.data.batch_comparison import difference

each_feed = pytest.mark.parametrize("levers", FEEDS, ids=FEED_NAMES)
KEEPING, KEEPING_NAMES = FEEDS[1:], FEED_NAMES[1:]
each_keeping = pytest.mark.parametrize("levers", KEEPING, ids=KEEPING_NAMES)
SHAPES = {"augmented": augmented, "fixed": fixed}
each_pipeline = pytest.mark.parametrize("pipeline", SHAPES.values(), ids=SHAPES)


@pytest.mark.parametrize(
    "levers", [*FEEDS, (AT_ONCE,), (BATCHED, LAZILY)], ids=[*FEED_NAMES, "at once", "batched lazily"]
)
@each_pipeline
def test_batches_are_the_plain_ones_and_nothing_is_reported(pipeline, levers):
    assert same_as_plain(lambda: epochs(Images(pipeline())), *levers) == []


# -- kinds of samples

Named = namedtuple("Named", "image label")
SAMPLES = {
    "dictionary": lambda x, i: {"x": x, "y": i},
    "named": lambda x, i: Named(x, i),
    "list": lambda x, i: [x, float(i)],
    "nested": lambda x, i: {"a": (x, [i, np.float32(i)]), "b": np.array([i, 2])},
    "numbers": lambda x, i: (x, i % 2 == 0, np.int64(i), -0.0, float("nan")),
    "alone": lambda x, i: x,
    "string": lambda x, i: (x, f"sample {i}"),
    "ordered": lambda x, i: OrderedDict(x=x, y=i),
    "shape": lambda x, i: (x.mean() if isinstance(x, torch.Tensor) else x, i),
}


class Shaped(Images):
    def __init__(self, transform, shape):
        super().__init__(transform)
        self.shape = shape

    def __getitem__(self, index):
        return SAMPLES[self.shape](self.transform(self.images[index]), index)


@each_feed
@pytest.mark.parametrize("shape", SAMPLES)
def test_every_kind_of_sample(shape, levers):
    for pipeline in (augmented, fixed)[
        levers == (LAZILY,) :
    ]:  # random steps are kept up to there, as in the other two
        same_as_plain(lambda: epochs(Shaped(pipeline(), shape), 1), *levers)  # noqa: B023


class Odd(Images):
    def __getitem__(self, index):
        return self.transform(self.images[index]), None


@each_feed
def test_samples_that_cannot_be_collated_fail_as_in_the_plain_loader(levers):
    def program():
        with pytest.raises(TypeError) as caught:
            epochs(Odd(fixed()))
        return str(caught.value)

    same_as_plain(program, *levers)


# -- random numbers


class Drawing(Images):
    """Uses random numbers for some samples only, and not for the first ones."""

    def __init__(self, transform, draw):
        super().__init__(transform)
        self.draw = draw

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.draw() if index > 7 and index % 3 == 1 else 0.0


DRAWS = {"torch": lambda: torch.rand(1).item(), "random": random.random, "numpy": np.random.rand}


@each_feed
@each_pipeline
@pytest.mark.parametrize("source", DRAWS)
def test_a_data_set_with_random_numbers_now_and_then(source, pipeline, levers):
    """The batch that is made both ways has no random numbers; the order must hold in the later ones."""
    same_as_plain(lambda: epochs(Drawing(pipeline(), DRAWS[source]), 1, shuffle=False), *levers)


class Own(Images):
    def __init__(self, transform, generator):
        super().__init__(transform)
        self.generator = generator

    def __getitem__(self, index):
        drawn = (
            self.generator.random()
            if not isinstance(self.generator, torch.Generator)
            else torch.rand(1, generator=self.generator).item()
        )
        return self.transform(self.images[index]), drawn


GENERATORS = {
    "numpy": lambda: np.random.default_rng(1),
    "old": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}


@each_feed
@each_pipeline
@pytest.mark.parametrize("kind", GENERATORS)
def test_inspection_does_not_advance_a_generator_of_the_data_set(kind, pipeline, levers):
    def program():
        dataset = Own(pipeline(), GENERATORS[kind]())
        found = epochs(dataset)
        return [*found, dataset[0]]

    same_as_plain(program, *levers)


GLOBAL = np.random.default_rng(0)


class Noisy:
    def __call__(self, image):
        return image + float(GLOBAL.normal())


@each_feed
def test_a_generator_that_a_transform_finds_in_its_module(levers):
    def program():
        GLOBAL.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return [*epochs(Images(v1.Compose([v1.ToTensor(), Noisy()]))), GLOBAL.normal()]

    same_as_plain(program, *levers)


class Wild(Images):
    """Gives a different result each time, from an invisible source."""

    def __init__(self, transform):
        super().__init__(transform)
        self.count = itertools.count()

    def __getitem__(self, index):
        return self.transform(self.images[index]), next(self.count)


@each_feed
def test_a_nondeterministic_data_set_is_rejected(levers):
    _, _, said = run(lambda: epochs(Wild(fixed())), *levers)
    assert any("not the same each time" in sentence or "differ" in sentence for _, sentence in said)


# -- side effects of the data set's code


class Counting(Images):
    def __init__(self, transform):
        super().__init__(transform)
        self.fetched = 0

    def __getitem__(self, index):
        self.fetched += 1
        return super().__getitem__(index)


@each_feed
@each_pipeline
def test_a_counter_counts_as_in_the_plain_loader(pipeline, levers):
    """The count holds after each batch, not only when the next one is requested, and inspection does not
    count.
    """
    same_as_plain(
        lambda: epochs(Counting(pipeline()), meanwhile=lambda dataset, epoch, at: dataset.fetched), *levers
    )


class Logging(Images):
    def __init__(self, transform):
        super().__init__(transform)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


@each_keeping
def test_inspection_leaves_nothing_in_a_list_of_the_data_set(levers):
    """Samples of such a data set are not kept either: its code would no longer be called."""

    def program():
        dataset = Logging(fixed())
        epochs(dataset)
        return dataset.asked

    plain, _, _ = run(program)
    fed, _, said = run(program, *levers)
    assert any("changes each time a sample is fetched" in sentence for _, sentence in said)
    # A batch that is made both ways is fetched twice where the list is shared with it; no sample is missing.
    assert set(fed) == set(plain)


class Caching(Images):
    """Keeps the result of its pipeline: augmented once, as some programs do."""

    def __init__(self, transform):
        super().__init__(transform)
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = self.transform(self.images[index])
        return self.kept[index], self.labels[index]


@each_feed
@each_pipeline
def test_a_data_set_that_keeps_its_images_itself(pipeline, levers):
    """Nothing of flatout may end up in its cache, nor any random number used during inspection."""

    def program():
        dataset = Caching(pipeline())
        found = epochs(dataset)
        assert all(type(image) is torch.Tensor for image in dataset.kept.values())
        return [*found, [dataset[index] for index in range(24)]]

    same_as_plain(program, *levers)


class Opening(Images):
    """Opens its file when the first sample is requested."""

    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open("/dev/zero", "rb")  # noqa: SIM115
        return self.transform(self.images[index]), len(self.file.read(1 + index % 3))


@each_feed
@each_pipeline
def test_a_file_that_is_opened_late(pipeline, levers):
    assert same_as_plain(lambda: epochs(Opening(pipeline())), *levers) == []


class Failing(Images):
    def __getitem__(self, index):
        if index == 13:
            random.random()
            np.random.rand()
            torch.rand(1)
            raise KeyError("sample 13 is broken")
        return super().__getitem__(index)


@each_feed
@each_pipeline
def test_an_exception_comes_out_once_and_the_loader_continues(pipeline, levers):
    """The random numbers before it are used once, from every generator."""

    def program():
        taking, found = iter(DataLoader(Failing(pipeline()), batch_size=4)), []
        for _ in range(6):
            try:
                found.append(next(taking))
            except KeyError as error:
                found.append(str(error))
        return found

    same_as_plain(program, *levers)


class Interrupted(Images):
    def __getitem__(self, index):
        if index == 13:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@each_feed
def test_an_interrupt_is_not_swallowed(levers):
    def program():
        with pytest.raises(KeyboardInterrupt):
            epochs(Interrupted(fixed()), shuffle=False)

    run(program, *levers)


# -- changes during training


def label(dataset, epoch, at):
    if (epoch, at) == (0, 3):
        dataset.labels[2] = 99


def labels_replaced(dataset, epoch, at):
    if (epoch, at) == (1, 1):
        dataset.labels = [label + 50 for label in dataset.labels]


def one_image(dataset, epoch, at):
    if (epoch, at) == (0, 4):
        dataset.images[7] += 1


def all_images(dataset, epoch, at):
    if (epoch, at) == (1, 1):
        dataset.images[:] = 0


def images_replaced(dataset, epoch, at):
    if (epoch, at) == (1, 1):
        dataset.images = dataset.images[::-1] if isinstance(dataset.images, list) else dataset.images + 1


def probability(dataset, epoch, at):
    if (epoch, at) == (0, 1):
        dataset.transform.transforms[1].p = 1.0


def constant(dataset, epoch, at):
    if (epoch, at) == (1, 1):
        dataset.transform.transforms[-1].mean = [0.1] * 3


def one_more_step(dataset, epoch, at):
    if (epoch, at) == (0, 2):
        dataset.transform.transforms.append(v1.RandomErasing(p=1.0))


def other_pipeline(dataset, epoch, at):
    if (epoch, at) == (0, 2):
        dataset.transform = v1.Compose([v1.CenterCrop(10), v1.ToTensor()])


def no_pipeline_in_the_next_epoch(dataset, epoch, at):
    if (epoch, at) == (0, 4):
        dataset.transform = v1.ToTensor()


def constant_late(dataset, epoch, at):
    """Changes when kept samples are no longer checked in every batch."""
    if (epoch, at) == (2, 19):
        dataset.transform.transforms[-1].mean = [0.1] * 3


@each_feed
def test_a_constant_that_changes_late(levers):
    same_as_plain(lambda: epochs(Images(fixed()), 3, constant_late, batch_size=1), *levers)


CHANGES = [
    label,
    labels_replaced,
    images_replaced,
    probability,
    constant,
    one_more_step,
    other_pipeline,
    no_pipeline_in_the_next_epoch,
]


@each_feed
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_by_the_script_counts_from_the_next_batch_on(change, levers):
    same_as_plain(lambda: epochs(Images(augmented()), 3, change), *levers)
    if change is not probability:
        same_as_plain(lambda: epochs(Images(fixed()), 3, change), *levers)


def stack_deferred():
    return np.stack([np.asarray(image) for image in pil_images()])


def tensors():
    return torch.from_numpy(stack_deferred()).permute(0, 3, 1, 2)


def floats():
    return v2.Compose(
        [v2.RandomCrop(10), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    )


@each_feed
@pytest.mark.parametrize(
    "change", [one_image, all_images, images_replaced], ids=lambda change: change.__name__
)
def test_data_that_is_changed_in_place(change, levers):
    """One image among many: an occasional check of a sample would miss it."""
    same_as_plain(lambda: epochs(Images(fixed(), stack_deferred()), 3, change), *levers)
    same_as_plain(lambda: epochs(Images(floats(), tensors()), 3, change), *levers)


@each_keeping
def test_large_data_is_checked_when_an_epoch_begins(levers):
    def program():
        large = np.zeros((24, 96, 96, 3), dtype=np.uint8)
        return [
            batch[0][:, :, 0, 0]
            for batch in epochs(Images(fixed(), large), 2, one_image)
            if isinstance(batch, list)
        ]

    assert any("changed" in sentence for sentence in same_as_plain(program, *levers))


@each_keeping
def test_tensors_that_are_replaced(levers):
    def change(dataset, epoch, at):
        if (epoch, at) == (1, 1):
            dataset.tensors = (dataset.tensors[0] * 2, dataset.tensors[1])

    said = same_as_plain(
        lambda: epochs(TensorDataset(torch.arange(48.0).view(24, 2), torch.arange(24)), 3, change), *levers
    )
    assert any("has changed its data set" in sentence for sentence in said)


@each_feed
@pytest.mark.parametrize(
    "last",
    [v1.Normalize([0.5] * 3, [0.25] * 3, inplace=True), v1.Lambda(lambda image: image.mul_(0.5))],
    ids=["normalize", "lambda"],
)
def test_transforms_that_write_into_the_data_are_left_alone(last, levers):
    """An inspection would change the data."""

    def program():
        data = tensors() / 255
        return [*epochs(Images(v1.Compose([v1.RandomHorizontalFlip(), last]), data), 3), data]

    assert any("in place" in sentence for sentence in same_as_plain(program, *levers))


# -- images that differ


def mixed(*, late):
    images = pil_images(20)
    images[17] = late(images[17])
    return images


@each_feed
def test_a_late_image_of_another_mode_fails_as_in_the_plain_loader(levers):
    """One grey image at a late position: with three constants for one channel torchvision raises, and so must
    the batch.
    """

    def program():
        with pytest.raises(RuntimeError) as caught:
            epochs(Images(augmented(), mixed(late=lambda image: image.convert("L"))), 1, shuffle=False)
        return str(caught.value)

    same_as_plain(program, *levers)


@each_feed
@pytest.mark.parametrize("mode", ["P", "RGBA", "I;16"])
def test_late_images_of_another_mode_that_a_transform_converts(mode, levers):
    def late(image):
        return image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)

    pipeline = v1.Compose(
        [
            v1.Lambda(lambda image: image),
            v1.RandomHorizontalFlip(),
            v1.Lambda(lambda image: image.convert("RGB")),
            v1.ToTensor(),
        ]
    )
    same_as_plain(lambda: epochs(Images(pipeline, mixed(late=late)), 2, shuffle=False), *levers)
    same_as_plain(
        lambda: epochs(
            Images(
                v1.Compose([v1.Grayscale(3), v1.RandomHorizontalFlip(), v1.ToTensor()]),
                mixed(late=lambda image: image.convert("L")),
            ),
            2,
            shuffle=False,
        ),
        *levers,
    )


# -- which loaders


@each_feed
@pytest.mark.parametrize(
    "arguments",
    [
        {"drop_last": True},
        {"batch_size": 1},
        {"batch_size": 24},
        {"batch_size": 7},
        {"shuffle": False},
        {"pin_memory": True},
        {"shuffle": False, "sampler": range(3, 20)},
        {"shuffle": False, "sampler": [5, 5, 5, 6, 23, 0]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_arguments_of_a_loader(arguments, levers):
    assert same_as_plain(lambda: epochs(Images(augmented()), **arguments), *levers) == []


SAMPLERS = {
    "own generator": lambda: {"generator": torch.Generator().manual_seed(9)},
    "weighted": lambda: {
        "shuffle": False,
        "sampler": torch.utils.data.WeightedRandomSampler([1.0] * 12 + [3.0] * 12, 24),
    },
    "replacement": lambda: {
        "shuffle": False,
        "sampler": torch.utils.data.RandomSampler(range(24), replacement=True, num_samples=40),
    },
    "batches": lambda: {
        "batch_size": 1,
        "shuffle": False,
        "batch_sampler": [[0, 1, 2], [3], [23, 22, 4, 5], [7, 7]],
    },
    "subset": lambda: {"shuffle": False, "sampler": torch.utils.data.SubsetRandomSampler(range(4, 19))},
}


@pytest.mark.parametrize("levers", [FEEDS[0], FEEDS[2]], ids=[FEED_NAMES[0], FEED_NAMES[2]])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name, levers):
    same_as_plain(lambda: epochs(Images(augmented()), **SAMPLERS[name]()), *levers)
    same_as_plain(lambda: epochs(Images(fixed()), **SAMPLERS[name]()), *levers)


@each_feed
def test_a_loop_that_is_left_early_one_inside_another_and_two_loaders(levers):
    def program():
        dataset, other = Images(augmented()), Images(fixed())
        loader, second, found = DataLoader(dataset, 5, shuffle=True), DataLoader(other, 4), []
        for at, batch in enumerate(loader):
            found.append(batch)
            if at == 2:
                break
        for batch, inner in zip(loader, loader, strict=True):
            found += [batch, inner]
        for batch in loader:
            found += [batch, next(iter(second)), next(iter(loader))]
        return found

    assert same_as_plain(program, *levers) == []


class Endless(torch.utils.data.Sampler):
    def __len__(self):
        return 10**10

    def __iter__(self):
        return itertools.count()


class Stateful(torch.utils.data.Sampler):
    """Depends on the training in between."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for _ in range(20):
            yield self.at % 24
            self.at += 1


@pytest.mark.parametrize("levers", [*FEEDS, (("loader", {"workers": 2}),)], ids=[*FEED_NAMES, "workers"])
@pytest.mark.parametrize("case", ["stream", "no batches"])
def test_loaders_left_alone_say_why(case, levers):
    def program():
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(torch.arange(24.0))

        loaders = {
            "stream": lambda: DataLoader(Stream(), 5),
            "no batches": lambda: DataLoader(Images(fixed()), batch_size=None),
        }
        return list(loaders[case]())

    if levers[0][0] == "loader" and case == "no batches":
        return
    said = same_as_plain(program, *levers)
    assert said or levers[0][0] == "loader"


@pytest.mark.parametrize(
    "levers",
    [(("loader", {"workers": 2}),), (BATCHED,), (AT_ONCE,)],
    ids=["workers", "batched", "at once"],
)
def test_custom_samplers_are_called_as_late_as_in_the_plain_loader(levers):
    def program():
        sampler, found = Stateful(), []
        for batch in DataLoader(Images(augmented()), 4, sampler=sampler):
            found.append((batch, sampler.at))
            sampler.at += 2
        taking = iter(DataLoader(TensorDataset(torch.arange(1000)), 3, sampler=Endless()))
        return [*found, [next(taking) for _ in range(5)]]

    same_as_plain(program, *levers)


@each_feed
def test_the_scripts_objects_stay_unchanged(levers):
    def program():
        dataset = Images(augmented())
        loader = DataLoader(dataset, 5, shuffle=True)
        before = [
            dict(vars(thing)) for thing in (dataset, dataset.transform, *dataset.transform.transforms[2:])
        ]
        epochs_of = [batch for _ in range(2) for batch in loader]
        after = [
            dict(vars(thing)) for thing in (dataset, dataset.transform, *dataset.transform.transforms[2:])
        ]
        assert all(
            now[name] is value
            for then, now in zip(before, after, strict=True)
            for name, value in then.items()
        )
        assert [now.keys() for now in after] == [then.keys() for then in before]
        assert loader.dataset is dataset
        return epochs_of

    same_as_plain(program, *levers)


def test_a_budget_that_holds_only_some_samples():
    """The rows that fit are kept and the others are fetched; a random step lies between the kept rows and the
    batch.
    """
    pipeline = v1.Compose(
        [
            v1.Resize(96),
            v1.RandomAutocontrast(),
            v1.Lambda(lambda image: image),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
        ]
    )
    images = pil_images(48, 96, 128)
    for levers in [(("cached_prefix", {"mib": 1}),), (BATCHED, ("cached_prefix", {"mib": 1}))]:
        said = same_as_plain(lambda: epochs(Images(pipeline, images), batch_size=6), *levers)
        assert not any("kept" in sentence or "differ" in sentence for sentence in said)


def test_samples_that_are_kept_are_not_fetched_again():
    """One sample a batch is fetched, to check whether it changes."""
    asked = []

    class Asked(Images):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    run(lambda: epochs(Asked(fixed()), 6), BATCHED, LAZILY)
    looks, watched = 60, 5 * 6
    assert len(asked) < 24 + looks + watched < 6 * 24


def test_a_transform_runs_once_for_a_batch():
    """The batched path is really used: recognised transforms are not called any more."""

    class Watched(v1.ToTensor):
        pass

    calls = []
    really = v1.Normalize.forward
    try:
        v1.Normalize.forward = lambda self, image: calls.append(1) or really(self, image)
        run(lambda: epochs(Images(augmented()), 4), BATCHED)
    finally:
        v1.Normalize.forward = really
    assert len(calls) < 4 * 24 / 2


def test_difference_between_two_batches():
    x = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    assert difference(x, x.clone(), 0.0) == ""
    for other in (x.double(), x.t(), x.flatten(), torch.where(x == 0, -0.0, x), x + 1e-6, [x]):
        assert difference(x, other, 0.0)
    assert difference([x[0], {"a": 1}], [x[0] + 0.25, {"a": 1}], 0.25) == ""
    assert difference([x[0], {"a": 1}], [x[0] + 0.26, {"a": 1}], 0.25)
    for other in ([x], [x, {"b": 1}], (x, {"a": 1}), [x, {"a": 2}]):
        assert difference([x, {"a": 1}], other, 0.0)
