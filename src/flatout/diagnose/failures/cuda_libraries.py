"""Failures inside the CUDA libraries."""

from __future__ import annotations

from flatout.diagnose.kind import RUNTIME, Diagnosis, kind, layer, match_message, search_log
from flatout.schema.failure import FailureRecord


@kind("FE050", "cudnn-error")
def cudnn_error(failure: FailureRecord) -> Diagnosis | None:
    """cuDNN reports an error.

    What:
        The library behind convolutions, recurrent layers and some attention kernels reported an error.
    Why it happens:
        Often the GPU's memory is full (NOT_INITIALIZED, ALLOC_FAILED, INTERNAL_ERROR) or an earlier kernel
        failed (EXECUTION_FAILED, MAPPING_ERROR). Or another cuDNN on LD_LIBRARY_PATH hides torch's own,
        or sizes or dtypes are not supported.
    How to fix it:
        `nvidia-smi` shows the memory, `CUDA_LAUNCH_BLOCKING=1` the real line. Run `unset LD_LIBRARY_PATH`.
        `torch.backends.cudnn.enabled = False` shows whether cuDNN is the cause.
    Sources:
        https://docs.pytorch.org/docs/stable/backends.html#module-torch.backends.cudnn
    """
    found = match_message(
        failure,
        RUNTIME,
        r"(?:cuDNN|miopen) error: (?P<status>\w+)",
        r"(?P<status>GET was unable to find an engine to execute this computation)",
        r"(?P<status>cuDNN version incompatibility): (?P<why>[^\n]+)",
        r"Unable to find a valid cuDNN algorithm to run convolution(?P<algorithm>)",
        r"cuDNN Frontend error: (?P<status>[^\n]+)",
    )
    if found is None:
        return None
    status = found["status"] or "no algorithm found"
    where = f" in {layer(failure)}" if layer(failure) else ""
    if "incompatib" in status:
        return Diagnosis(
            f"a cuDNN other than torch's own was loaded: {found['why'][:160]}",
            "unset LD_LIBRARY_PATH   # or remove the folder with the other cuDNN from it",
        )
    memory = any(
        word in status
        for word in ("NOT_INITIALIZED", "ALLOC_FAILED", "INTERNAL_ERROR", "engine", "algorithm")
    )
    reason = (
        "most often the GPU's memory is full"
        if memory
        else "most often an earlier kernel failed, or the sizes are not supported"
    )
    return Diagnosis(
        f"cuDNN reports {status}{where}; {reason}",
        "nvidia-smi                                        # is the memory full? then use a smaller batch\n"
        "CUDA_LAUNCH_BLOCKING=1 python train.py            # shows the real line\n"
        "unset LD_LIBRARY_PATH                             # another cuDNN may hide torch's own",
    )


@kind("FE051", "cublas-error")
def cublas_error(failure: FailureRecord) -> Diagnosis | None:
    """cuBLAS reports an error.

    What:
        The library behind matrix products reported an error.
    Why it happens:
        ALLOC_FAILED and NOT_INITIALIZED: the GPU's memory is full. EXECUTION_FAILED and INTERNAL_ERROR: an
        earlier kernel failed, very often because a label or a token is out of range. INVALID_VALUE and
        NOT_SUPPORTED: another cuBLAS on LD_LIBRARY_PATH, or sizes that do not fit.
    How to fix it:
        Run one step on the CPU, which names an index out of range. Use `CUDA_LAUNCH_BLOCKING=1` and `unset
        LD_LIBRARY_PATH`.
    Sources:
        https://docs.nvidia.com/cuda/cublas/#cublasstatus-t
    """
    found = match_message(
        failure,
        RUNTIME,
        r"CUDA error: (?P<status>CUBLAS_STATUS_\w+) when calling `?(?P<call>\w+)",
        r"(?:cublas|CUBLAS) runtime error : (?P<status>[^\n]+?) at ",
    )
    if found is None:
        return None
    status, where = found["status"], f" in {layer(failure)}" if layer(failure) else ""
    if "ALLOC_FAILED" in status or "NOT_INITIALIZED" in status:
        reason, first = (
            "most often the GPU's memory is full",
            "nvidia-smi                                  # is the memory full? then use a smaller batch\n",
        )
    elif "INVALID_VALUE" in status or "NOT_SUPPORTED" in status:
        reason, first = "most often a cuBLAS other than torch's own is loaded", "unset LD_LIBRARY_PATH\n"
    else:
        reason, first = (
            "most often an earlier kernel failed: a label or a token out of range",
            "model.cpu()(batch.cpu())                    # the CPU names an index that is out of range\n",
        )
    return Diagnosis(
        f"cuBLAS reports {status} in `{found['call'] or 'a product'}`{where}; {reason}",
        first + "CUDA_LAUNCH_BLOCKING=1 python train.py       # shows the real line",
    )


