"""numpy whose linear algebra uses one thread: ``from flatout.tune.one_thread import np``.

The matrices of a search have about a hundred rows, and the machine is busy with the programs that are measured. There a pool of threads, which wait for one
another by spinning, takes a hundred times as long as one thread. A BLAS library reads the number of threads once, while it is loaded.

The environment is put back at once, for programs that are started later inherit it. Where numpy was imported before, nothing changes.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

LIMITS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def _numpy() -> Any:
    before = {name: os.environ.get(name) for name in LIMITS}
    os.environ.update(dict.fromkeys(LIMITS, "1"))
    try:
        importlib.import_module("numpy.ma")  # or np.unique would import it in the middle of a search, where an interrupt may get lost in the import
        return importlib.import_module("numpy")
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


np = _numpy()
