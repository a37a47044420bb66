"""Compare two runs: digests of batches and weights, and the distance between gradients."""

import ctypes
import hashlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from flatout.measure.nests import tensors_in

STATISTICS_SAMPLES = 64  # maximum number of samples per batch
SKETCH_SUMS = 64


def digest(tensors: Iterable[Any], torch: ModuleType) -> str:
    """Sixteen hex digits over dtype, shape and bytes. The memory layout does not count.

    Of a tensor that is sharded over ranks, only this rank's part counts.
    """
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = getattr(tensor, "_local_tensor", tensor).detach()  # a DTensor
        flat = flat.values() if flat.is_nested else flat
        flat = flat.to_dense() if flat.layout != torch.strided else flat
        flat = flat if flat.is_meta else flat.cpu().contiguous()
        hasher.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        if flat.device.type == "cpu":  # a meta tensor has no bytes
            hasher.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return hasher.hexdigest()


def sketch(tensor: Any, torch: ModuleType) -> list[float]:
    """At most 64 sums of elements with random signs, the same for every tensor of this size.

    The distance of two sketches estimates that of the tensors, and is exact up to 64 elements.
    Source: Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2002.
    """
    flat = tensor.detach().double().cpu().reshape(-1)
    draw = torch.Generator().manual_seed(flat.numel())
    flat = flat * (2 * torch.randint(2, flat.shape, generator=draw, dtype=torch.int8, device="cpu") - 1)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % SKETCH_SUMS)).reshape(-1, SKETCH_SUMS)
    sums: list[float] = rows.sum(0).tolist()
    return sums


def batch_statistics(batch: object, torch: ModuleType) -> list[list[float]]:
    """Four numbers per sample, of the batch's first image-like or vector tensor.

    They are the mean, the deviation, and the differences of means between left and right half and between top
    and bottom half. They detect a wrong constant, a missing flip, a missing crop.
    """
    for tensor in tensors_in(batch):
        if (
            tensor.is_nested
            or tensor.is_meta
            or tensor.dim() < 2
            or not tensor.numel()
            or not (tensor.is_floating_point() or tensor.dtype == torch.uint8)
        ):
            continue
        x = tensor[:STATISTICS_SAMPLES].detach().float().cpu()
        width, height = x.shape[-1], x.shape[-2] if x.dim() > 2 else 1
        flat, zeros = x.reshape(len(x), -1), x.new_zeros(len(x))
        features = [
            flat.mean(1),
            flat.std(1) if flat.shape[1] > 1 else zeros,
            _mean_difference(x[..., : width // 2], x[..., (width + 1) // 2 :]) if width > 1 else zeros,
            _mean_difference(x[..., : height // 2, :], x[..., (height + 1) // 2 :, :])
            if height > 1
            else zeros,
        ]
        return [[float(v) for v in row] for row in torch.stack(features, 1).tolist()]
    return []


def _mean_difference(one: Any, other: Any) -> Any:
    return one.flatten(1).mean(1) - other.flatten(1).mean(1)


def relative_distance(a: list[Any], b: list[Any], torch: ModuleType) -> float:
    """Return ||a - b|| / ||b|| over all tensors together, in float64. ``b`` is the reference.

    The result is infinite if a value is not finite.
    """
    squared_error = squared_norm = 0.0
    for x, y in zip(a, b, strict=True):
        if x is None and y is None:
            continue
        if x is None or y is None:
            x, y = (torch.zeros_like(y) if x is None else x), (torch.zeros_like(x) if y is None else y)
        x, y = x.detach().to(torch.float64), y.detach().to(torch.float64)
        squared_error += float((x - y).square().sum())
        squared_norm += float(y.square().sum())
    if not squared_error < float("inf"):
        return float("inf")
    return (
        (squared_error**0.5) / (squared_norm**0.5)
        if squared_norm > 0
        else (0.0 if squared_error == 0 else float("inf"))
    )
