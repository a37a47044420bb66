"""What torch.compile does in this process: which modules it compiles for the script, and whether it is switched off."""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
COMPILED = "_torchdynamo_orig_callable"  # on every callable that torch.compile has made; one that was made with disable=True has none


def compiler_off() -> str:
    """What switches torch.compile off in this process, as a user would write it; empty where it is on."""
    for name in VARIABLES:
        if os.environ.get(name) == "1":
            return f"{name}=1"
    # Importing these takes seconds; where nobody has, nobody has changed them.
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "")
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager")'
    return "torch._dynamo.config.disable = True" if getattr(sys.modules.get("torch._dynamo.config"), "disable", False) else ""


def is_compiled(module: Any) -> bool:
    """Whether the script has had this module, or one inside it, compiled by torch.compile, and the compiler is on."""
    return any(map(_has_compiled_code, module.modules())) and not compiler_off()


def _has_compiled_code(module: Any) -> bool:
    if type(module).__name__ == "OptimizedModule":  # torch.compile(module)
        return True
    # module.compile(), and module.forward = torch.compile(module.forward)
    return any(hasattr(code, COMPILED) for code in (getattr(module, "_compiled_call_impl", None), vars(module).get("forward")))
