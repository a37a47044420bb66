"""Device counterparts of host tensors, and the code that makes them, on the host itself.

Streams and pinned memory need a GPU (tests/levers/test_gpu.py).
"""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

pytest.importorskip("torchvision")

from PIL import Image
from torchvision import transforms

from flatout.agent.ledger import Ledger
from flatout.data.batch_comparison import same_bits
from flatout.data.deferred import is_deferred
from flatout.data.device import (
    MAX_COPIES,
    CopyStream,
    DeviceCopies,
    DevicePrefetcher,
    ResidentDevice,
    device_of,
    host_tensors,
    intercept_moves,
)
from flatout.data.draws import Integer, Uniform, draw_columns
from flatout.data.feed import Feed
from flatout.data.keeping import CacheBudget, CacheOptions
from flatout.data.operations import Window
from flatout.data.pipelines import INTERCEPTION

CPU = torch.device("cpu")


def test_a_counterpart_is_returned_once():
    device_copies, host = DeviceCopies(), torch.arange(4.0)
    device_copies.offer(host, device_copy := host.clone(), None)
    assert device_copies.take(host, CPU) is device_copy
    assert device_copies.take(host, CPU) is None


def test_a_tensor_that_was_changed_has_no_counterpart():
    device_copies, host = DeviceCopies(), torch.arange(4.0)
    device_copies.offer(host, host.clone(), None)
    host.add_(1)
    assert device_copies.take(host, CPU) is None


def test_another_device_or_another_tensor_has_no_counterpart():
    device_copies, host = DeviceCopies(), torch.arange(4.0)
    device_copies.offer(host, host.clone(), None)
    assert device_copies.take(host.clone(), CPU) is None
    assert device_copies.take(host, torch.device("meta")) is None


def test_counterparts_keep_no_batch_alive_and_are_few():
    device_copies, host = DeviceCopies(), torch.zeros(2)
    gone = weakref.ref(host)
    device_copies.offer(host, torch.zeros(2), None)
    del host
    gc.collect()
    assert gone() is None
    kept = [torch.zeros(1) for _ in range(MAX_COPIES + 5)]
    for each in kept:
        device_copies.offer(each, each.clone(), None)
    assert [device_copies.take(each, CPU) is None for each in kept].count(True) == 5


def test_copies_have_the_original_values():
    lane, tensor = CopyStream(CPU), torch.arange(6).view(2, 3)
    with lane.open():
        there = lane.to_device(tensor)
    assert lane.record_event() is None
    assert torch.equal(there, tensor)
    assert there.data_ptr() != tensor.data_ptr()


@pytest.mark.processes
@pytest.mark.parametrize("depth", [0, 1, 2, 50])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_taken_ahead_and_come_in_order(depth, workers):
    """The requested number of batches once their device is known, all of them, and again in the next epoch.

    Each tensor's counterpart is its own.
    """
    loader = DataLoader(
        TensorDataset(torch.arange(20.0).view(20, 1), torch.arange(20)),
        batch_size=4,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    plain = list(loader)
    for _ in range(2):
        device_copies, iterator = DeviceCopies(), iter(loader)
        iterator._next_data = DevicePrefetcher(iterator, depth, device_copies)
        found, handed_out = [], 0
        for images, labels in iterator:
            device_copy = device_copies.take(images, CPU)
            handed_out += device_copy is not None
            assert device_copy is None or torch.equal(device_copy, images)
            assert device_copies.take(labels, torch.device("meta")) is None
            found.append([images, labels])
        assert handed_out == len(plain) - 1  # the device of the first one is unknown
        assert all(
            torch.equal(a, b) for x, y in zip(plain, found, strict=True) for a, b in zip(x, y, strict=True)
        )
        if workers:
            del iterator._next_data  # a persistent iterator is the same one in the next epoch


class Ends(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 9:
            raise OSError("the file of sample 9 is damaged")
        return torch.tensor([float(index)])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_a_batch_comes_after_the_batches_before_it(workers):
    def epoch(ahead):
        iterator, found = iter(DataLoader(Ends(), batch_size=2, num_workers=workers)), []
        if ahead:
            targets = {0: CPU}  # known, so batches are taken ahead from the start
            iterator._next_data = DevicePrefetcher(iterator, 3, DeviceCopies(), targets)
        with pytest.raises(OSError, match="sample 9 is damaged"):
            found.extend(batch.flatten().tolist() for batch in iterator)
        return found

    assert epoch(ahead=True) == epoch(ahead=False) == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Drawn(Dataset):
    def __init__(self, draws):
        self.draws = draws

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item() if self.draws else 0.0])


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("depth", [0, 2])
def test_the_programs_random_numbers_keep_their_order(depth, ahead, draws):
    """Without workers only a thread takes a batch ahead, and its batches use no random numbers.

    Each is copied before the program asks for it.
    """

    def epoch(fed):
        torch.manual_seed(0)
        loader, device_copies, found, there = (
            DataLoader(Drawn(draws), batch_size=4, shuffle=True),
            DeviceCopies(),
            [],
            0,
        )
        feed, iterator = Feed(loader), iter(loader)
        if fed:
            feed.ahead, feed.prefetch = ahead, (depth, device_copies)
            iterator._dataset_fetcher.dataset, iterator._dataset_fetcher.collate_fn = (
                feed.begin(iterator),
                feed.collate,
            )
        for batch in iterator:
            there += device_copies.take(batch, CPU) is not None
            found.append([*batch.flatten().tolist(), torch.rand(()).item()])
        return found, there

    plain, _ = epoch(fed=False)
    fed, there = epoch(fed=True)
    assert fed == plain
    assert there == len(plain) - 1


