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

from flatout.levers.early.names import Name, named, script_frames, tensors
from flatout.levers.early.served import Key, ServedValues
from flatout.levers.early.values import names_the_host, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
LEARNING_STEPS = 2
MOST_PASSES, UNREAD = (
    1024,
    16,
)  # most backward passes to learn from; unread copies that end the copying of a value
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


class EarlyValueCopier(ServedValues):
    """What is known of one program.

    ``install`` activates it until the ledger is restored, any number of times.
    """

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
        def copy(tensor: Tensor, source: Tensor, *args: object, **kwargs: object) -> Any:
            if (
                self.copies.held
                and (args or kwargs)
                and not tensor.is_cuda
                and getattr(source, "is_cuda", False)
            ):
                self._waits_by_itself(sys._getframe(1))
            return really(tensor, source, *args, **kwargs)

        return copy

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
