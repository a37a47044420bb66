"""Compare two runs: digests of batches and weights, and the distance between gradients."""

import hashlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from flatout.measure.nests import tensors_in

STATISTICS_SAMPLES = 64  # maximum number of samples per batch
SKETCH_SUMS = 64
ROW = 2**14  # lanes of a digest that share a factor of the row
DEVICE_PART = 2**22  # lanes that a GPU multiplies at once: 32 MiB in 64 bits


def fingerprints(tensors: Iterable[Any], torch: ModuleType) -> list[tuple[str, Any]]:
    """For each tensor its dtype and shape, and a number over all of its bits. The memory layout does not count.

    It is computed on the tensor's device, and nothing waits for it. Integers of up to 32 bits (lanes) are summed
    modulo 2**64 with odd factors, so every device has the same number, and one changed lane always shows.
    Changes of several lanes that share v trailing zero bits (31 for signs alone) go unseen with a probability of
    2**(v - 63). Of a tensor that is sharded over ranks, only this rank's part counts.
    """
    found: list[tuple[str, Any]] = []
    factors: dict[Any, Any] = {}
    with torch.no_grad():
        for tensor in tensors:
            title, lanes = _flat(tensor, torch)
            if lanes is None:
                found.append((title, 0))
                continue
            device, count = lanes.device, ROW + lanes.numel() // ROW + 1
            if len(factors.get(device, ())) < count:
                factors[device] = _odd_factors(count, device, torch)
            found.append((title, _sum(lanes, factors[device], torch)))
    return found


def digest_of(found: Iterable[tuple[str, Any]]) -> str:
    """Sixteen hex digits over `fingerprints`. Waits for the device."""
    hasher = hashlib.blake2b(digest_size=8)
    for title, number in found:
        hasher.update(f"{title}{int(number)}".encode())
    return hasher.hexdigest()


def digest(tensors: Iterable[Any], torch: ModuleType) -> str:
    """Sixteen hex digits over dtype, shape and bits of the tensors, in order."""
    return digest_of(fingerprints(tensors, torch))


def _flat(tensor: Any, torch: ModuleType) -> tuple[str, Any]:
    """Dtype and shape, and the bytes as a row of integers; None for a meta tensor, which has no bytes."""
    flat = getattr(tensor, "_local_tensor", tensor).detach()  # a DTensor
    flat = flat.values() if flat.is_nested else flat
    flat = flat.to_dense() if flat.layout != torch.strided else flat
    title = f"{flat.dtype}{tuple(flat.shape)}"
    if flat.is_meta:
        return title, None
    flat = flat.int_repr() if flat.is_quantized else flat.resolve_conj().resolve_neg()
    lane = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    return title, flat.contiguous().reshape(-1).view(lane)


def _sum(lanes: Any, factors: Any, torch: ModuleType) -> Any:
    # On the host, a part of one row stays in the cache and in one thread; a GPU needs larger ones.
    part = ROW if lanes.is_cpu else DEVICE_PART
    whole = lanes.numel() // ROW * ROW
    parts = lanes[:whole].split(part)
    sums = [(rows.view(-1, ROW) * factors[:ROW]).sum(1) for rows in parts if len(rows)]
    sums.append((lanes[whole:] * factors[: lanes.numel() - whole]).sum(0, keepdim=True))
    of_rows = torch.cat(sums)
    return (of_rows * factors[ROW : ROW + len(of_rows)]).sum()


def _odd_factors(count: int, device: Any, torch: ModuleType) -> Any:
    """The same odd numbers on every device, as mixed as those of SplitMix64."""
    z = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    return ((z ^ (z >> 27)) * -0x6B2FB644ECCEEE15) | 1


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
