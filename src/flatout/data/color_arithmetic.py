"""Brightness, contrast, saturation and grey for a batch, with one factor per image.

Three implementations differ in where they round. Images are float32 [B, C, H, W]; byte images hold whole
numbers before and after. Factors are float32 [B].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flatout.data.hue import rotate_byte_hue, rotate_hue
from flatout.data.operations import divide_in_place

MAX_EXACT_SUM = 2**24  # float32 adds whole numbers up to here exactly, in any order


class ColorArithmetic(Protocol):
    """One implementation. Images of one channel keep their saturation and hue."""

    def grey(self, images: Tensor) -> Tensor:
        """Convert [B, 3, H, W] to [B, 1, H, W]."""

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def hue(self, images: Tensor, factors: Tensor) -> Tensor: ...


def _per_image(factors: Tensor) -> Tensor:
    return factors.view(-1, 1, 1, 1)


@dataclass(frozen=True)
class PillowColorArithmetic:
    """Bytes as in Pillow's ImageEnhance: Blend.c interpolates from the degenerate image and truncates."""

    def grey(self, images: Tensor) -> Tensor:
        """Convert as L24 of Convert.c. Its sums stay below 2**24, so float32 is exact."""
        red, green, blue = images.unbind(1)
        sums = red.mul(19595.0).add_(green, alpha=38470.0).add_(blue, alpha=7471.0).add_(0x8000)
        return sums.mul_(2.0**-16).floor_().unsqueeze(1)

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor:
        return images.mul(_per_image(factors)).clamp_(0, 255).floor_()

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor:
        grey = images if images.shape[1] == 1 else self.grey(images)
        count = grey[0].numel()
        # ImageStat divides Python's integers
        mean = divide_in_place(grey.sum(dim=(1, 2, 3), dtype=torch.float64), count).add_(0.5).floor_()
        return self._blend(_per_image(mean.float()), images, factors)

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else self._blend(self.grey(images), images, factors)

    def hue(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else rotate_byte_hue(images, factors)

    def _blend(self, degenerate: Tensor, images: Tensor, factors: Tensor) -> Tensor:
        return images.sub(degenerate).mul_(_per_image(factors)).add_(degenerate).clamp_(0, 255).floor_()


@dataclass(frozen=True)
class TensorColorArithmetic:
    """Tensors as in torchvision's functional. ``is_bytes`` means uint8, which truncates after each step."""

    is_bytes: bool
    v2: bool  # multiplies and adds with one rounding, where v1 rounds twice

    @property
    def max_value(self) -> int:
        return 255 if self.is_bytes else 1

    def grey(self, images: Tensor) -> Tensor:
        red, green, blue = images.unbind(1)
        grey = red.mul(0.2989)
        if self.v2:
            grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)
        else:
            grey.add_(green.mul(0.587)).add_(blue.mul(0.114))
        return self._truncate(grey).unsqueeze(1)

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor:
        return self._truncate(images.mul(_per_image(factors)).clamp_(0, self.max_value))

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor:
        grey = images if images.shape[1] == 1 else self.grey(images)
        if self.is_bytes and grey[0].numel() * 255 <= MAX_EXACT_SUM:
            mean = grey.mean(dim=(1, 2, 3))
        else:  # a sum that rounds is the same only if taken the same way, over one image
            mean = torch.stack([torch.mean(image, dim=(-3, -2, -1)) for image in grey])
        return self._blend(images, _per_image(mean).expand_as(grey), factors)

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else self._blend(images, self.grey(images), factors)

    def hue(self, images: Tensor, factors: Tensor) -> Tensor:
        if images.shape[1] == 1:
            return images
        if not self.is_bytes:
            return rotate_hue(images, factors, self.v2)
        floats = images.mul(1.0 / 255) if self.v2 else divide_in_place(images.clone(), 255)
        return rotate_hue(floats, factors, self.v2).mul_(256.0 - 1e-3).floor_()

    def _blend(self, images: Tensor, degenerate: Tensor, factors: Tensor) -> Tensor:
        blended = images.mul(_per_image(factors))
        rest = 1.0 - factors.double()
        if self.v2:  # torch.add fuses a scalar alpha if the CPU can; hence one call per image
            for row, image, alpha in zip(blended, degenerate, rest.tolist(), strict=True):
                row.add_(image, alpha=alpha)
        else:
            blended.add_(degenerate.mul(_per_image(rest.float())))
        return self._truncate(blended.clamp_(0, self.max_value))

    def _truncate(self, images: Tensor) -> Tensor:
        return images.floor_() if self.is_bytes else images
