"""The levers of the data path through their public interface: workers, start methods, the report, the offered
values.
"""

import threading
import traceback

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from feeding import (
    AT_ONCE,
    BATCHED,
    LAZILY,
    LEVER,
    Images,
    augmented,
    difference,
    epochs,
    fixed,
    pil_images,
    run,
    same_as_plain,
    workers,
)
from torch.utils.data import DataLoader, get_worker_info
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.schema.enums import Effect
from flatout.schema.facts import Facts
from flatout.schema.lever import Options

FACTS = Facts(cores=2, memory_bytes=2**33, system="Linux")
quiet = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' argument")


class Drawing(Images):
    """Its pipeline uses random numbers from every generator, and from one of its own."""

    def __init__(self, transform):
        super().__init__(transform)
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index):
        import random

        return (
            self.transform(self.images[index]),
            random.random(),
            np.random.rand(),
            torch.rand(1).item(),
            self.generator.random(),
        )


# -- workers


@pytest.mark.processes
@quiet
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("levers", [(BATCHED,), (BATCHED, LAZILY)], ids=["batched", "batched lazily"])
def test_in_the_scripts_workers(arguments, levers):
    assert same_as_plain(lambda: epochs(Images(augmented()), pin_memory=True, **arguments), *levers) == []


@pytest.mark.processes
@quiet
@pytest.mark.parametrize(("asked", "given"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("more", [(), (BATCHED, LAZILY)], ids=["plain", "fed"])
def test_fewer_workers_use_the_same_random_numbers(asked, given, more):
    """From torch, random, numpy and the data set's own generator, in two epochs with a model that uses random
    numbers in between.
    """
    levers = (workers(given), *more)
    same_as_plain(lambda: epochs(Drawing(augmented()), num_workers=asked, batch_size=3), *levers)


@pytest.mark.processes
@quiet
def test_a_last_batch_that_is_short_and_workers_that_have_none():
    same_as_plain(lambda: epochs(Drawing(augmented()), num_workers=4, batch_size=7), workers(2))


@pytest.mark.full
@pytest.mark.processes
def test_workers_that_are_spawned():
    """The whole feed is pickled; what the data set itself excludes from pickling stays excluded."""

    def program(start):
        return epochs(Locked(augmented()), 1, num_workers=2, multiprocessing_context=start, batch_size=6)

    plain, end, _ = run(lambda: program("fork"))
    fed, fed_end, said = run(lambda: program("spawn"), workers(1), BATCHED, AT_ONCE)
    assert difference(plain, fed) == ""
    assert (end, said) == (fed_end, [])


class Locked(Drawing):
    def __init__(self, transform):
        super().__init__(transform)
        self.lock, self.name = threading.Lock(), lambda: "cannot be pickled"

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in ("lock", "name")}

    def __getitem__(self, index):
        return self.transform(self.images[index]), index


class Opened(Images):
    offset = 0.5

    def __getitem__(self, index):
        return self.transform(self.images[index]), index + (
            self.offset if index == 14 else 0.5
        )  # not in a worker's first batch


def open_in_worker(worker):
    dataset = get_worker_info().dataset
    assert isinstance(dataset, Opened)
    assert len(dataset) == dataset.__len__() == 24
    assert dataset[3][1] == 3.5
    assert dataset.labels[3] == 3
    dataset.offset = 100.0 * (worker + 1)


@pytest.mark.processes
@pytest.mark.parametrize(
    "levers",
    [(BATCHED,), (LAZILY,), (BATCHED, AT_ONCE), (workers(0),)],
    ids=["batched", "lazily", "batched at once", "no workers"],
)
@pytest.mark.parametrize("pipeline", [augmented, fixed])
def test_an_init_function_of_workers_has_the_data_set_itself(pipeline, levers):
    same_as_plain(
        lambda: epochs(Opened(pipeline()), num_workers=2, worker_init_fn=open_in_worker, shuffle=False),
        *levers,
    )


class Failing(Images):
    def __getitem__(self, index):
        if index == 13:
            raise KeyError("sample 13 is broken")
        return super().__getitem__(index)


@pytest.mark.processes
@pytest.mark.parametrize(
    "levers",
    [(BATCHED,), (LAZILY,), (workers(1),), (workers(0),)],
    ids=["batched", "lazily", "one worker", "no workers"],
)
def test_an_exception_in_a_worker(levers):
    def program():
        try:
            epochs(Failing(fixed()), num_workers=2)
        except KeyError as error:
            traceback.clear_frames(
                error.__traceback__
            )  # torch's exception holds its loader, whose workers would outlive the test
            return "sample 13 is broken" in str(error), error.__context__
        return None

    assert run(program)[0] == run(program, *levers)[0] == (True, None)


@pytest.mark.processes
def test_a_loop_over_workers_that_is_left_early():
    def program():
        loader, found = DataLoader(Images(augmented()), 4, num_workers=2), []
        for _ in range(2):
            for batch in loader:
                found.append(batch)
                break
        return [*found, *loader]

    same_as_plain(program, BATCHED, LAZILY)


# -- sources of images

BYTES = torch.stack([torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) for image in pil_images()])
SCALED = v2.Compose(
    [
        v2.RandomCrop(9),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ]
)
SOURCES = {
    "arrays": (
        np.stack([np.asarray(image) for image in pil_images()]),
        v1.Compose([v1.ToTensor(), v1.RandomCrop(9), v1.Normalize([0.5] * 3, [0.25] * 3)]),
    ),
    "gray arrays": (
        np.stack([np.asarray(image.convert("L")) for image in pil_images()]),
        v1.Compose([v1.ToTensor(), v1.RandomHorizontalFlip()]),
    ),
    "bytes": (BYTES, SCALED),
    "channels last": (BYTES.contiguous(memory_format=torch.channels_last), SCALED),
    "floats": (BYTES / 255, v1.Compose([v1.RandomCrop(9), v1.Normalize([0.5] * 3, [0.25] * 3)])),
    "tv": ([tv_tensors.Image(image) for image in BYTES], SCALED),
    "halves": ((BYTES / 255).half(), v1.RandomVerticalFlip()),
    "to image": (
        pil_images(),
        v2.Compose(
            [
                v2.RandomCrop(9),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        ),
    ),
    "images of bytes": (pil_images(), v2.Compose([v2.PILToTensor(), v2.RandomHorizontalFlip()])),
    "flattened": (pil_images(), v1.Compose([v1.ToTensor(), v1.Lambda(torch.flatten)])),
    "single": (pil_images(), v1.ToTensor()),
    "augmented elsewhere": (pil_images(), v1.Compose([v1.AutoAugment(), v1.RandomCrop(9), v1.ToTensor()])),
    "several from one": (
        pil_images(24, 20, 20),
        v1.Compose(
            [v1.FiveCrop(8), v1.Lambda(lambda crops: torch.stack([v1.ToTensor()(crop) for crop in crops]))]
        ),
    ),
    "unknown between": (
        pil_images(),
        v1.Compose([v1.RandomHorizontalFlip(), v1.GaussianBlur(3), v1.RandomCrop(9), v1.ToTensor()]),
    ),
    "unknown last": (
        pil_images(),
        v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), v1.RandomPerspective(0.4, 1.0)]),
    ),
}


