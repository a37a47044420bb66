"""Room 1: fast kernels, one folder each, and the gate that every one of them passes before it is used.

A folder holds ``reference.py`` (plain torch: the meaning), ``in_triton.py`` and ``kernel.cu`` (the fast ways), ``op.py`` (what
a program calls: a torch.library operator with its gradient and its fake), ``cases.py`` (shapes and types, for test and bench alike) and
``wrong.py`` (variants that the gate must reject). Its ``__init__.py`` is the kernel's page. Adding one is one folder and one line
here. Importing this file loads neither torch nor Triton.

Beside the folders lies what computes a step otherwise without a kernel of ours: ``graph_*`` records it as CUDA graphs, ``attention_*`` puts torch's fused
attention in the place of written attention.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.kernels.kernel import Kernel

NAMES = ("layer_norm", "rms_norm", "linear_cross_entropy", "augment", "adamw")


def load(name: str) -> Kernel:
    """The kernel of this name. Raises LookupError for one that is not on the shelf."""
    if name not in NAMES:
        raise LookupError(f"there is no kernel {name!r}; there are {', '.join(NAMES)}")
    found: Kernel = import_module(f"flatout.kernels.{name}").KERNEL
    return found
