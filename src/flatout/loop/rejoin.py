"""Let a rank whose step has failed complete the exchange of gradients, so that the other ranks do not wait.

DistributedDataParallel sums gradients bucket by bucket during the backward pass, and every rank must
contribute every bucket. A rank that ran out of memory contributes zeros for the rest; then the ranks agree
that the step does not count. This keeps the exchange inside the backward pass, where it costs least. The
alternative, summing after all ranks have reported success, would cost time in every step.

    failed before the wrapper's forward ended   forward of a stand-in module that returns a loss of zero over
                                                all parameters, and its backward
    failed later                                backward of zero over the parameters still missing

The gradients at the end of the forward pass tell which parameters are missing: autograd replaces or writes a
gradient before the wrapper sees it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.agent.pickles import keep_out_of_pickles

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

TWICE = ("mark a variable ready only once", "marked as ready twice")


class Rejoin:
    """Tracks when a DistributedDataParallel is called, enters its module, and returns.

    This costs some microseconds per micro-batch.
    """

    def __init__(self, torch: ModuleType, parallel: DistributedDataParallel) -> None:
        self.torch, self.parallel = torch, parallel
        self.parameters = [p for p in parallel.module.parameters() if p.requires_grad]
        self._called = False
        self._entered = False  # the wrapper has broadcast the buffers in this attempt
        self._noted: list[Any] | None = None  # gradients at the end of the synchronising forward
        self._ledger = Ledger()

    def attempt_begins(self) -> None:
        if not self._ledger.entries():
            self._listen()
        self._called, self._entered, self._noted = False, False, None

    def _listen(self) -> None:
        keep_out_of_pickles(self.torch, self._ledger, Rejoin)
        self._ledger.call("forward pre-hook", self.parallel.register_forward_pre_hook(self._begins).remove)
        self._ledger.call(
            "forward pre-hook", self.parallel.module.register_forward_pre_hook(self._enters).remove
        )
        self._ledger.call("forward hook", self.parallel.register_forward_hook(self._leaves).remove)

    def close(self) -> None:
        """Remove the hooks; the next attempt installs them again."""
        self._ledger.restore()

    def _begins(self, *_: object) -> None:
        self._called = True

    def _enters(self, *_: object) -> None:
        self._entered |= self._called  # other code may call the module directly

    def _leaves(self, *_: object) -> None:
        self._called = False
        if self.parallel.require_backward_grad_sync and self.torch.is_grad_enabled():
            self._noted = [_seen(p.grad) for p in self.parameters]

    def take_part(self) -> None:
        """Contribute the missing gradients.

        Raises RuntimeError if the wrapper cannot finish: it failed during the exchange, or its graph is
        static.
        """
        parallel = self.parallel
        if parallel.static_graph:
            raise RuntimeError("static_graph=True does not allow gradients in another order")
        missing = (
            self.parameters
            if self._noted is None
            else [
                p for p, before in zip(self.parameters, self._noted, strict=True) if _seen(p.grad) == before
            ]
        )
        if self._noted is None or len(missing) == len(self.parameters):
            self._whole()
        elif parallel.find_unused_parameters:
            self._one_by_one(missing)
        elif missing:
            _nothing(missing).backward()
        parallel.reducer._check_reducer_finalized()

    def _whole(self) -> None:
        """Run forward and backward with a stand-in for the module.

        Buffers are broadcast only once per attempt.
        """
        parallel = self.parallel
        if self._entered:
            parallel.require_forward_param_sync = False
        stand_in, ledger = self.torch.nn.Module(), Ledger()
        stand_in._modules, stand_in._buffers = (
            parallel.module._modules,
            parallel.module._buffers,
        )  # same names, no hooks
        stand_in.forward = lambda: _nothing(self.parameters)
        ledger.set_item(parallel._modules, "module", stand_in)
        try:
            type(parallel).forward(parallel).backward()
        finally:
            ledger.restore()

    def _one_by_one(self, missing: list[Any]) -> None:
        """Handle parameters that may be unused.

        The wrapper has already marked them ready, and raises when they arrive. After the last one it would
        count such a parameter towards the next step.
        """
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


def _seen(gradient: Tensor) -> Any:
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _nothing(parameters: list[Any]) -> Any:
    """A loss whose gradient is zero for each of these parameters, whatever they contain."""
    return sum(p.sum() * 0 for p in parameters)
