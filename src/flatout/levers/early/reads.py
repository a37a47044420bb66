"""Learn in the first steps which values a script reads, and serve later reads from copies.

Two moments matter, because much work is queued then: a backward pass begins, or an optimizer steps. A later
read of a value that exists at that moment need not wait for this work. In the first two steps, every
one-element value is recorded at these moments: the roots of the backward pass, and the values of the script's
variables. After that, only values that were read are copied.

Reads number 1, 2, 4, 8, ... of each value also run as torch's own read. A difference shows a write that torch
does not count (``tensor.data``); such a value is left alone.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from flatout.levers.early.copies import HostCopies, HostCopy

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext

MAX_ITEMS = 32  # longer lists hold data
FLATOUT_FOLDER = str(Path(__file__).resolve().parents[2]) + os.sep
# Function, variable, key or index inside it; None for the variable itself.
ScriptName = tuple[CodeType, str, Any]
Variables = Callable[[FrameType], Mapping[str, Any]]
READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
LEARNING_STEPS = 2
MAX_PASSES = 1024  # backward passes to learn from
MAX_UNREAD_COPIES = 16  # these end the copying of a value
BACKWARD, UPDATE = "backward", "update"  # the moments
# In names of collectives, whose writes torch does not count.
COLLECTIVES = re.compile("reduce|broadcast|gather|scatter|all_?to_?all|recv")
# The moment, and the place: a ScriptName, or a backward pass and the number of its root.
Key = tuple[str, Any]


@dataclass
class ReadValue:
    """A value that the script reads."""

    reads: int = 0
    unread: int = 0  # copies since the last read


def is_blocking_cpu_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``tensor.to`` only requests a blocking copy in host memory."""
    if kwargs.keys() - {"device", "non_blocking"} or kwargs.get("non_blocking") or len(args) > 1:
        return False
    return str(args[0] if args else kwargs.get("device")) == "cpu"


