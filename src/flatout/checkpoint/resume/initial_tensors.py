"""The tensors that existed when training began."""

from __future__ import annotations

import gc
import sys
import zlib
from typing import TYPE_CHECKING, Any

import torch

from flatout.checkpoint.resume.reachable_state import ReachableState
from flatout.checkpoint.tensors import memory_of

if TYPE_CHECKING:
    from torch import Tensor


class InitialTensors:
    """The tensors that existed when training began."""

    def __init__(self, reachable: ReachableState, everything: bool) -> None:
        """``everything``: include tensors that no variable leads to."""
        tensors = {
            id(tensor): tensor
            for tensor in (*reachable.tensors.values(), *(living_tensors() if everything else ()))
        }
        lazy = torch.nn.parameter.is_lazy
        self._versions = {
            key: (tensor, tensor._version)
            for key, tensor in tensors.items()
            if not lazy(tensor) and not tensor.is_inference()
        }
        self._digests: dict[tuple[int, int], int] = {}

    def drop_unused(self) -> None:
        """Drop tensors that nothing else holds any more."""
        for key in list(self._versions):
            if sys.getrefcount(self._versions[key][0]) <= 2:  # the tuple and the call
                del self._versions[key]

    def untrack(self, tensor: Tensor) -> None:
        """Stop tracking a tensor: it has been replaced."""
        self._versions.pop(id(tensor), None)

    def unchanged(self, tensor: Tensor) -> bool:
        entry = self._versions.get(id(tensor))
        return (
            entry is not None
            and entry[0] is tensor
            and not tensor.is_inference()
            and tensor._version == entry[1]
        )

    def digest(self, tensor: Tensor, from_scratch: bool) -> int:
        """Return a digest of the bytes. Without ``from_scratch``, it is the cached digest and a sample of the bytes."""
        key = id(tensor), tensor._version
        digest = self._digests.get(key)
        if digest is None or from_scratch:
            digest = self._digests[key] = digest_of(tensor)
        return zlib.crc32(sample_bytes(tensor), digest)


def living_tensors() -> list[Any]:
    """Return all tensors known to Python's garbage collector."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def digest_of(tensor: Tensor) -> int:
    host = tensor.detach().cpu().contiguous()
    return zlib.crc32(memory_of(host))


def bytes_of(tensor: Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    return bytes(memory_of(host))


def sample_bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    return bytes_of(flat[:: max(1, flat.numel() // 1024)])
