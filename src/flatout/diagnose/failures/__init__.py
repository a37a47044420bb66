"""The table of known failures, with one module for each family.

To add a failure, write a row with `pattern_kind`, or a function with the decorator `kind`. The codes never change.
"""

from importlib import import_module
from pkgutil import iter_modules

from flatout.diagnose.kind import FailureKind

# Family titles by the first two digits of the code.
FAMILIES = {
    "00": "Devices",
    "01": "Dtypes",
    "02": "Shapes",
    "03": "Losses and look-ups",
    "04": "Memory, resources and crashes",
    "05": "CUDA libraries",
    "06": "The backward pass and the optimizer step",
    "07": "Data loaders and processes",
    "08": "Distributed training",
    "09": "Checkpoints",
    "10": "torch.compile and extensions",
    "11": "Without an exception",
}

TABLE: tuple[FailureKind, ...] = tuple(
    sorted(
        (
            kind
            for module in iter_modules(__path__)
            for kind in vars(import_module(f"{__name__}.{module.name}")).values()
            if isinstance(kind, FailureKind)
        ),
        key=lambda kind: kind.code,
    )
)
