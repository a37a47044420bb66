"""Serves values from their copies, and checks some of them against torch's own read."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from flatout.levers.early.copies import HostCopies, HostCopy
from flatout.levers.early.names import FLATOUT_FOLDER
from flatout.levers.early.values import ReadValue

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import TrainingContext

Key = tuple[str, Any]  # the moment, and the place: a Name, or a backward pass and the number of its root


class ServedValues:
    """Values that are served from copies."""

    def __init__(self, context: TrainingContext) -> None:
        self.torch, self._context = context.torch, weakref.ref(context)
        self.copies = HostCopies(context.torch)
        self.read_values: dict[Key, ReadValue] = {}
        self._candidates: dict[int, tuple[weakref.ref[Any], Key]] = {}  # address -> a value seen at a moment
        self._learning_until: int | None = None  # the step in which learning ends
        self._passes = 0
        self._disabled = self._reported = False
        self._unsynchronized: set[int] = set()  # streams that reads skipped waiting for

    def _clear(self) -> None:
        self.copies.clear()
        self._candidates.clear()
        self._unsynchronized.clear()

    def _is_cuda_tensor(self, value: Any) -> bool:
        return type(value) is self.torch.Tensor and bool(value.is_cuda)

    def _is_value(self, value: Any) -> bool:
        if (
            not self._is_cuda_tensor(value)
            or value.numel() != 1
            or value.layout != self.torch.strided
            or value.is_complex()
            or value.is_inference()
        ):
            return False
        try:
            return bool(value.data_ptr())
        except RuntimeError:  # it has no memory
            return False

    def _on_async_copy(self, caller: FrameType) -> None:
        """Handle a non-blocking copy to the host: the script may use its next read as the wait."""
        if not caller.f_code.co_filename.startswith(FLATOUT_FOLDER):
            self.copies.clear()

    def _host_value(self, tensor: Tensor) -> Any:
        """The value of this tensor in host memory, in its shape; None if it must be read as before."""
        copy = self.copies.valid_copy(tensor)
        if copy is None:
            self._record_read(tensor)
            return None
        read_value = self.read_values.get(copy.key)
        if read_value is None or self.copies.current_stream(tensor.get_device()) != copy.stream:
            return None
        copy.wait()
        read_value.reads, read_value.unread = read_value.reads + 1, 0
        if read_value.reads & (read_value.reads - 1) == 0 and not self._matches_device(tensor, copy):
            return None
        self._unsynchronized.add(copy.stream)
        return copy.host if tensor.shape == copy.host.shape else copy.host.reshape(tensor.shape)

    def _record_read(self, tensor: Tensor) -> None:
        """Record that the script reads a value that existed at one of the moments."""
        if not self._candidates or tensor.numel() != 1:
            return
        candidate = self._candidates.get(tensor.data_ptr())
        if (
            candidate is not None
            and (original := candidate[0]()) is not None
            and original.dtype == tensor.dtype
        ):
            self.read_values.setdefault(candidate[1], ReadValue())

    def _matches_device(self, tensor: Tensor, copy: HostCopy) -> bool:
        """Whether the device still holds the copied value.

        It uses torch's own methods, so hooks that record the script's reads do not record this one.
        """
        methods = self.torch._C.TensorBase
        both_bytes = [
            methods.view(methods.reshape(methods.detach(bits), (1,)), self.torch.uint8)
            for bits in (methods.cpu(tensor), copy.host)
        ]
        if methods.tolist(both_bytes[0]) == methods.tolist(both_bytes[1]):
            return True
        del self.read_values[copy.key]
        self._report(
            "a value is written between its computation and its read in a way that torch does not count, so it is read as before"
        )
        return False

    def _give_up(self, why: str) -> None:
        self._disabled = True
        self.read_values.clear()
        self._clear()
        self._report(why)

    def _report(self, why: str) -> None:
        context = self._context()
        if not self._reported and context is not None:
            self._reported = True
            context.report("early_values", why)
