"""Reports what torch.compile does in this process: which modules it compiles, and whether it is disabled."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

DISABLING_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
COMPILED_MARK = (
    "_torchdynamo_orig_callable"  # attribute of every callable from torch.compile, unless disable=True
)


def compiler_off() -> str:
    """Return the setting that disables torch.compile here, as a user would write it; empty if enabled."""
    for name in DISABLING_VARIABLES:
        if os.environ.get(name) == "1":
            return f"{name}=1"
    # Importing these takes seconds; if they are not imported, their settings are unchanged.
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "")
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager")'
    return (
        "torch._dynamo.config.disable = True"
        if getattr(sys.modules.get("torch._dynamo.config"), "disable", False)
        else ""
    )


def is_compiled(module: Module) -> bool:
    """Whether torch.compile, being enabled, compiles this module or one inside it."""
    return any(map(_has_compiled_code, module.modules())) and not compiler_off()


def _has_compiled_code(module: Module) -> bool:
    if type(module).__name__ == "OptimizedModule":  # torch.compile(module)
        return True
    # module.compile(), and module.forward = torch.compile(module.forward)
    return any(
        hasattr(code, COMPILED_MARK)
        for code in (getattr(module, "_compiled_call_impl", None), vars(module).get("forward"))
    )
