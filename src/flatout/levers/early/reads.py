"""Learn in the first steps which values a script reads, and serve later reads from copies.

Two moments matter, because much work is queued then: a backward pass begins, or an optimizer steps. A later
read of a value that exists at that moment need not wait for this work. In the first two steps, every
one-element value is recorded at these moments: the roots of the backward pass, and the values of the script's
variables (``names.py``). After that, only values that were read are copied.

Reads number 1, 2, 4, 8, ... of each value also run as torch's own read. A difference shows a write that torch
does not count (``tensor.data``); such a value is left alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from flatout.levers.early.copies import HostCopies, HostCopy
from flatout.levers.early.names import HOME, Name, named, script_frames, tensors
from flatout.levers.early.values import ReadValue, names_the_host, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
LEARNING_STEPS = 2
MOST_PASSES = 1024  # backward passes after which learning ends in any case
UNREAD = 16  # stop copying a value after this many unread copies in a row
BACKWARD, UPDATE = "backward", "update"  # the moments
WRITES = (
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "alltoall",
    "recv",
)  # in names of collectives, whose writes torch does not count
Key = tuple[str, Any]  # the moment, and the place: a Name, or a backward pass and the number of its root


class EarlyValueCopier:
    """What is known of one program.

    ``install`` activates it until the ledger is restored, any number of times.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.torch, self._context = context.torch, weakref.ref(context)
        self.copies = HostCopies(context.torch)
        self.wanted: dict[Key, ReadValue] = {}
        self._seen: dict[int, tuple[weakref.ref[Any], Key]] = {}  # address -> a value seen at a moment
        self._until: int | None = None  # the step in which learning ends
        self._passes = 0
        self._off = self._said = False
        self._owed: set[int] = set()  # streams that reads skipped waiting for

    # -- moments ---------------------------------------------------------------------------------------------

    def install(self, context: TrainingContext, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        torch = self.torch
        ledger.call("values on their way", self._forget)
        ledger.set(torch.autograd, "backward", self._before_backward(torch.autograd.backward, context))
        update = register_optimizer_step_pre_hook(
            lambda *_: self._moment(UPDATE, context, sys._getframe(1), ())
        )
        ledger.call("optimizer step hook", update.remove)
        for name in READS:
            ledger.set(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))
        ledger.set(
            torch.Tensor, "cpu", self._to_host(torch.Tensor.cpu, lambda args, kwargs: not args and not kwargs)
        )
        ledger.set(torch.Tensor, "to", self._to_host(torch.Tensor.to, names_the_host))
        ledger.set(torch.Tensor, "copy_", self._copying(torch.Tensor.copy_))
        for owner, name in (
            (torch.cuda.Event, "elapsed_time"),
            (torch.cuda.Event, "query"),
            (torch.cuda.Stream, "query"),
        ):
            ledger.set(owner, name, self._after_what_is_owed(getattr(owner, name)))
        ledger.set(torch.cuda, "empty_cache", self._giving_back(torch.cuda.empty_cache))
        if torch.distributed.is_available():
            group = torch._C._distributed_c10d.ProcessGroup
            for name in [name for name in vars(group) if any(word in name for word in WRITES)]:
                ledger.set(group, name, self._exchange(getattr(group, name)))

    def _forget(self) -> None:
        self.copies.clear()
        self._seen.clear()
        self._owed.clear()

    def _before_backward(self, really: Callable[..., Any], context: TrainingContext) -> Callable[..., Any]:
        @wraps(really)
        def backward(roots: Any, *args: object, **kwargs: object) -> Any:
            given = (
                (roots,)
                if isinstance(roots, self.torch.Tensor)
                else roots
                if isinstance(roots, (list, tuple))
                else ()
            )
            self._moment(BACKWARD, context, sys._getframe(1), given)
            return really(roots, *args, **kwargs)

        return backward

    def _moment(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        """Begin copies of the values that exist now and that the script read in earlier steps."""
        if self._off:
            return
        try:
            learning = self._learns(moment, context, roots)
            if learning:
                self._note(moment, context, frame, roots)
            if self.wanted:
                self._begin(moment, context, frame, roots)
        except Exception as error:
            self._leave(
                f"values are read as before, because of an internal error ({type(error).__name__}: {error})"
            )

    def _learns(self, moment: str, context: TrainingContext, roots: Iterable[Any]) -> bool:
        self._passes += any(map(self._is_on_a_card, roots))
        if self._until is None:
            return self._passes <= MOST_PASSES
        if (
            not self.wanted
            and context.steps > self._until - LEARNING_STEPS
            and (moment == UPDATE or not context.optimizers)
        ):
            self._say(
                "the program reads no value regularly that existed before the backward pass or update that the read waits for"
            )
        if context.steps >= self._until or self._passes > MOST_PASSES:
            self._seen.clear()
            self._off = not self.wanted
            return False
        return True

    def _note(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        for key, value in (*self._roots(context, frame, roots), *self._named(context, frame)):
            address, held = value.data_ptr(), self._seen.get(value.data_ptr())
            if held is None or held[0]() is None:
                self._seen[address] = weakref.ref(value), (moment, key)
        if self._until is None and self._seen:
            self._until = context.steps + LEARNING_STEPS

    def _roots(
        self, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """The roots of a backward pass, and their values before a GradScaler.

        The key is the place in the script that starts the pass.
        """
        own = next(script_frames(frame), None)
        place = (own.f_code, own.f_lasti) if own is not None else None
        for at, root in enumerate(roots):
            for each in (root, context.without_scale(root)):
                if self._is_value(each):
                    yield (place, at, each is root), each

    def _named(self, context: TrainingContext, frame: FrameType | None) -> Iterator[tuple[Name, Any]]:
        for each in script_frames(frame):
            yield from tensors(each, context.variables_of, self._is_value)

    def _begin(
        self, moment: str, context: TrainingContext, frame: FrameType | None, roots: Iterable[Any]
    ) -> None:
        names: dict[CodeType, dict[Name, Any]] = {}
        for at, key in list(self.wanted):
            if at == moment and isinstance(key[0], CodeType):
                names.setdefault(key[0], {})[key] = None
        there = [*self._roots(context, frame, roots)] if roots else []
        for each in script_frames(frame) if names else ():
            there += named(each, names, context.variables_of)
        chosen: dict[int, tuple[Key, Any]] = {}
        for name, value in there:
            wanted = self.wanted.get((moment, name))
            if wanted is None or not self._is_value(value):
                continue
            wanted.unread += 1
            if wanted.unread > UNREAD:
                del self.wanted[moment, name]
            chosen.setdefault(value.data_ptr(), ((moment, name), value))
        self.copies.begin(chosen.values())

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

    # -- reads -----------------------------------------------------------------------------------------------

    def _reading(self, really: Callable[..., Any]) -> Callable[..., Any]:
        kind, held, seen = self.torch.Tensor, self.copies.held, self._seen

        @wraps(really)
        def read(tensor: Tensor, *args: object) -> Any:
            if (held or seen) and type(tensor) is kind and tensor.is_cuda:
                host = self._host(tensor)
                if host is not None:
                    return really(host, *args)
            return really(tensor, *args)

        return read

    def _to_host(
        self, really: Callable[..., Any], asks: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    ) -> Callable[..., Any]:
        """Wrap a method that may return a host tensor, detached from the graph and not pinned."""
        kind = self.torch.Tensor

        @wraps(really)
        def read(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if type(tensor) is not kind or not tensor.is_cuda or not (self.copies.held or self._seen):
                return really(tensor, *args, **kwargs)
            if asks(args, kwargs) and not (tensor.requires_grad and self.torch.is_grad_enabled()):
                host = self._host(tensor)
                if host is not None:
                    return host.clone()
            found = really(tensor, *args, **kwargs)
            if not found.is_cuda and (kwargs.get("non_blocking") or any(arg is True for arg in args)):
                self._waits_by_itself(sys._getframe(1))
            return found

        return read

    def _copying(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def copy(tensor: Tensor, source: Any, *args: object, **kwargs: object) -> Any:
            if (
                self.copies.held
                and (args or kwargs)
                and not tensor.is_cuda
                and getattr(source, "is_cuda", False)
            ):
                self._waits_by_itself(sys._getframe(1))
            return really(tensor, source, *args, **kwargs)

        return copy

    def _waits_by_itself(self, caller: FrameType) -> None:
        """Handle a non-blocking copy to the host: the script may use its next read as the wait."""
        if not caller.f_code.co_filename.startswith(HOME):
            self.copies.clear()

    def _host(self, tensor: Any) -> Any:
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

    def _is_right(self, tensor: Any, copy: HostCopy) -> bool:
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

    # -- skipped waits --------------------------------------------------------------------------

    def _after_what_is_owed(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Wait first for the skipped streams: a script may use a read as a wait and then query its events."""

        @wraps(really)
        def ask(*args: object, **kwargs: object) -> Any:
            while self._owed:
                self.copies.streams[self._owed.pop()].synchronize()
            return really(*args, **kwargs)

        return ask

    def _giving_back(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def give_back() -> None:
            self.copies.segments.forget()
            really()

        return give_back

    def _exchange(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def exchange(*args: object, **kwargs: object) -> Any:
            if self.copies.held:
                self.copies.written(tensors_in((args[1:], tuple(kwargs.values()))))
            return really(*args, **kwargs)

        return exchange

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