@kind("FE052", "illegal-memory-access")
def illegal_memory_access(failure: FailureRecord) -> Diagnosis | None:
    """A kernel accessed memory outside its bounds.

    What:
        A kernel accessed memory that it does not own. The GPU reports it late, and this process can no longer
        use the GPU.
    Why it happens:
        An index is out of range and no assertion guards it. A custom kernel is wrong, or an extension was
        built for another GPU or torch. One kernel gets tensors of two devices, or a tensor of more than 2^31
        elements with 32-bit indices.
    How to fix it:
        `CUDA_LAUNCH_BLOCKING=1` shows the real line, `compute-sanitizer python train.py` the kernel.
    Sources:
        https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"(?:CUDA|HIP|Triton) [Ee]rror(?: \[CUDA\])?: (?:an illegal memory access was encountered|misaligned address)",
        r"cuda runtime error \(77\) : an illegal memory access",
        r"\w+: failed to synchronize: cudaErrorIllegalAddress",
        r".{0,120}?CUDA error: an illegal memory access was encountered",
    )
    if found is None:
        return None
    where = f" ({layer(failure)} was running when the GPU reported it)" if layer(failure) else ""
    return Diagnosis(
        f"a kernel read or wrote outside of its memory{where}; the real error may be before the line below",
        "CUDA_LAUNCH_BLOCKING=1 python train.py        # shows the real line\ncompute-sanitizer python train.py             # names the kernel\n"
        "run one step on the CPU                       # the CPU names an index that is out of range",
    )


@kind("FE053", "gpu-fault")
def gpu_fault(failure: FailureRecord) -> Diagnosis | None:
    """The GPU or its driver reported a fault.

    What:
        The hardware or its driver reported a fault: an uncorrectable memory error, a GPU that fell off the
        bus, a failed launch.
    Why it happens:
        Heat, power or a defect; sometimes a kernel exceeds the time limit of a desktop's driver.
    How to fix it:
        `dmesg | grep -i xid` names the fault, and `nvidia-smi -q -d ECC,PAGE_RETIREMENT` shows the state of
        the memory. Do not use the GPU until the fault is known.
    Sources:
        https://docs.nvidia.com/deploy/xid-errors/
    """
    found = match_message(
        failure,
        RUNTIME,
        r"CUDA error: (?P<what>uncorrectable (?:ECC|NVLink) error encountered|unspecified launch failure|the launch timed out and was terminated|GPU is lost|"
        r"hardware stack error|unknown error|device not ready|all CUDA-capable devices are busy or unavailable)",
    )
    if found is None:
        return None
    what = found["what"]
    xid = search_log(failure, r"NVRM: Xid.{0,40}: (?P<number>\d+)")
    if "busy or unavailable" in what:
        return Diagnosis(
            "the GPU is in use: another process has exclusive access, or a MIG slice is missing",
            "nvidia-smi -q | grep -i 'compute mode'; nvidia-smi   # which process uses it?",
        )
    number = f" (Xid {xid['number']})" if xid else ""
    return Diagnosis(
        f"the GPU or its driver reports: {what}{number}",
        "dmesg | grep -i xid                              # names the fault\n"
        "nvidia-smi -q -d ECC,PAGE_RETIREMENT,TEMPERATURE   # shows memory errors and the temperature\nCUDA_LAUNCH_BLOCKING=1 python train.py         "
        "    # does it always fail at the same line?",
    )
