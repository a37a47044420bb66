"""Broken data paths for the guard's test bed: wrong constants, missing or constant transforms."""

from __future__ import annotations

from typing import Any

from guard_tools import around_transforms
from provenance import SRC  # noqa: F401  puts src on the path

from flatout.schema.lever import Undo


def other_constants(context: Any, value: Any, ledger: Any) -> Undo:
    """Normalize with the constants of another data set (CIFAR-10)."""

    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "Normalize":
                one.mean, one.std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        return held

    return around_transforms(context, ledger, change)


def no_augmentation(context: Any, value: Any, ledger: Any) -> Undo:
    """Removes every random transform (a crop with padding becomes no crop)."""
    return around_transforms(
        context,
        ledger,
        lambda held: [t for t in held if not type(t).__name__.startswith(("Random", "ColorJitter"))],
    )


def always_flipped(context: Any, value: Any, ledger: Any) -> Undo:
    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "RandomHorizontalFlip":
                one.p = 1.0
        return held

    return around_transforms(context, ledger, change)


def no_flip(context: Any, value: Any, ledger: Any) -> Undo:
    return around_transforms(
        context, ledger, lambda held: [t for t in held if type(t).__name__ != "RandomHorizontalFlip"]
    )


def same_crop(context: Any, value: Any, ledger: Any) -> Undo:
    """Always crops the corner, like a generator that never advances."""

    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "RandomCrop":
                one.get_params = lambda image, size: (0, 0, *size)
        return held

    return around_transforms(context, ledger, change)


def kept_too_late(context: Any, value: Any, ledger: Any) -> Undo:
    """Caches samples after their random transforms: later epochs repeat the augmentations of the first."""

    class Kept:
        def __init__(self, dataset: Any) -> None:
            self.dataset, self.samples = dataset, {}

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> Any:
            if index not in self.samples:
                self.samples[index] = self.dataset[index]
            return self.samples[index]

    context.change_loaders(lambda dataset, arguments: {**arguments, "dataset": Kept(dataset)}, ledger)
    return ledger.restore
