"""Measures images/s of the ResNet-18 tutorial at 32x32: plain, with the one-liners, under flatout.

Batch 128, SGD, PIL transforms, `.item()` in the loop; 50,000 synthetic images of CIFAR-10's size, without
downloads. torchvision's resnet18(num_classes=10) with its 7x7 stem needs 217.28 MFLOP an image, forward and
backward (FlopCounterMode); the CIFAR variant with a 3x3 stem needs fifteen times as much.
"""

from __future__ import annotations

import argparse

from three_way import Theme, options, run

FLOP_PER_IMAGE = 217.28e6
SMOKE = ("--batch-size", "8", "--images", "3000")


def theme(smoke: bool, args: argparse.Namespace) -> Theme:
    return Theme(
        name="tutorial",
        title="ResNet-18 at 32x32, batch 128: the tutorial, the one-liners, flatout",
        plain="tutorial.py",
        one_liners="tutorial_one_liners.py",
        unit="images",
        per_sample=1,
        batch=8 if smoke else 128,
        flop_per_unit=FLOP_PER_IMAGE,
        formula="217.28 MFLOP an image (forward and backward)",
        arguments=SMOKE if smoke else (),
        one_liner_arguments=("--backend", "aot_eager") if smoke else (),
    )


if __name__ == "__main__":
    raise SystemExit(run(theme, options(__doc__).parse_args()))
