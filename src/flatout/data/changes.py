"""Detects that the script changes its data or transforms while samples are kept or transforms are batched.

Attributes are compared by identity, tensors by their version counter, and lists, dictionaries and arrays by
their contents. Small ones are compared before every batch, large ones at the start of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatout.data.batch_comparison import is_equal

SMALL_LENGTH = 2048  # largest number of list entries compared before every batch
SMALL_BYTES = 2**16
MAX_DIGEST_BYTES = 2**32  # most bytes read at the start of an epoch
MAX_DEPTH = 6
MAX_OBJECTS = 256
MAX_ENTRIES = 64  # entries of longer lists are data
LIBRARIES = [
    "torch",
    "torchvision",
    "numpy",
    "PIL",
    "albumentations",
    "kornia",
    "datasets",
    "pyarrow",
    "cv2",
    "builtins",
    "typing",
    "functools",
]


class TransformState:
    """The attributes of transforms, nested transforms and lists; of containers, only the direct entries."""

    def __init__(self, transforms: Iterable[Any], containers: Iterable[Any] = ()) -> None:
        self._recorded: dict[int, tuple[Any, list[Any]]] = {
            id(container): (container, _members(container)) for container in containers
        }
        self._copies: list[Any] = [container.copy() for container in containers]  # so that no id is reused
        for transform in transforms:
            self._record(transform, 0)

    def _record(self, thing: Any, depth: int) -> None:
        container = (
            thing
            if type(thing) in (list, dict)
            else getattr(thing, "__dict__", None)
            if not isinstance(thing, (type, Tensor))
            else None
        )
        if container is None or id(container) in self._recorded or depth > MAX_DEPTH:
            return
        self._recorded[id(container)] = container, _members(container)
        self._copies.append(container.copy())
        for value in container.values() if isinstance(container, dict) else container:
            self._record(value, depth + 1)

    def changed(self) -> bool:
        return any(
            (container or members) and _members(container) != members
            for container, members in self._recorded.values()
        )


def _members(container: list[Any] | dict[Any, Any]) -> list[Any]:
    return (
        [*container, *map(id, container.values())] if isinstance(container, dict) else [*map(id, container)]
    )


class DatasetState:
    """The attributes of a data set and of the program's objects in it.

    Includes the contents of the lists, dictionaries, tensors and arrays that they hold.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._budget_bytes = MAX_DIGEST_BYTES
        self._large = [(thing, self._digest(thing)) for thing in _data_in(dataset) if not _is_small(thing)]
        self.record()

    def record(self) -> None:
        """Record the attributes and the small objects as they are now."""
        self._budget_bytes = MAX_DIGEST_BYTES
        self._attributes = [
            (attributes, _members(attributes), attributes.copy())
            for attributes in _attributes_of(self._dataset)
        ]
        self._small = [(thing, self._digest(thing)) for thing in _data_in(self._dataset) if _is_small(thing)]

    def changed(self, thoroughly: bool = False) -> bool:
        self._budget_bytes = MAX_DIGEST_BYTES
        if any(_members(attributes) != recorded for attributes, recorded, _ in self._attributes):
            return True
        return not all(
            is_equal(self._digest(thing), recorded)
            for thing, recorded in (*self._small, *(self._large if thoroughly else ()))
        )

    def _digest(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return (
                thing._version,
                thing.data_ptr(),
                *(self._block_sums(thing.detach().contiguous()) if thing.device.type == "cpu" else ()),
            )
        if isinstance(thing, (list, dict)):
            parts = thing.values() if isinstance(thing, dict) else thing
            first = next(iter(parts), None)
            if isinstance(first, Tensor):
                return thing.copy(), [part._version if isinstance(part, Tensor) else 0 for part in parts]
            if type(first) in (list, dict):
                return thing.copy(), [part.copy() if type(part) in (list, dict) else part for part in parts]
            return (thing.copy(),)
        import numpy

        if thing.dtype.hasobject:
            return (thing.tolist(),)
        return (
            thing.ctypes.data,
            *self._block_sums(torch.from_numpy(numpy.ascontiguousarray(thing).reshape(-1).view(numpy.uint8))),
        )

    def _block_sums(self, tensor: Tensor) -> tuple[Any, ...]:
        size = tensor.numel() * tensor.element_size()
        if size > self._budget_bytes or tensor.layout != torch.strided or tensor.is_quantized:
            return ()
        self._budget_bytes -= size
        # one element may have any stride
        octets = tensor.reshape(-1).unsqueeze(-1).view(torch.uint8).flatten()
        whole = len(octets) // 2048 * 2048
        remainder = octets[whole:].tolist()
        if octets.storage_offset() % 8:
            return octets[:whole].view(-1, 2048).sum(1).tolist(), remainder
        return octets[:whole].view(torch.int64).view(-1, 256).sum(1).tolist(), remainder


def _attributes_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    queue = [(dataset, 0)]
    while queue and len(seen) < MAX_OBJECTS:
        thing, depth = queue.pop(0)
        if id(thing) in seen or depth > MAX_DEPTH:
            continue
        seen.add(id(thing))
        if type(thing) in (list, tuple):
            queue += [(part, depth + 1) for part in thing[:MAX_ENTRIES]]
        elif isinstance(thing, FunctionType):
            queue += [(cell.cell_contents, depth + 1) for cell in thing.__closure__ or () if _is_filled(cell)]
        elif (
            depth == 0
            or isinstance(thing, Dataset)
            or type(thing).__module__.partition(".")[0] not in LIBRARIES
        ):
            attributes = getattr(thing, "__dict__", None)
            if attributes is not None and not isinstance(thing, (type, ModuleType)):
                yield attributes
                queue += [(value, depth + 1) for value in list(attributes.values())]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _data_in(dataset: Dataset) -> Iterator[Any]:
    if isinstance(dataset, (list, dict)):
        yield dataset
    for held in _attributes_of(dataset):
        for value in held.values():
            for part in value[:64] if type(value) is tuple else (value,):
                if type(part) in (list, dict) or isinstance(part, Tensor) or _is_array(part):
                    yield part


def _is_array(value: object) -> bool:
    # a memory-mapped file is not read
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_small(thing: Any) -> bool:
    if isinstance(thing, (list, dict)):
        return len(thing) <= SMALL_LENGTH
    return (
        thing.numel() * thing.element_size() if isinstance(thing, Tensor) else thing.nbytes
    ) <= SMALL_BYTES
