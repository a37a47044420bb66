"""numpy with single-threaded linear algebra: ``from flatout.tune.one_thread import np``.

The matrices of a search have about a hundred rows, and the machine is busy with the measured programs. There
a thread pool, whose threads spin while they wait, takes a hundred times as long as one thread. A BLAS library
reads the number of threads once, when it is loaded.

The environment is restored at once, because later programs inherit it.
"""

import importlib
import os
from typing import Any

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def _numpy() -> Any:
    previous = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        # Otherwise np.unique imports it during a search, where the import may swallow an interrupt
        importlib.import_module("numpy.ma")
        return importlib.import_module("numpy")
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


np = _numpy()
