"""The form of an image, as a transform sees it, and batches of images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.data.operation import ImageForm, ImageShape

PIL_MODES = ("L", "RGB", "RGBA")


def form_of(image: Any) -> ImageForm | None:
    """The form of an image, or None if its kind is unknown."""
    if isinstance(image, Tensor):
        tv = type(image).__module__.startswith("torchvision.tv_tensors")
        supported = (
            (type(image) is Tensor or (tv and type(image).__name__ == "Image"))
            and image.dim() == 3
            and image.layout == torch.strided
        )
        return (
            ImageForm("tensor", image.dtype, tv=tv)
            if supported and image.device.type == "cpu" and not image.requires_grad
            else None
        )
    if type(image).__module__.split(".")[0] == "PIL":
        return ImageForm("pil", mode=image.mode) if image.mode in PIL_MODES else None
    if type(image).__module__ == "numpy" and type(image).__name__ == "ndarray":
        return ImageForm("numpy") if str(image.dtype) == "uint8" and image.ndim in (2, 3) else None
    return None


def shape_of(image: Any) -> ImageShape:
    """The shape of an image of a known form, without reading its pixels."""
    if isinstance(image, Tensor):
        return ImageShape(*image.shape)
    if hasattr(image, "getbands"):
        return ImageShape(len(image.getbands()), image.height, image.width)
    return ImageShape(1, *image.shape) if image.ndim == 2 else ImageShape(image.shape[2], *image.shape[:2])


def copy_image(image: Any) -> Any:
    """A copy of an image; other values are returned unchanged."""
    if isinstance(image, Tensor):
        return image.clone()
    return image.copy() if hasattr(image, "getbands") or type(image).__name__ == "ndarray" else image


def same_pixels(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return bool(
            torch.equal(torch.nan_to_num(a.as_subclass(Tensor)), torch.nan_to_num(b.as_subclass(Tensor)))
        )
    if hasattr(a, "getbands"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a.tobytes() == b.tobytes()) if type(a).__name__ == "ndarray" else True


def stack(images: Sequence[Any], shape: ImageShape | None = None) -> Tensor:
    """Stack images of one known form and shape to [B, C, H, W], with any strides.

    PIL images may be given as bytes, together with the shape.
    """
    first = images[0]
    if isinstance(first, Tensor):
        return torch.stack([image.as_subclass(Tensor) for image in images])
    if hasattr(first, "getbands"):  # PIL images: bytes cost half as much as arrays
        images, shape = [image.tobytes() for image in images], shape_of(first)
    if shape is not None and isinstance(images[0], bytes):
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        return pixels.view(len(images), shape.height, shape.width, shape.channels).permute(0, 3, 1, 2)
    import numpy

    arrays = torch.from_numpy(numpy.stack(images))
    return arrays.unsqueeze(1) if arrays.dim() == 3 else arrays.permute(0, 3, 1, 2)
