"""The host's share of making a batch on a card: time, operators, and waits per batch.

The chain is the tutorial's: RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor, Normalize, on resident
images of CIFAR-10's size. Run it on a GPU, or on stand-in cards:
``python bench/gpu/stand_in --waits waits.txt python bench/gpu/data_path.py``. On stand-in cards the host also
computes what a GPU would compute. With ``stand_in --empty-kernels``, its time is that of torch's code for CUDA
without the driver; values are then meaningless and not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter

import numpy as np
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from flatout.agent.ledger import Ledger
from flatout.data import feed as feed_module
from flatout.data import store as store_module
from flatout.data.device import DeviceCopies, ResidentDevice, return_device_copies
from flatout.data.feed import Feed
from flatout.data.keeping import CacheBudget, CacheOptions
from flatout.data.pipelines import INTERCEPTION

WARM_BATCHES = 80  # samples are fetched again in each of the first 64


class Images(Dataset):
    def __init__(self, count: int, transform) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        self.targets = [index % 10 for index in range(count)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


class Operators(TorchDispatchMode):
    """Counts operators: those that launch work on the device, and those on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.host, self.views = Counter(), Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [
            value
            for value in torch.utils._pytree.tree_leaves((args, kwargs, result))
            if isinstance(value, torch.Tensor)
        ]
        if func.is_view or func is torch.ops.aten.detach.default:
            self.views += 1
        else:
            on_device = any(tensor.device.type != "cpu" for tensor in tensors)
            (self.device if on_device else self.host)[str(func)] += 1
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    if os.environ.get("CUDA_STAND_IN_EMPTY_KERNELS"):
        feed_module.difference = lambda *_: ""
        store_module.same_bits = lambda *_: True
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    dataset = Images(
        4096,
        transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            ]
        ),
    )
    ledger = Ledger()
    return_device_copies(DeviceCopies(), ledger)
    INTERCEPTION.enable(ledger)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    feed = Feed(loader)
    feed.batched, feed.cache = True, CacheOptions(CacheBudget(2**30), eager=True)
    feed.resident = ResidentDevice(device)

    def batches():
        while True:
            iterator = iter(loader)
            fetcher = iterator._dataset_fetcher
            fetcher.dataset, fetcher.collate_fn = feed.begin(iterator), feed.collate
            yield from iterator

    taken = batches()
    for _ in range(WARM_BATCHES):
        inputs, labels = next(taken)
        inputs, labels = inputs.to(device), labels.to(device)
    times = []
    for _ in range(args.batches):
        start = time.thread_time()
        inputs, labels = next(taken)
        inputs, labels = inputs.to(device), labels.to(device)
        times.append(time.thread_time() - start)
        torch.cuda.synchronize()
    with Operators() as counted:
        for _ in range(args.batches):
            inputs, labels = next(taken)
            inputs, labels = inputs.to(device), labels.to(device)
    if feed.refusal or feed.why_no_cache or not inputs.is_cuda:
        raise SystemExit(f"no batches on the device: {feed.refusal or feed.why_no_cache}")
    times.sort()

    def per(counts: Counter) -> dict[str, float]:
        return {name: round(count / args.batches, 2) for name, count in counts.most_common()}

    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "card": torch.cuda.get_device_name(),
                "batches": args.batches,
                "host_us_min": round(times[0] * 1e6),
                "host_us_median": round(times[len(times) // 2] * 1e6),
                "host_us_p10_p90": [round(times[len(times) * k // 10] * 1e6) for k in (1, 9)],
                "device_operators": round(sum(counted.device.values()) / args.batches, 1),
                "host_operators": round(sum(counted.host.values()) / args.batches, 1),
                "views": round(counted.views / args.batches, 1),
                "device": per(counted.device),
                "host": per(counted.host),
            },
            indent=1,
        )
    )
    ledger.restore()


if __name__ == "__main__":
    main()
