"""What replaces a program's operators: kernels, fused attention, a loss without logits, CUDA graphs; and the gate.

Every kernel must pass the gate before use.

A folder holds ``reference.py`` (the definition in plain torch), ``in_triton.py``, ``kernel.cu``, ``op.py``
(the torch.library operator, its gradient and fake) and ``cases.py`` (for tests and benchmarks). Its
``__init__.py`` is the kernel's page. ``tests/kernels/wrong/`` holds variants that the gate must reject. To add a
kernel, add a folder and a line here. ``graph_*``, ``attention_*``, ``chunked_loss`` and ``deferred_logits`` need
no kernel of our own.

Runs in: the user's program, and flatout.Loop; the gate in a child of `flatout kernel check`.
Imports: torch and Triton, and no other package of flatout. This file loads neither.
Start with: kernel.py (Kernel), gate.py, layer_norm/.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.kernels.kernel import Kernel

NAMES = ("layer_norm",)


def load(name: str) -> Kernel:
    """The kernel of this name. Raises LookupError for an unknown name."""
    if name not in NAMES:
        raise LookupError(f"there is no kernel {name!r}; there are {', '.join(NAMES)}")
    kernel: Kernel = import_module(f"flatout.kernels.{name}").KERNEL
    return kernel