def test_an_iterator_that_is_left_early_is_released():
    loader = DataLoader(TensorDataset(torch.zeros(20, 1)), batch_size=4)
    iterator = iter(loader)
    iterator._next_data = DevicePrefetcher(iterator, 2, DeviceCopies())
    next(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


class Images(Dataset):
    def __init__(self, transform, count=24):
        self.data = np.random.default_rng(0).integers(0, 256, (count, 12, 10, 3), dtype=np.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.data[index])), {"label": index % 3}


PIPELINE = [
    transforms.RandomCrop(10, padding=2),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize((0.5,) * 3, (0.2,) * 3),
]


def fed(dataset, resident):
    ledger = Ledger()
    INTERCEPTION.enable(ledger)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    feed = Feed(loader)
    feed.batched, feed.cache, feed.resident = True, CacheOptions(CacheBudget(2**24), eager=True), resident
    info = []
    feed.listeners["keep"] = info.append
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        iterator = iter(loader)
        iterator._dataset_fetcher.dataset, iterator._dataset_fetcher.collate_fn = (
            feed.begin(iterator),
            feed.collate,
        )
        found += list(iterator)
    ledger.restore()
    return found, torch.get_rng_state(), info


def plain(dataset):
    torch.manual_seed(3)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    return [batch for _ in range(2) for batch in loader], torch.get_rng_state()


def same(a, b):
    return all(
        torch.equal(x, y) and x.stride() == y.stride()
        for one, other in zip(a, b, strict=True)
        for x, y in zip(host_tensors(one), host_tensors(other), strict=True)
    )


@pytest.mark.parametrize("beside", [False, True])
def test_batches_made_on_the_device_are_the_plain_ones(beside):
    dataset, device_copies = Images(transforms.Compose(PIPELINE)), DeviceCopies()
    found, end, info = fed(dataset, ResidentDevice(CPU, beside))
    expected, expected_end = plain(dataset)
    assert info == []
    for host in (found[-1][0], found[-1][1]["label"]):
        assert is_deferred(host)  # not copied to the host yet
        assert host.shape[0] == 4
        device_copy = device_copies.take(host, CPU)
        assert is_deferred(host)
        kept = device_copy.clone()
        device_copy.zero_()  # the script may write to it
        assert torch.equal(kept, host)
        assert type(host) is torch.Tensor
    assert same(found, expected)
    assert torch.equal(end, expected_end)


def test_a_deferred_batch_is_pinned_without_a_copy():
    host = ResidentDevice(CPU).to_host(torch.arange(3.0))
    assert not host.is_pinned()
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert is_deferred(host)
    assert is_deferred(pinned)
    assert torch.equal(DeviceCopies().take(pinned, CPU), torch.arange(3.0))
    assert DeviceCopies().take(host, torch.device("meta")) is None
    assert torch.stack([host, host]).tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("drawn", range(6))
def test_windows_are_gathered_on_a_device_as_they_are_copied_on_the_host(drawn):
    generator = torch.Generator().manual_seed(drawn)
    height, width = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    images = torch.randint(256, (5, 3, height + drawn % 3, width + drawn % 2), generator=generator)
    window = Window(height, width)
    numbers = draw_columns((Integer(1 + drawn % 3), Integer(1 + drawn % 2), Uniform()), 5, generator)
    for top, left, uniform in itertools.product(*((None, column) for column in numbers)):
        flipped = None if uniform is None else uniform < 0.5
        assert torch.equal(
            window.gather(images, top, left, flipped), window.copies(images, top, left, flipped)
        )


def test_columns_are_sent_in_one_copy():
    integers, floats = torch.arange(3), torch.tensor([0.1, -0.0, 2.5])
    found = CopyStream(CPU).send([[integers], [floats, "an image's own numbers"], []])
    assert torch.equal(found[0][0], integers)
    assert same_bits(found[1][0], floats)
    assert found[1][1:] == ["an image's own numbers"]


def test_data_that_needs_single_samples_stays_on_the_host():
    dataset = Images(transforms.Compose([transforms.RandomChoice([transforms.Pad(0)]), *PIPELINE]))
    found, end, info = fed(dataset, ResidentDevice(CPU))
    expected, expected_end = plain(dataset)
    assert same(found, expected)
    assert torch.equal(end, expected_end)
    assert any("not all of it can be on the device" in sentence for sentence in info)


def test_values_that_name_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of("cuda") == torch.device("cuda", 1)
    assert (
        device_of("cuda:0") == device_of(0) == device_of(torch.device("cuda", 0)) == torch.device("cuda", 0)
    )
    assert [
        device_of(each) for each in ("cpu", torch.float32, None, True, "nonsense", torch.device("cpu"))
    ] == [None] * 6


def test_moves_to_a_cuda_device_alone_are_intercepted():
    seen, ledger, host = [], Ledger(), torch.ones(2)

    def instead(tensor, device, kwargs):
        seen.append((device.index, "non_blocking" in kwargs))
        return tensor

    intercept_moves(instead, ledger)
    try:
        assert host.to("cuda:1") is host
        assert host.to(device=torch.device("cuda", 2), non_blocking=True) is host
        assert host.cuda(3) is host
        assert host.to("cpu") is host
        assert host.to(torch.float64).dtype == torch.float64
    finally:
        ledger.restore()
    assert seen == [(1, False), (2, True), (3, False)]
