"""Serves values from their copies, and checks some of them against torch's own read."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from flatout.levers.early.copies import HostCopies, HostCopy
from flatout.levers.early.names import HOME
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
        self.wanted: dict[Key, ReadValue] = {}
        self._seen: dict[int, tuple[weakref.ref[Any], Key]] = {}  # address -> a value seen at a moment
        self._until: int | None = None  # the step in which learning ends
        self._passes = 0
        self._off = self._said = False
        self._owed: set[int] = set()  # streams that reads skipped waiting for

    def _forget(self) -> None:
        self.copies.clear()
        self._seen.clear()
        self._owed.clear()

    def _is_on_a_card(self, thing: Any) -> bool:
        return type(thing) is self.torch.Tensor and bool(thing.is_cuda)

    def _is_value(self, thing: Any) -> bool:
        if (
            not self._is_on_a_card(thing)
            or thing.numel() != 1
            or thing.layout != self.torch.strided
            or thing.is_complex()
            or thing.is_inference()
        ):
            return False
        try:
            return bool(thing.data_ptr())
        except RuntimeError:  # it has no memory
            return False

    def _waits_by_itself(self, caller: FrameType) -> None:
        """Handle a non-blocking copy to the host: the script may use its next read as the wait."""
        if not caller.f_code.co_filename.startswith(HOME):
            self.copies.clear()

    def _host(self, tensor: Tensor) -> Any:
        """The value of this tensor in host memory, in its shape; None if it must be read as before."""
        copy = self.copies.of(tensor)
        if copy is None:
            self._learn(tensor)
            return None
        wanted = self.wanted.get(copy.key)
        if wanted is None or self.copies.current(tensor.get_device()) != copy.stream:
            return None
        copy.wait()
        wanted.reads, wanted.unread = wanted.reads + 1, 0
        if wanted.reads & (wanted.reads - 1) == 0 and not self._is_right(tensor, copy):
            return None
        self._owed.add(copy.stream)
        return copy.host if tensor.shape == copy.host.shape else copy.host.reshape(tensor.shape)

    def _learn(self, tensor: Tensor) -> None:
        """Record that the script reads a value that existed at one of the moments."""
        if not self._seen or tensor.numel() != 1:
            return
        noted = self._seen.get(tensor.data_ptr())
        if noted is not None and (original := noted[0]()) is not None and original.dtype == tensor.dtype:
            self.wanted.setdefault(noted[1], ReadValue())

    def _is_right(self, tensor: Tensor, copy: HostCopy) -> bool:
        """Whether the device still holds the copied value.

        It uses torch's own methods, so hooks that record the script's reads do not record this one.
        """
        methods = self.torch._C.TensorBase
        bits = [
            methods.view(methods.reshape(methods.detach(each), (1,)), self.torch.uint8)
            for each in (methods.cpu(tensor), copy.host)
        ]
        if methods.tolist(bits[0]) == methods.tolist(bits[1]):
            return True
        del self.wanted[copy.key]
        self._say(
            "a value is written between its computation and its read in a way that torch does not count, so it is read as before"
        )
        return False

    def _leave(self, why: str) -> None:
        self._off = True
        self.wanted.clear()
        self._forget()
        self._say(why)

    def _say(self, why: str) -> None:
        context = self._context()
        if not self._said and context is not None:
            self._said = True
            context.report("early_values", why)
