"""Fast kernels, one folder each, and the gate that each kernel must pass before use.

A folder holds ``reference.py`` (plain torch: the definition), ``in_triton.py`` and ``kernel.cu`` (the fast
implementations), ``op.py`` (the public torch.library operator with its gradient and its fake), ``cases.py``
(shapes and types, for tests and benchmarks) and ``wrong.py`` (variants that the gate must reject). Its
``__init__.py`` is the kernel's page. To add a kernel, add one folder and one line here. Importing this file
loads neither torch nor Triton.

The other modules speed up a step without a kernel of our own: ``graph_*`` records it as CUDA graphs, and
``attention_*`` replaces hand-written attention by torch's fused attention.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.kernels.kernel import Kernel

NAMES = ("layer_norm", "rms_norm", "linear_cross_entropy", "augment", "adamw")


def load(name: str) -> Kernel:
    """The kernel of this name. Raises LookupError for an unknown name."""
    if name not in NAMES:
        raise LookupError(f"there is no kernel {name!r}; there are {', '.join(NAMES)}")
    found: Kernel = import_module(f"flatout.kernels.{name}").KERNEL
    return found
