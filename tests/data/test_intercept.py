"""Which calls a recorder gets, in which thread, and for how long."""

import pytest
import torch

pytest.importorskip("torchvision")

from feeding import pil_images
from torchvision import transforms as v1
from torchvision.transforms import v2

from flatout.agent.ledger import Ledger
from flatout.data.deferred import collate_deferred
from flatout.data.pipelines import INTERCEPTION, recording

IMAGE = pil_images(1)[0]


class Listing:
    """Does what the transform does, and records it."""

    def __init__(self):
        self.calls, self.seeded = [], 0

    def call(self, transform, image, plain):
        self.calls.append(type(transform).__name__)
        return plain(transform, image)

    def reseeded(self):
        self.seeded += 1


class Mine(v1.RandomCrop):
    pass


class Around(v1.Compose):
    def __call__(self, image):
        return super().__call__(image)


@pytest.fixture
def ledger():
    found = Ledger()
    yield found
    found.restore()


def shown(program):
    recorder = Listing()
    with recording(recorder):
        program()
    return recorder.calls


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (lambda: v1.ToTensor()(IMAGE), ["ToTensor"]),
        (lambda: v1.RandomHorizontalFlip()(IMAGE), ["RandomHorizontalFlip"]),
        (lambda: v2.Compose([v2.ToImage()])(IMAGE), ["Compose", "ToImage"]),
        (lambda: v1.Compose([v1.RandomCrop(3), v1.ToTensor()])(IMAGE), ["Compose", "RandomCrop", "ToTensor"]),
        (lambda: Around([v1.RandomCrop(3), v1.ToTensor()])(IMAGE), ["RandomCrop", "ToTensor"]),
        (lambda: Mine(3)(IMAGE), []),
        (lambda: v2.RandomCrop(3)(IMAGE, IMAGE), []),
        (lambda: v1.RandomCrop(3)(img=IMAGE), []),
        (lambda: v1.functional.hflip(IMAGE), []),
        (lambda: torch.nn.Sequential(v1.RandomCrop(3))(IMAGE), ["RandomCrop"]),
        (lambda: torch.nn.Linear(2, 2)(torch.ones(2)), []),
    ],
    ids=[
        "class",
        "module",
        "version 2",
        "compose",
        "around",
        "subclass",
        "two images",
        "by name",
        "function",
        "sequential",
        "layer",
    ],
)
def test_calls_of_one_image_by_transforms_of_torchvisions_own(program, names, ledger):
    assert shown(program) == []
    INTERCEPTION.enable(ledger)
    assert shown(program) == names
    ledger.restore()
    assert shown(program) == []


def test_everything_is_restored_with_the_last_holder(ledger):
    from torch.utils.data._utils.collate import default_collate_fn_map

    before, collation = dict(vars(v1.Compose)), dict(default_collate_fn_map)
    other = Ledger()
    INTERCEPTION.enable(ledger)
    INTERCEPTION.enable(other)
    assert collate_deferred in default_collate_fn_map.values()
    ledger.restore()
    assert shown(lambda: v1.ToTensor()(IMAGE)) == ["ToTensor"]
    other.restore()
    assert dict(vars(v1.Compose)) == before
    assert dict(default_collate_fn_map) == collation
