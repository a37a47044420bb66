"""Events of a running training script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


class Listener:
    """Base class of listeners. Every method does nothing, so a listener overrides only what it needs."""

    wants_phases = False

    def iterator_begin(self, loader: DataLoader) -> None: ...
    def iterator_end(self, loader: DataLoader, iterator: object) -> None: ...
    def data_begin(self, loader: DataLoader) -> None: ...
    def data_end(self, loader: DataLoader, batch: object) -> None: ...
    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def forward_end(self, root: Module, output: object) -> None: ...
    def backward_begin(self, losses: tuple[Any, ...]) -> None: ...
    def backward_end(self) -> None: ...
    def exchange_begin(self) -> None:
        """Called when a backward pass has computed its gradients and waits for the exchange between ranks."""

    def exchange_end(self, traffic: object) -> None:
        """Called after the exchange. ``traffic`` describes what was sent (distributed/exchange.py)."""

    def optimizer_begin(self, optimizer: Optimizer) -> None: ...
    def optimizer_end(self, optimizer: Optimizer) -> None: ...
    def step_end(self) -> None: ...

    def on_error(self, error: Exception) -> None:
        """Called when the listener itself raised an exception in an event; it gets no further events."""


EVENTS = tuple(name for name in vars(Listener) if name.endswith(("_begin", "_end")))


class GuardedListener(Listener):
    """Passes events on; the first exception of the listener stops the listener, not the script.

    Only ``Exception`` is caught: stopping the script and Ctrl-C pass through.
    """

    def __init__(self, listener: Listener) -> None:
        self.wants_phases = listener.wants_phases
        self._listener = listener
        self.__dict__.update({name: self._catch_errors(getattr(listener, name)) for name in EVENTS})

    def _catch_errors(self, observe: Callable[..., None]) -> Callable[..., None]:
        @wraps(observe)
        def observe_or_stop(*args: object) -> None:
            try:
                observe(*args)
            except Exception as error:
                for name in EVENTS:  # the methods of the class remain; they do nothing
                    self.__dict__.pop(name, None)
                self._listener.on_error(error)

        return observe_or_stop


class ListenerGroup(Listener):
    """Passes events to several listeners, in this order."""

    def __init__(self, first: Listener, *others: Listener) -> None:
        self.listeners = (first, *others)
        self.wants_phases = any(listener.wants_phases for listener in self.listeners)
        self.__dict__.update(
            {
                name: self._call_all([getattr(listener, name) for listener in self.listeners])
                for name in EVENTS
            }
        )

    @staticmethod
    def _call_all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
        def observe(*args: object) -> None:
            for method in methods:
                method(*args)

        return observe

    def on_error(self, error: Exception) -> None:
        self.listeners[0].on_error(error)