class EarlyValueCopier:
    """What is known of one program.

    ``install`` activates it until the ledger is restored, any number of times.
    """

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

    # -- moments

    def install(self, context: TrainingContext, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        torch = self.torch
        ledger.on_restore("values on their way", self._clear)
        ledger.set(torch.autograd, "backward", self._wrap_backward(torch.autograd.backward, context))
        update = register_optimizer_step_pre_hook(
            lambda *_: self._at_moment(UPDATE, context, sys._getframe(1), ())
        )
        ledger.on_restore("optimizer step hook", update.remove)
        for name in READS:
            ledger.set(torch.Tensor, name, self._wrap_read(getattr(torch.Tensor, name)))
        ledger.set(
            torch.Tensor,
            "cpu",
            self._wrap_to_host(torch.Tensor.cpu, lambda args, kwargs: not args and not kwargs),
        )
        ledger.set(torch.Tensor, "to", self._wrap_to_host(torch.Tensor.to, is_blocking_cpu_copy))
        ledger.set(torch.Tensor, "copy_", self._wrap_copy(torch.Tensor.copy_))
        for owner, name in (
            (torch.cuda.Event, "elapsed_time"),
            (torch.cuda.Event, "query"),
            (torch.cuda.Stream, "query"),
        ):
            ledger.set(owner, name, self._wrap_query(getattr(owner, name)))
        ledger.set(torch.cuda, "empty_cache", self._wrap_empty_cache(torch.cuda.empty_cache))
        if torch.distributed.is_available():
            group = torch._C._distributed_c10d.ProcessGroup
            for name in [name for name in vars(group) if COLLECTIVES.search(name)]:
                ledger.set(group, name, self._wrap_collective(getattr(group, name)))

    def _wrap_backward(self, original: Callable[..., Any], context: TrainingContext) -> Callable[..., Any]:
        @wraps(original)
        def backward(roots: Any, *args: object, **kwargs: object) -> Any:
            root_tensors = (
                (roots,)
                if isinstance(roots, self.torch.Tensor)
                else roots
                if isinstance(roots, (list, tuple))
                else ()
            )
            self._at_moment(BACKWARD, context, sys._getframe(1), root_tensors)
            return original(roots, *args, **kwargs)

        return backward

    def _at_moment(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        if self._disabled:
            return
        try:
            learning = self._is_learning(moment, context, roots)
            if learning:
                self._record_candidates(moment, context, frame, roots)
            if self.read_values:
                self._start_copies(moment, context, frame, roots)
        except Exception as error:
            self._give_up(
                f"values are read as before, because of an internal error ({type(error).__name__}: {error})"
            )

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

    def _is_learning(self, moment: str, context: TrainingContext, roots: Iterable[Any]) -> bool:
        self._passes += any(map(self._is_cuda_tensor, roots))
        if self._learning_until is None:
            return self._passes <= MAX_PASSES
        if (
            not self.read_values
            and context.steps > self._learning_until - LEARNING_STEPS
            and (moment == UPDATE or not context.optimizers)
        ):
            self._report(
                "the program reads no value regularly that existed before the backward pass or update that the read waits for"
            )
        if context.steps >= self._learning_until or self._passes > MAX_PASSES:
            self._candidates.clear()
            self._disabled = not self.read_values
            return False
        return True

    def _record_candidates(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        for key, value in (*self._roots(context, frame, roots), *self._named(context, frame)):
            address, candidate = value.data_ptr(), self._candidates.get(value.data_ptr())
            if candidate is None or candidate[0]() is None:
                self._candidates[address] = weakref.ref(value), (moment, key)
        if self._learning_until is None and self._candidates:
            self._learning_until = context.steps + LEARNING_STEPS

    def _roots(
        self, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """The roots of a backward pass, and their values before a GradScaler.

        The key is the place in the script that starts the pass.
        """
        caller = next(script_frames(frame), None)
        call_site = (caller.f_code, caller.f_lasti) if caller is not None else None
        for index, root in enumerate(roots):
            for value in (root, context.without_scale(root)):
                if self._is_value(value):
                    yield (call_site, index, value is root), value

    def _named(self, context: TrainingContext, frame: FrameType | None) -> Iterator[tuple[ScriptName, Any]]:
        for script_frame in script_frames(frame):
            yield from tensors(script_frame, context.variables_of, self._is_value)

    def _start_copies(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        names: dict[CodeType, dict[ScriptName, Any]] = {}
        for key_moment, key in list(self.read_values):
            if key_moment == moment and isinstance(key[0], CodeType):
                names.setdefault(key[0], {})[key] = None
        values = [*self._roots(context, frame, roots)] if roots else []
        for script_frame in script_frames(frame) if names else ():
            values += values_of(script_frame, names, context.variables_of)
        chosen: dict[int, tuple[Key, Any]] = {}
        for place, value in values:
            read_value = self.read_values.get((moment, place))
            if read_value is None or not self._is_value(value):
                continue
            read_value.unread += 1
            if read_value.unread > MAX_UNREAD_COPIES:
                del self.read_values[moment, place]
            chosen.setdefault(value.data_ptr(), ((moment, place), value))
        self.copies.begin(chosen.values())

    # -- reads

    def _wrap_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tensor_class, by_address, candidates = self.torch.Tensor, self.copies.by_address, self._candidates

        @wraps(original)
        def read(tensor: Tensor, *args: object) -> Any:
            if (by_address or candidates) and type(tensor) is tensor_class and tensor.is_cuda:
                host = self._host_value(tensor)
                if host is not None:
                    return original(host, *args)
            return original(tensor, *args)

        return read

    def _wrap_to_host(
        self, original: Callable[..., Any], is_host_copy: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    ) -> Callable[..., Any]:
        """Wrap a method that may return a host tensor, detached from the graph and not pinned."""
        tensor_class = self.torch.Tensor

        @wraps(original)
        def read(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if (
                type(tensor) is not tensor_class
                or not tensor.is_cuda
                or not (self.copies.by_address or self._candidates)
            ):
                return original(tensor, *args, **kwargs)
            if is_host_copy(args, kwargs) and not (tensor.requires_grad and self.torch.is_grad_enabled()):
                host = self._host_value(tensor)
                if host is not None:
                    return host.clone()
            result = original(tensor, *args, **kwargs)
            if not result.is_cuda and (kwargs.get("non_blocking") or any(arg is True for arg in args)):
                self._on_async_copy(sys._getframe(1))
            return result

        return read

    def _wrap_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def copy(tensor: Tensor, source: Tensor, *args: object, **kwargs: object) -> Any:
            if (
                self.copies.by_address
                and (args or kwargs)
                and not tensor.is_cuda
                and getattr(source, "is_cuda", False)
            ):
                self._on_async_copy(sys._getframe(1))
            return original(tensor, source, *args, **kwargs)

        return copy

    def _host_value(self, tensor: Tensor) -> Any:
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

    # -- skipped waits

    def _on_async_copy(self, caller: FrameType) -> None:
        """Handle a non-blocking copy to the host: the script may use its next read as the wait."""
        if not caller.f_code.co_filename.startswith(FLATOUT_FOLDER):
            self.copies.clear()

    def _wrap_query(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wait first for the skipped streams: a script may use a read as a wait and then query its events."""

        @wraps(original)
        def query(*args: object, **kwargs: object) -> Any:
            while self._unsynchronized:
                self.copies.streams[self._unsynchronized.pop()].synchronize()
            return original(*args, **kwargs)

        return query

    def _wrap_empty_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def empty_cache() -> None:
            self.copies.segments.clear()
            original()

        return empty_cache

    def _wrap_collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from flatout.kernels.graph_recording import tensors_of

        @wraps(original)
        def collective(*args: object, **kwargs: object) -> Any:
            if self.copies.by_address:
                self.copies.drop_overwritten(tensors_of((args[1:], kwargs)))
            return original(*args, **kwargs)

        return collective


# -- where a script keeps its values: variables, and the containers and ``self`` that they name


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of the script and its libraries from ``frame`` outwards, without those of torch and flatout."""
    while frame is not None:
        if not _is_torchs_or_ours(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_torchs_or_ours(filename: str) -> bool:
    return filename.startswith((FLATOUT_FOLDER, "<frozen")) or any(
        f"{os.sep}{folder}{os.sep}torch{os.sep}" in filename for folder in ("site-packages", "dist-packages")
    )


def tensors(
    frame: FrameType, variables_of: Variables, is_value: Callable[[Any], bool]
) -> Iterator[tuple[ScriptName, Any]]:
    """All values in the function's variables for which ``is_value`` is true."""
    for variable, value in list(_variables(frame, variables_of).items()):
        if is_value(value):
            yield (frame.f_code, variable, None), value
            continue
        for key, item in _items_of(variable, value):
            if is_value(item):
                yield (frame.f_code, variable, key), item


def values_of(
    frame: FrameType, names: Mapping[CodeType, Mapping[ScriptName, Any]], variables_of: Variables
) -> Iterator[tuple[ScriptName, Any]]:
    """The present values of these names in the function."""
    wanted_names = names.get(frame.f_code)
    if not wanted_names:
        return
    variables = _variables(frame, variables_of)
    for name in wanted_names:
        _, variable, key = name
        value = variables.get(variable)
        yield name, value if key is None else dict(_items_of(variable, value)).get(key)


def _variables(frame: FrameType, variables_of: Variables) -> Mapping[str, Any]:
    return variables_of(frame) if frame.f_code.co_flags & inspect.CO_OPTIMIZED else frame.f_locals


def _items_of(variable: str, value: Any) -> list[tuple[Any, Any]]:
    if variable == "self":
        return list(getattr(value, "__dict__", {}).items())
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return list(dict.items(value))
    return list(enumerate(value)) if type(value) in (list, tuple) and len(value) <= MAX_ITEMS else []
