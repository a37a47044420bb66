"""Cases of augment: both layouts, ragged sizes, padding, large crops, one channel, an empty batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatout.kernels.kernel import Case, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# batch, channels, height, width, crop, padding, fill, dtype, layout, channels last
SMALL = [
    (3, 3, 9, 11, (7, 5), 0, 0, F32, "chw", False),
    (4, 3, 8, 8, (8, 8), 2, 0, F32, "hwc", False),
    (2, 3, 6, 5, (6, 5), 1, 7, F32, "chw", True),
    (3, 1, 7, 7, (5, 4), 0, 0, F16, "hwc", True),
    (2, 3, 16, 16, (16, 16), 4, 128, BF16, "hwc", True),
    (2, 4, 5, 6, (3, 3), 0, 0, BF16, "chw", False),
    (0, 3, 8, 8, (8, 8), 0, 0, F32, "chw", False),
    (1, 3, 33, 35, (32, 32), 0, 0, F16, "chw", False),
]
LARGE = [
    (256, 3, 256, 256, (224, 224), 0, 0, BF16, "hwc", True, "gpu"),
    (256, 3, 256, 256, (224, 224), 0, 0, F32, "chw", False, "gpu"),
    (4096, 3, 32, 32, (32, 32), 4, 0, BF16, "chw", True, "gpu"),
    (256, 3, 32, 32, (32, 32), 4, 0, F32, "chw", False, "any"),
]


def cases() -> list[Case]:
    return [*(_case(row) for row in SMALL), *(_case(row, bench) for *row, bench in LARGE)]


def _case(row: Sequence[Any], bench: str = "") -> Case:
    batch, channels, height, width, crop, padding, _, dtype, layout, channels_last = row
    title = f"{batch} of {channels}x{height}x{width} ({layout}) to {crop[0]}x{crop[1]}, padding {padding}, {str(dtype).removeprefix('torch.')}"
    return Case(
        title + (", channels last" if channels_last else ""),
        lambda draw: _inputs(draw, row),
        dtype,
        bench=bench,
    )


def _inputs(draw: torch.Generator, row: Sequence[Any]) -> Inputs:
    batch, channels, height, width, crop, padding, fill, dtype, layout, channels_last = row
    shape = (batch, height, width, channels) if layout == "hwc" else (batch, channels, height, width)
    return {
        "images": torch.randint(256, shape, generator=draw, dtype=torch.uint8),
        "top": torch.randint(height + 2 * padding - crop[0] + 1, (batch,), generator=draw),
        "left": torch.randint(width + 2 * padding - crop[1] + 1, (batch,), generator=draw),
        "flip": torch.rand(batch, generator=draw) < 0.5,
        "size": list(crop),
        "mean": torch.rand(channels, generator=draw),
        "std": 0.2 + 0.1 * torch.rand(channels, generator=draw),
        "padding": padding,
        "fill": fill,
        "dtype": dtype,
        "layout": layout,
        "channels_last": channels_last,
    }
