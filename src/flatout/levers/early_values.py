"""Copy values that the script will read to the host while the device still computes.

What it does: in two steps, learns which losses and other one-element values the script reads, and which of
    them exist when a backward pass begins or an optimizer steps. From then on, it copies each of them to
    pinned memory at that moment, on a separate stream. `item()`, `float()`, `int()`, `bool()`, `tolist()`,
    formatting, `cpu()` and `to("cpu")` wait only for that copy.
Why it is faster: `loss.item()` after `backward()` and `optimizer.step()` waits for both. If it waits only for
    the forward pass, the host queues the next step while the device still computes this one. Each moment with
    copies costs the host 25 us, each read of a copy 2 us, and each other read of a device tensor 1 us (one
    core of an AMD EPYC, torch 2.14.1 on a stand-in for a card, 2026-11).
When it does not help: programs that read nothing, or seldom; values computed after the backward pass, as in
    `(out.argmax(1) == y).sum().item()` after `optimizer.step()`; reads in the middle of the forward pass;
    `print(loss)`, which reads in another way.
What it can change: nothing: a copy is used only until its tensor is written. To find writes that torch does
    not count, reads number 1, 2, 4, 8, ... of each value are compared with the device. Writes by collectives,
    graphs and other streams are known. Times that the script measures around a read change.
Evidence: published gains from removing such reads are 4 to 8 %; measured on your program before it is kept.
Sources: torch documentation, "CUDA semantics", sections "Asynchronous execution" and "Use pinned memory
    buffers"; Tensor.record_stream.
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.levers.early.reads import EarlyValueCopier
from flatout.levers.reasons import NO_CUDA
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

# By context; each keeps what it has learned while the lever is switched on and off.
_COPIERS: WeakKeyDictionary[Any, EarlyValueCopier] = WeakKeyDictionary()


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.device_type != "cuda":
        return Skip(NO_CUDA)
    backend = context.torch.cuda.get_allocator_backend()
    if backend != "native":
        return Skip(
            f"the program uses the allocator {backend}, which does not say on which stream a value was computed"
        )
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    if context not in _COPIERS:
        _COPIERS[context] = EarlyValueCopier(context)
    _COPIERS[context].install(context, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "side.wait_stream(torch.cuda.current_stream())  # between the forward and the backward pass\n"
        "with torch.cuda.stream(side):\n"
        "    host = torch.empty((), pin_memory=True).copy_(loss.detach(), non_blocking=True)\n"
        "    arrived = side.record_event()  # after optimizer.step(): arrived.synchronize(); host.item()"
    )


LEVER = Lever("early_values", Moment.STEP, Effect.EXACT, applies, code, apply=apply, live=True, page=__doc__)
