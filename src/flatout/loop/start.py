"""The start of a training program: choose a device, and set the seed."""

import logging
import os
import random
import sys
from types import ModuleType
from typing import Any

from flatout.agent.ledger import Ledger
from flatout.schema.errors import LoopError
from flatout.schema.sizes import size

LOGGER = logging.getLogger("flatout")
# read when cuBLAS starts; deterministic products raise without it
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def device(wanted: str | None = None) -> Any:
    """The ``torch.device`` to train on, and log the choice with its reason.

        model = Model().to(flatout.device())

    Args:
        wanted: A device such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Default: the CUDA device with the most
            free memory, else MPS, else the CPU.

    Raises:
        LoopError: This machine, its driver or torch does not provide ``wanted``. The message says what is
            missing."""
    import torch

    if wanted is not None:
        return _checked_device(torch, wanted)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        free = [torch.cuda.mem_get_info(index)[0] for index in range(count)] if count > 1 else [0]
        index = max(range(len(free)), key=lambda i: free[i])
        LOGGER.info("training on %s", _describe(torch, index))
        return torch.device("cuda", index)
    if torch.backends.mps.is_available():
        LOGGER.info("training on this Mac's GPU (MPS)")
        return torch.device("mps")
    LOGGER.info("training on the CPU: %s", why_no_cuda(torch))
    return torch.device("cpu")


def _checked_device(torch: ModuleType, wanted: str) -> Any:
    try:
        device_ = torch.device(wanted)
    except RuntimeError:
        raise LoopError(
            f'torch does not know the device {wanted!r}. Use "cpu", "cuda" or "cuda:1", for example.'
        ) from None
    if device_.type == "cuda" and not torch.cuda.is_available():
        raise LoopError(
            f"device {wanted!r} is not available: {why_no_cuda(torch)}. Run `flatout doctor` for details."
        )
    count = torch.cuda.device_count() if device_.type == "cuda" else 0
    if device_.type == "cuda" and device_.index is not None and device_.index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise LoopError(
            f"device {wanted!r} is not available: {count} CUDA devices are visible, numbered from 0"
            f"{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible})'}."
        )
    if device_.type == "mps" and not torch.backends.mps.is_available():
        raise LoopError(
            f"device {wanted!r} is not available: this is not a Mac with a GPU that torch supports."
        )
    return device_


def why_no_cuda(torch: ModuleType) -> str:
    if torch.version.hip:
        return "this torch is built for ROCm, and no AMD GPU is visible"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return f"there is no NVIDIA GPU, or no driver for CUDA {torch.version.cuda} of this torch"


def _describe(torch: ModuleType, index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {size(properties.total_memory)}, compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"


def seed(value: int, *, deterministic: bool = False) -> int:
    """Seed torch (all devices), ``random`` and, if it is loaded, numpy. Returns the seed.

        flatout.seed(0)
        flatout.seed(0, deterministic=True)

    Args:
        value: The seed, from 0 to 2**32 - 1.
        deterministic: Also ask torch for the same result each time on the same machine. Operations that
            cannot do this raise an error, and some operations are slower.

    Raises:
        LoopError: The seed is not a whole number from 0 to 2**32 - 1."""
    import torch

    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise LoopError(f"seed({value!r}) is not a whole number from 0 to 2**32 - 1, which numpy requires.")
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if deterministic:
        if torch.cuda.is_initialized() and WORKSPACE_VARIABLE not in os.environ:
            LOGGER.warning(
                "%s is not set, and CUDA has already started: set it to :4096:8 before the program starts",
                WORKSPACE_VARIABLE,
            )
        os.environ.setdefault(WORKSPACE_VARIABLE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        Ledger().set(torch.backends.cudnn, "benchmark", False)  # for good
    return value
