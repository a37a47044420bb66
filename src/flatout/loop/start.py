"""What stands at the beginning of a training program: a device, and a seed."""

from __future__ import annotations

import logging
import os
import random
import sys
from typing import Any

from flatout.capture.ledger import Ledger
from flatout.plan.errors import LoopError

LOGGER = logging.getLogger("flatout")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read when cuBLAS starts; without it deterministic products raise


def device(wanted: str | None = None) -> Any:
    """The torch.device to train on: ``wanted``, or the CUDA device with the most free memory, or MPS, or the CPU. Says in the log what it is and why.

    Raises LoopError where ``wanted`` is a device that this machine, driver or torch does not have, with what is missing.
    """
    import torch

    if wanted is not None:
        return _asked_for(torch, wanted)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        free = [torch.cuda.mem_get_info(at)[0] for at in range(count)] if count > 1 else [0]
        at = max(range(len(free)), key=lambda each: free[each])
        LOGGER.info("training on %s", _spelled(torch, at))
        return torch.device("cuda", at)
    if torch.backends.mps.is_available():
        LOGGER.info("training on this Mac's GPU (MPS)")
        return torch.device("mps")
    LOGGER.info("training on the CPU: %s", why_no_cuda(torch))
    return torch.device("cpu")


def _asked_for(torch: Any, wanted: str) -> Any:
    try:
        found = torch.device(wanted)
    except RuntimeError:
        raise LoopError(f"device {wanted!r} is none that torch knows. It is \"cpu\", \"cuda\", \"cuda:1\" and the like.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise LoopError(f"device {wanted!r} is not to be had: {why_no_cuda(torch)}. `flatout doctor` looks into it.")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise LoopError(f"device {wanted!r} is not to be had: {torch.cuda.device_count()} CUDA devices are visible, counted from 0"
                        + (f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})." if "CUDA_VISIBLE_DEVICES" in os.environ else "."))
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise LoopError(f"device {wanted!r} is not to be had: this is no Mac with a GPU that torch can use.")
    return found


def why_no_cuda(torch: Any) -> str:
    if torch.version.hip:
        return "this torch is built for ROCm, and no AMD GPU is seen"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return f"no NVIDIA GPU, or no driver that suits CUDA {torch.version.cuda} of this torch, is seen"


def _spelled(torch: Any, at: int) -> str:
    seen = torch.cuda.get_device_properties(at)
    return f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, compute capability {seen.major}.{seen.minor}, CUDA {torch.version.cuda}"


def seed(value: int, *, deterministic: bool = False) -> int:
    """Seed torch (every device), ``random`` and numpy, where it is loaded; gives the seed back.

    ``deterministic`` also asks torch for the same result each time on the same machine: operations that cannot give it raise, and some are slower.
    Raises LoopError for a seed that one of them would not take.
    """
    import torch

    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise LoopError(f"seed({value!r}): a whole number from 0 to 2**32 - 1 is needed, for numpy takes no other.")
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if deterministic:
        if torch.cuda.is_initialized() and WORKSPACE not in os.environ:
            LOGGER.warning("%s is not set, and CUDA has started already: set it to :4096:8 before the program starts", WORKSPACE)
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        Ledger().set(torch.backends.cudnn, "benchmark", False)  # for good
    return value
