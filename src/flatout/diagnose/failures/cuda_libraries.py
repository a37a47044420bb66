"""Failures inside the CUDA libraries."""

from flatout.diagnose.kind import Form, pattern_kind

SHOW_LINE = "CUDA_LAUNCH_BLOCKING=1 python train.py            # shows the real line"
CHECK_MEMORY = (
    "nvidia-smi                                        # is the memory full? then use a smaller batch"
)
HIDE_OTHER_LIBRARY = 'echo "$LD_LIBRARY_PATH"                           # remove a folder that hides torch\'s own libraries, but not that of libcuda.so'

cudnn_error = pattern_kind(
    "FE050",
    "cudnn-error",
    """cuDNN reports an error.
    Often the GPU's memory is full (NOT_INITIALIZED, ALLOC_FAILED, INTERNAL_ERROR) or an earlier kernel failed
    (EXECUTION_FAILED, MAPPING_ERROR). Or another cuDNN on LD_LIBRARY_PATH hides torch's own, or sizes or
    dtypes are not supported. `torch.backends.cudnn.enabled = False` shows whether cuDNN is the cause.
    https://docs.pytorch.org/docs/stable/backends.html#module-torch.backends.cudnn""",
    Form(
        "a cuDNN other than torch's own was loaded: {why}",
        HIDE_OTHER_LIBRARY,
        r"cuDNN version incompatibility: (?P<why>[^\n]{0,160})",
    ),
    Form(
        "cuDNN reports {status|no algorithm found}[[ in {layer}]]; most often the GPU's memory is full",
        f"{CHECK_MEMORY}\n{SHOW_LINE}\n{HIDE_OTHER_LIBRARY}",
        r"cuDNN error: (?P<status>\w*(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR)\w*)",
        r"(?P<status>GET was unable to find an engine to execute this computation)",
        r"Unable to find a valid cuDNN algorithm to run convolution",
    ),
    Form(
        "cuDNN reports {status}[[ in {layer}]]; most often an earlier kernel failed, or the sizes are not supported",
        f"{SHOW_LINE}\n{HIDE_OTHER_LIBRARY}",
        r"(?:cuDNN|miopen) error: (?P<status>\w+)",
        r"cuDNN Frontend error: (?P<status>[^\n]+)",
    ),
)

CUBLAS_ERROR = r"CUDA error: (?P<status>CUBLAS_STATUS_(?:{}\w*)) when calling `?(?P<call>\w+)"
cublas_error = pattern_kind(
    "FE051",
    "cublas-error",
    """cuBLAS reports an error.
    ALLOC_FAILED and NOT_INITIALIZED: the GPU's memory is full. EXECUTION_FAILED and INTERNAL_ERROR: an earlier
    kernel failed, very often because a label or a token is out of range. INVALID_VALUE and NOT_SUPPORTED:
    another cuBLAS on LD_LIBRARY_PATH, or sizes that do not fit.
    https://docs.nvidia.com/cuda/cublas/#cublasstatus-t""",
    Form(
        "cuBLAS reports {status} in `{call}`[[ in {layer}]]; most often the GPU's memory is full",
        f"{CHECK_MEMORY}\n{SHOW_LINE}",
        CUBLAS_ERROR.format("ALLOC_FAILED|NOT_INITIALIZED"),
    ),
    Form(
        "cuBLAS reports {status} in `{call}`[[ in {layer}]]; most often a cuBLAS other than torch's own is loaded",
        f"{HIDE_OTHER_LIBRARY}\n{SHOW_LINE}",
        CUBLAS_ERROR.format("INVALID_VALUE|NOT_SUPPORTED"),
    ),
    Form(
        "cuBLAS reports {status} in `{call}`[[ in {layer}]]; most often an earlier kernel failed: a label or a token out of range",
        f"model.cpu()(batch.cpu())                          # the CPU names an index that is out of range\n{SHOW_LINE}",
        CUBLAS_ERROR.format(""),
    ),
)

illegal_memory_access = pattern_kind(
    "FE052",
    "illegal-memory-access",
    """A kernel accessed memory outside its bounds.
    An index is out of range and no assertion guards it. A custom kernel is wrong, or an extension was built
    for another GPU or torch. One kernel gets tensors of two devices, or a tensor of more than 2^31 elements
    with 32-bit indices. The GPU reports it late, and this process can no longer use the GPU.
    https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html""",
    Form(
        "a kernel read or wrote outside of its memory[[ ({layer} was running when the GPU reported it)]]; the real error may be before the line below",
        f"{SHOW_LINE}\ncompute-sanitizer python train.py                 # names the kernel\n"
        "run one step on the CPU                           # the CPU names an index that is out of range",
        r".{0,120}?(?:CUDA|HIP|Triton) [Ee]rror(?: \[CUDA\])?: (?:an illegal memory access was encountered|misaligned address)",
        r"\w+: failed to synchronize: cudaErrorIllegalAddress",
    ),
)

gpu_fault = pattern_kind(
    "FE053",
    "gpu-fault",
    """The GPU or its driver reported a fault.
    Heat, power or a defect; sometimes a kernel exceeds the time limit of a desktop's driver. Do not use the
    GPU until the fault is known.
    https://docs.nvidia.com/deploy/xid-errors/""",
    Form(
        "the GPU is in use: another process has exclusive access, or a MIG slice is missing",
        "nvidia-smi -q | grep -i 'compute mode'; nvidia-smi   # which process uses it?",
        r"CUDA error: all CUDA-capable devices are busy or unavailable",
    ),
    Form(
        "the GPU or its driver reports: {what}",
        "dmesg | grep -i xid                               # names the fault\n"
        f"nvidia-smi -q -d ECC,PAGE_RETIREMENT,TEMPERATURE  # shows memory errors and the temperature\n{SHOW_LINE}",
        r"CUDA error: (?P<what>uncorrectable (?:ECC|NVLink) error encountered|unspecified launch failure|the launch timed out and was terminated|GPU is lost|"
        r"hardware stack error|unknown error|device not ready)",
    ),
)
