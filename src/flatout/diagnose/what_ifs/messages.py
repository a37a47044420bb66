"""What if nothing were printed or logged? print, progress bars, loggers and metric writers are muted.

The content of a message is still computed: the value of an f-string, the ``item()`` inside it.
"""

import builtins
import logging
import sys
from typing import Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

# module (if loaded), owner of the methods, prefixes of the methods that write
WRITERS = (
    ("torch.utils.tensorboard.writer", "SummaryWriter", ("add_",)),
    ("tensorboardX", "SummaryWriter", ("add_",)),
    ("tqdm.std", "tqdm", ("display",)),
    ("wandb", "", ("log",)),
    ("mlflow", "", ("log_",)),
)


class _DiscardingStream:
    """A stream wrapper that discards writes and passes everything else on."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text)

    def writelines(self, lines: object) -> None:
        pass

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def applies(facts: Facts, context: TrainingContext) -> Options:
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    ledger.set(builtins, "print", lambda *args, **kwargs: None)
    for name in ("stdout", "stderr"):
        ledger.set(sys, name, _DiscardingStream(getattr(sys, name)))
    previous_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    ledger.on_restore("logging.disable", lambda: logging.disable(previous_level))
    for module, owner, prefixes in WRITERS:
        target = sys.modules.get(module)
        target = getattr(target, owner, None) if owner else target
        for name in (
            [name for name in vars(target) if name.startswith(prefixes) and callable(getattr(target, name))]
            if target is not None
            else []
        ):
            ledger.set(target, name, lambda *args, **kwargs: None)
    return ledger.restore


def code(value: Value) -> str:
    return "if step % 100 == 0:\n    print(...)  # every 100 steps instead of every step"


LEVER = Lever(
    "logging", Moment.STEP, Effect.CHANGES_MATH, applies, code, apply=apply, live=True, page=__doc__
)
