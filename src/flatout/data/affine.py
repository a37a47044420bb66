"""RandomRotation and RandomAffine on a batch, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from flatout.data.draws import Draw, Uniform
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader
from flatout.data.resample import interpolation_of
from flatout.data.warp import PillowWarp, TensorWarp, Warp

Pair = tuple[float, float]


def inverse_map(center: Pair, angle: float, move: Pair, scale: float, shear: Pair, v2: bool) -> list[float]:
    """Return the map from output to input: rotate, scale and shear about a centre, then translate.

    v1 and v2 round in different places.
    """
    turn, shear_x, shear_y = math.radians(angle), math.radians(shear[0]), math.radians(shear[1])
    (x, y), (right, down) = center, move
    cosine, tangent = math.cos(shear_y), math.tan(shear_x)
    a, c = math.cos(turn - shear_y) / cosine, math.sin(turn - shear_y) / cosine
    if v2:
        b, d = -(a * tangent + math.sin(turn)), math.cos(turn) - c * tangent
        back = [d / scale, -b / scale, -c / scale, a / scale]
        return [
            back[0],
            back[1],
            x - back[0] * (x + right) - back[1] * (y + down),
            back[2],
            back[3],
            y - back[2] * (x + right) - back[3] * (y + down),
        ]
    b = -math.cos(turn - shear_y) * tangent / cosine - math.sin(turn)
    d = -math.sin(turn - shear_y) * tangent / cosine + math.cos(turn)
    back = [d / scale, -b / scale, -c / scale, a / scale]
    over, under = (
        back[0] * (-x - right) + back[1] * (-y - down),
        back[2] * (-x - right) + back[3] * (-y - down),
    )
    return [back[0], back[1], over + x, back[2], back[3], under + y]


def pillow_turn(angle: float, center: Pair) -> list[float]:
    """Return the map of Image.rotate, which rounds sine and cosine to 15 decimals."""
    radians = -math.radians(angle)
    a, b, d, e = (
        round(each, 15)
        for each in (math.cos(radians), math.sin(radians), -math.sin(radians), math.cos(radians))
    )
    x, y = center
    return [a, b, a * -x + b * -y + 0.0 + x, d, e, d * -x + e * -y + 0.0 + y]


@dataclass(frozen=True)
class Rotate(BatchOperation):
    """Rotate by a random angle about a given centre or the middle. The size does not change.

    Multiples of 90 degrees about the middle are transposed as in torchvision: 180 degrees always, the others
    if the image is square.
    """

    heavy: ClassVar[bool] = True  # type: ignore[misc]
    warp: Warp
    degrees: Pair
    center: Pair | None
    pil: bool
    v2: bool

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return (Uniform(*self.degrees),)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        height, width = images.shape[2:]
        angles = numbers[0].tolist()
        if self.pil:
            middle = self.center or (width / 2, height / 2)
            maps = [pillow_turn(angle % 360.0, middle) for angle in angles]
        else:
            middle = (
                (self.center[0] - width * 0.5, self.center[1] - height * 0.5) if self.center else (0.0, 0.0)
            )
            maps = [
                inverse_map(
                    middle, -(angle % 360 if self.v2 else angle), (0.0, 0.0), 1.0, (0.0, 0.0), self.v2
                )
                for angle in angles
            ]
        turned = self.warp(images, torch.tensor(maps, dtype=torch.float64))
        if self.center is None and (self.pil or self.v2):
            for row, angle in enumerate(angles):
                quarters, rest = divmod(angle % 360, 90)
                if rest == 0 and (quarters in (0, 2) or height == width):
                    turned[row] = torch.rot90(images[row], int(quarters), (-2, -1))
        return turned


@dataclass(frozen=True)
class Affine(BatchOperation):
    """Rotate, translate, scale and shear by random amounts; a range of None draws nothing."""

    heavy: ClassVar[bool] = True  # type: ignore[misc]
    warp: Warp
    degrees: Pair
    translate: Pair | None  # fractions of width and height
    scale: Pair | None
    shear: tuple[float, ...] | None  # the range along x, and optionally along y
    center: Pair | None
    pil: bool
    v2: bool

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        found = [Uniform(*self.degrees)]
        if self.translate is not None:
            right, down = self.translate[0] * shape.width, self.translate[1] * shape.height
            found += [Uniform(-right, right), Uniform(-down, down)]
        if self.scale is not None:
            found.append(Uniform(*self.scale))
        if self.shear is not None:
            found += [Uniform(*self.shear[at : at + 2]) for at in range(0, len(self.shear), 2)]
        return tuple(found)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        height, width = images.shape[2:]
        left = iter(numbers)
        nothing, one = [0.0] * len(images), [1.0] * len(images)
        angles = next(left).tolist()
        right, down = (next(left).round().tolist() if self.translate else nothing for _ in range(2))
        scales = next(left).tolist() if self.scale else one
        shears = [next(left, None) for _ in range(2)]
        along, upright = (nothing if each is None else each.tolist() for each in shears)
        middle = self.center or (width * 0.5, height * 0.5)
        if not self.pil:
            middle = (middle[0] - width * 0.5, middle[1] - height * 0.5)
        drawn = zip(
            angles, zip(right, down, strict=True), scales, zip(along, upright, strict=True), strict=True
        )
        return self.warp(
            images, torch.tensor([inverse_map(middle, *each, self.v2) for each in drawn], dtype=torch.float64)
        )


def _warp(transform: Module, form: ImageForm, v2: bool) -> Warp:
    name = interpolation_of(transform)
    if name in ("nearest", "bilinear"):
        if form.kind == "pil" and form.mode in ("L", "RGB"):
            fill = _fill(transform, 1 if form.mode == "L" else 3) or (0.0,)
            if all(0 <= int(each) <= 255 for each in fill):
                return PillowWarp(name == "bilinear", tuple(map(int, fill)))
            raise NotBatchable(f"{type(transform).__name__} fills with {transform.fill}, which is not a byte")
        if form.kind == "tensor" and form.dtype in (torch.uint8, torch.float32):
            return TensorWarp(name, _fill(transform), v2)
    raise NotBatchable(
        f"{type(transform).__name__} does not run in batches on {form.mode or form.dtype} images ({form.kind}) with the {name} filter"
    )


def _fill(transform: Module, channels: int | None = None) -> tuple[float, ...] | None:
    given = transform.fill
    if given is None:
        return None
    numbers = (
        (given,)
        if isinstance(given, (int, float))
        else tuple(given)
        if isinstance(given, (list, tuple))
        else ()
    )
    if not numbers or (channels and len(numbers) not in (1, channels)):
        raise NotBatchable(
            f"{type(transform).__name__} fills with {given!r}, which is neither a number nor one number per channel"
        )
    return tuple(map(float, numbers))


def _pair(given: Any) -> Pair | None:
    return None if given is None else (float(given[0]), float(given[1]))


def _rotation(v2: bool) -> Reader:
    def read(transform: Module, form: ImageForm) -> BatchOperation:
        if transform.expand:
            raise NotBatchable("RandomRotation with expand gives every image a different size")
        return Rotate(
            _warp(transform, form, v2),
            (float(transform.degrees[0]), float(transform.degrees[1])),
            _pair(transform.center),
            form.kind == "pil",
            v2,
        )

    return read


def _affine(v2: bool) -> Reader:
    def read(transform: Module, form: ImageForm) -> BatchOperation:
        shear = None if transform.shear is None else tuple(map(float, transform.shear))
        return Affine(
            _warp(transform, form, v2),
            (float(transform.degrees[0]), float(transform.degrees[1])),
            _pair(transform.translate),
            _pair(transform.scale),
            shear,
            _pair(transform.center),
            form.kind == "pil",
            v2,
        )

    return read


READERS: dict[str, Reader] = {
    "v1.RandomRotation": _rotation(False),
    "v2.RandomRotation": _rotation(True),
    "v1.RandomAffine": _affine(False),
    "v2.RandomAffine": _affine(True),
}
