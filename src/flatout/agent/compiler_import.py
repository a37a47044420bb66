"""An optimizer does not import torch's compiler, which takes 1 to 6 s of each start.

torch's optimizers import ``torch._dynamo`` when they are made and at each step: they tell a compiler that traces
them where to stop. Until the program imports the compiler, nothing traces them, and these calls do nothing. So they
are left out until then. Source: torch/_compile.py and torch/optim/optimizer.py of torch 2.11 to 2.14.
"""

from __future__ import annotations

import sys

from flatout.agent.ledger import Ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

COMPILER = "torch._dynamo"


class _CompilerImportHook:
    """Restores torch's functions before the compiler is imported; it finds no modules itself."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == COMPILER or name.startswith(COMPILER + "."):
            self._ledger.restore()
            if self in sys.meta_path:
                sys.meta_path.remove(self)


def postpone(torch: Any) -> None:
    """Let the optimizers of ``torch`` work without its compiler until the program imports that."""
    if COMPILER in sys.modules or not hasattr(torch, "_disable_dynamo"):
        return
    ledger, optimizers = Ledger(), sys.modules["torch.optim.optimizer"]
    disabled_code, plain_step_code = torch._disable_dynamo(_stub).__code__, _step_of(_stub).__code__
    torch_step_code = optimizers._use_grad_for_differentiable(_stub).__code__
    for optimizer_class in [optimizers.Optimizer, *optimizers.Optimizer.__subclasses__()]:
        for function in vars(optimizer_class).values():
            code = getattr(function, "__code__", None)
            if code is disabled_code:
                # where torch keeps the function that it makes with the compiler
                ledger.set(function.__wrapped__, "__dynamo_disable", function.__wrapped__, new=True)
            elif code is torch_step_code and code.co_freevars == plain_step_code.co_freevars:
                ledger.set_flag(function, "__code__", plain_step_code)
    sys.meta_path.insert(0, _CompilerImportHook(ledger))


def _stub(*arguments: object) -> None: ...


def _step_of(func: Callable[..., object]) -> Callable[..., object]:
    def step(*args: Any, **kwargs: Any) -> object:
        was_enabled = torch.is_grad_enabled()  # type: ignore[name-defined]  # noqa: F821
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])  # type: ignore[name-defined]  # noqa: F821
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(was_enabled)  # type: ignore[name-defined]  # noqa: F821

    return step
