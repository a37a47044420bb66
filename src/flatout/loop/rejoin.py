"""A rank whose step has failed takes part in the exchange of gradients all the same, so that the others are not kept waiting.

DistributedDataParallel sums gradients bucket by bucket while the backward pass runs, and every rank must bring every bucket. A rank that ran out of
memory brings zeros for what it has not brought yet; then the ranks agree that the step does not count. This keeps the exchange inside the
backward pass, where it costs least: the alternative, summing after all ranks said that they are well, would be paid for in every step.

    failed before the wrapper's forward had ended   a forward of a stand-in module, which returns a loss of zero over all parameters, and its backward
    failed later                                    a backward of zero over the parameters that the wrapper has not been given yet

Which ones these are shows in their gradients, which are noted as the forward ends: autograd replaces them or writes to them before the wrapper hears.
"""

from __future__ import annotations

from typing import Any

from flatout.capture.ledger import Ledger
from flatout.capture.pickles import keep_out_of_pickles

TWICE = ("mark a variable ready only once", "marked as ready twice")


class Rejoin:
    """Hears when a DistributedDataParallel is called, enters its module, and returns: some microseconds a micro-batch."""

    def __init__(self, torch: Any, parallel: Any) -> None:
        self.torch, self.parallel = torch, parallel
        self.parameters = [p for p in parallel.module.parameters() if p.requires_grad]
        self._called = False
        self._entered = False  # the wrapper has sent the buffers round, in this attempt
        self._noted: list[Any] | None = None  # gradients as they stood when the forward that is to be exchanged had ended
        self._ledger = Ledger()

    def attempt_begins(self) -> None:
        if not self._ledger.entries():
            self._listen()
        self._called, self._entered, self._noted = False, False, None

    def _listen(self) -> None:
        keep_out_of_pickles(self.torch, self._ledger, Rejoin)
        self._ledger.call("forward pre-hook", self.parallel.register_forward_pre_hook(self._begins).remove)
        self._ledger.call("forward pre-hook", self.parallel.module.register_forward_pre_hook(self._enters).remove)
        self._ledger.call("forward hook", self.parallel.register_forward_hook(self._leaves).remove)

    def close(self) -> None:
        """Stop listening; the next attempt begins it again."""
        self._ledger.restore()

    def _begins(self, *_: Any) -> None:
        self._called = True

    def _enters(self, *_: Any) -> None:
        self._entered |= self._called  # the module alone may be called by others

    def _leaves(self, *_: Any) -> None:
        self._called = False
        if self.parallel.require_backward_grad_sync and self.torch.is_grad_enabled():
            self._noted = [_seen(p.grad) for p in self.parameters]

    def take_part(self) -> None:
        """Bring what is missing. Raises RuntimeError where the wrapper cannot be brought to an end: it failed while it exchanged, or its graph is static."""
        parallel = self.parallel
        if parallel.static_graph:
            raise RuntimeError("static_graph=True lets nobody bring gradients in another order")
        missing = self.parameters if self._noted is None else [p for p, before in zip(self.parameters, self._noted, strict=True) if _seen(p.grad) == before]
        if self._noted is None or len(missing) == len(self.parameters):
            self._whole()
        elif parallel.find_unused_parameters:
            self._one_by_one(missing)
        elif missing:
            _nothing(missing).backward()
        parallel.reducer._check_reducer_finalized()

    def _whole(self) -> None:
        """Forward and backward with a stand-in for the module. Buffers are sent round only once an attempt."""
        parallel = self.parallel
        if self._entered:
            parallel.require_forward_param_sync = False
        stand_in, ledger = self.torch.nn.Module(), Ledger()
        stand_in._modules, stand_in._buffers = parallel.module._modules, parallel.module._buffers  # the same buffers by the same names, and no hook of anybody
        stand_in.forward = lambda: _nothing(self.parameters)
        ledger.set_item(parallel._modules, "module", stand_in)
        try:
            type(parallel).forward(parallel).backward()
        finally:
            ledger.restore()

    def _one_by_one(self, missing: list[Any]) -> None:
        """Where parameters may go unused, the wrapper has marked those as brought by itself, and says so when they come. After the last one it would
        take such a parameter for one of the next step."""
        for p in missing:
            if self._complete():
                return
            try:
                _nothing([p]).backward()
            except RuntimeError as error:
                if not any(words in str(error) for words in TWICE):
                    raise


    def _complete(self) -> bool:
        try:
            self.parallel.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True


def _seen(gradient: Any) -> Any:
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _nothing(parameters: list[Any]) -> Any:
    """A loss whose gradient is zero for each of these, whatever they are."""
    return sum(p.sum() * 0 for p in parameters)