@pytest.mark.parametrize(
    "levers", [(BATCHED,), (LAZILY,), (BATCHED, AT_ONCE)], ids=["batched", "lazily", "batched at once"]
)
@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_of_images(source, levers):
    images, transform = SOURCES[source]
    same_as_plain(lambda: epochs(Images(transform, images)), *levers)


# -- offered values and messages


@pytest.fixture
def seen():
    """``seen(dataset, **arguments)``: a context that has observed a loader being made and a backward pass."""
    ledgers = []

    def make(dataset=None, **arguments):
        ledgers.append(Ledger())
        context = TrainingContext(torch, Listener(), ledgers[-1])
        context.install()
        ledgers.append(context)
        if dataset is not None:
            make.loader = DataLoader(dataset, **{"batch_size": 4, **arguments})
        torch.ones(1, requires_grad=True).sum().backward()
        return context

    yield make
    for ledger, context in zip(ledgers[::2], ledgers[1::2], strict=True):
        context.stop_observing()
        ledger.restore()


NAMES = ["batched_transforms", "cached_prefix"]


@pytest.mark.parametrize("name", NAMES)
def test_asking_moves_no_generator_and_touches_no_data_set(seen, name):
    dataset = Drawing(augmented())
    context = seen(dataset)
    own, before, state = dict(vars(dataset)), torch.get_rng_state(), dataset.generator.bit_generator.state
    LEVER[name].applies(FACTS, context)
    assert torch.equal(before, torch.get_rng_state())
    assert dataset.generator.bit_generator.state == state
    assert vars(dataset) == own


def test_offered_values(seen):
    images = pil_images(24, 64, 64)
    answer = LEVER["batched_transforms"].applies(FACTS, seen(Images(augmented(), images)))
    assert answer == Options(("all",), effect=Effect.EXACT)
    heavy = LEVER["batched_transforms"].applies(
        FACTS, seen(Images(v1.Compose([v1.Resize(20), v1.ToTensor()]), images))
    )
    assert heavy.values == ("all", "light")
    kept = LEVER["cached_prefix"].applies(FACTS, seen(Images(augmented(), images)))
    assert kept.values == ({"mib": 1, "ahead": True}, {"mib": 1})
    small = Facts(cores=2, memory_bytes=2**22, system="Linux")
    assert LEVER["cached_prefix"].applies(small, seen(Images(augmented(), images))).values[0] == {
        "mib": 1,
        "ahead": True,
    }


def test_all_loaders_together_keep_no_more_than_they_may():
    """The second of two loaders finds less memory, and its message says so."""

    def program():
        first, second = (Images(fixed(), pil_images(40, 64, 96)) for _ in range(2))
        return [*epochs(first, 1), *epochs(second, 1)]

    said = same_as_plain(program, ("cached_prefix", {"mib": 3}))
    assert any("hardly any fits" in sentence for sentence in said)


def test_a_folder_for_data_that_does_not_fit(tmp_path):
    large = Images(fixed(), pil_images(40, 64, 96))
    assert same_as_plain(lambda: epochs(large), ("cached_prefix", {"mib": 1, "disk": str(tmp_path)})) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lever", [BATCHED, LAZILY, workers(0)], ids=lambda lever: lever[0])
def test_undone_in_mid_training(lever):
    """Iterators made under it continue; the next ones are plain."""
    ledger, feeding = Ledger(), Ledger()
    context = TrainingContext(torch, Listener(), ledger)
    context.install()
    try:
        loader = DataLoader(Images(augmented()), 5, shuffle=True)
        undo = LEVER[lever[0]].apply(context, lever[1], feeding)
        torch.manual_seed(5)
        taking = iter(loader)
        found = [next(taking)]
        undo()
        found += [*taking, *loader]
    finally:
        context.stop_observing()
        ledger.restore()
    torch.manual_seed(5)
    loader = DataLoader(Images(augmented()), 5, shuffle=True)
    assert difference([*loader, *loader], found) == ""
