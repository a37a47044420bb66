"""Failures of device setup: no device, the wrong device, or a driver, build and GPU that do not fit together."""

import re

from flatout.diagnose.kind import (
    MESSAGE_END,
    Diagnosis,
    Form,
    describe_tensors,
    kind,
    layer,
    match_message,
    pattern_kind,
    tensors_on_line,
)
from flatout.schema.failure import FailureRecord

DEVICE = r"[a-z]+(?::\d+)?"
ERRORS = ("RuntimeError", "AssertionError")

# Uses of CUDA that `--device` cannot redirect. Each row: name, pattern of where it shows (file:function of a
# frame, or the user's line), pattern of its message, reason, next command.
NOT_REDIRECTED = (
    (
        "a Triton kernel",
        r"/triton/(?:runtime|compiler|backends)/",
        r"\d+ active drivers",
        "it is compiled for a GPU",
        "TRITON_INTERPRET=1 flatout run --device {device} python train.py   # Triton's interpreter computes it on the CPU, slowly",
    ),
    (
        "a CUDA extension",
        r"/torch/utils/cpp_extension\.py:.*cuda",
        r"(?:.{0,200}\b(?:CUDA_HOME|nvcc)\b|.{0,80}must be a CUDA tensor)",
        "its kernels run only on a CUDA device",
        "use the script's path without the extension, if there is one; otherwise run it on a machine with a CUDA device",
    ),
    (
        "NCCL",
        r"/torch/cuda/nccl\.py|:_create_nccl",
        r".{0,200}(?:NCCL|nccl)",
        "it connects CUDA devices",
        "flatout run --device {device} python train.py       # as a single process, without torchrun\n"
        'dist.init_process_group("gloo")                   # connects processes on the CPU',
    ),
    (
        "NVML",
        r"/pynvml(?:\.py|/)",
        r"NVML",
        "it reads the counters of the NVIDIA driver",
        "remove the code that reads them: a CPU has none",
    ),
    (
        "CuPy, Numba or PyCUDA",
        r"/(?:cupy|cupyx|cupy_backends|pycuda|numba/cuda)/",
        r"cuda\w+Error",
        "they create CUDA arrays themselves",
        "use NumPy or torch instead, or run it on a machine with a CUDA device",
    ),
    (
        "a CUDA graph",
        r"/torch/cuda/graphs\.py|\bcuda\.(?:CUDAGraph|graph)\b",
        r"CUDA graph",
        "it replays work recorded on a CUDA device",
        "run the step without torch.cuda.CUDAGraph",
    ),
    (
        "a trainer that requests a GPU",
        r"(?!)",
        r".{0,300}(?:No supported gpu backend|CUDAAccelerator|can only be used on CUDA|support bf16/gpu)",
        "it looks for the GPU itself",
        'Trainer(accelerator="auto")         # Lightning\nTrainingArguments(use_cpu=True)       # Hugging Face',
    ),
    (
        "this use of CUDA",
        r"(?!)",
        r"(?:Found no NVIDIA driver|No CUDA GPUs are available|Torch not compiled with CUDA|CUDA error: CUDA driver version is insufficient"
        r"|Unexpected error from cudaGetDeviceCount|CUDA driver initialization failed|invalid argument to exchangeDevice|.{0,200}arguments from the 'CPU' backend"
        r"|.{0,200}(?:supports?|supported|implemented) (?:on|for|with) (?:CUDA|cuda|GPU)s?\b)",
        "it does not go through a torch device",
        "change this line, or run it on a machine with a CUDA device",
    ),
)


@kind("FE000", "not-redirected")
def not_redirected(failure: FailureRecord) -> Diagnosis | None:
    """`--device` cannot redirect this use of CUDA.

    Why it happens:
        `--device` redirects the devices that the program passes to torch. Triton kernels, CUDA extensions,
        NCCL, NVML and CUDA graphs exist only for GPUs. A tensor still reports its real device:
        `x.device.type == "cuda"` is False on the CPU.
    How to fix it:
        Use the script's path without this feature, usually an option. The last lines of the explanation give
        the next command. Without `--device` the script runs unchanged on a machine with such a device.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code"""
    device = str(failure.facts.get("device") or "")
    if not device or device.startswith("cuda"):
        return None
    for error in failure.chain:
        user_line = error.user_frame.text if error.user_frame is not None else ""
        if error.raised_by_user and "cuda" in user_line:
            return Diagnosis(
                f"the script compares a device with cuda, but under --device {device} its tensors are on {device}",
                "change or remove this line: a tensor reports its real device",
            )
        frame_places = [
            user_line,
            *(f"{frame.file}:{frame.function}" for frame in error.frames if not frame.is_user_code),
        ]
        for use, place_pattern, message_pattern, why, fix in () if error.raised_by_user else NOT_REDIRECTED:
            if any(re.search(place_pattern, place) for place in frame_places) or re.match(
                message_pattern, error.message, re.DOTALL
            ):
                return Diagnosis(f"--device {device} cannot redirect {use}: {why}", fix.format(device=device))
    return None


@kind("FE001", "two-devices")
def two_devices(failure: FailureRecord) -> Diagnosis | None:
    """Tensors are on two devices.

    Why it happens:
        A batch was not moved to the device of the model, or a tensor was created inside `forward` without
        `device=`. Or a tensor is a plain attribute of a module, which `.to(device)` does not move.
    How to fix it:
        Move the named tensor to the device of the other: `x = x.to(next(model.parameters()).device)`.
        Register a module's constant with `register_buffer`, so that `.to(device)` moves it.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer"""
    match = match_message(
        failure,
        rf"Expected all tensors to be on the same device, but (?:found at least two devices, (?P<one>{DEVICE}) and (?P<other>{DEVICE})"
        rf"|got (?P<name>\w+) is on (?P<other2>{DEVICE}), different from other tensors on (?P<one2>{DEVICE}))",
        rf"(?P<short>Expected all tensors) to be on the same device(?:, but found at least two devices)?{MESSAGE_END}",
        rf"Tensor on device (?P<other>{DEVICE}) is not on the expected device (?P<one>{DEVICE})",
        r"Input type \(torch\.cuda\.(?P<kind>\w+Tensor)\) and (?:weight|bias) type \(torch\.(?P=kind)\)",
        r"Input type \(torch\.(?P<kind2>\w+Tensor)\) and (?:weight|bias) type \(torch\.(?P<weight2>cuda)\.(?P=kind2)\)",
        r"Unhandled FakeTensor Device Propagation for [\w.]+, found two different devices (?P<one>\S+), (?P<other>[a-z]+(?::\d+)?)",
        types=("RuntimeError", "NotImplementedError"),
    )
    if match is None:
        return None
    expected, actual = match["one"] or match["one2"] or "cpu", match["other"] or match["other2"] or "cpu"
    if match["kind"] or match["kind2"]:
        expected, actual = ("cuda", "cpu") if match["weight2"] else ("cpu", "cuda")
    in_layer = f" in {layer(failure)}" if layer(failure) else ""
    tensors = tensors_on_line(failure) or failure.tensors
    misplaced = next((tensor.name for tensor in tensors if tensor.device == actual), match["name"])
    module = failure.module
    fix = (
        f"{misplaced} = {misplaced}.to({expected!r})"
        if misplaced and misplaced.isidentifier() and expected != "meta"
        else "x = x.to(next(model.parameters()).device)"
    )
    if module and module.path and misplaced in ("input", "x", ""):
        fix = f"{module.path}.to(device) and, for the batch, x = x.to(device), with the same device"
    devices = "two devices" if match["short"] else f"{expected} and on {actual}"
    return Diagnosis(f"an operation{in_layer} got tensors on {devices}", fix, describe_tensors(tensors, 6))


NO_GPU_FIX = (
    'device = "cuda" if torch.cuda.is_available() else "cpu"   # and use it instead of "cuda" and .cuda()\n'
    "nvidia-smi                                               # does the driver see a GPU? (container: docker run --gpus all)\n"
    "echo $CUDA_VISIBLE_DEVICES                               # an empty value or -1 hides all GPUs"
)
no_gpu = pattern_kind(
    "FE002",
    "no-gpu",
    """The program requests a GPU and torch sees none.
    The machine has no GPU, the container was started without it (`--gpus all`), CUDA_VISIBLE_DEVICES is
    empty, or the driver is not loaded after a kernel update.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices""",
    Form(
        "the program requests CUDA, and no NVIDIA driver answers on this machine",
        NO_GPU_FIX,
        r"Found no NVIDIA driver on your system",
    ),
    Form(
        "the program requests CUDA, and torch sees no GPU from this process",
        NO_GPU_FIX,
        r"No CUDA GPUs are available",
        r"CUDA error: no CUDA-capable device is detected",
        r"Unexpected error from cudaGetDeviceCount\(\)\.",
        r"CUDA driver initialization failed, you might not have a CUDA gpu",
    ),
    types=ERRORS,
)

no_cuda_build = pattern_kind(
    "FE003",
    "no-cuda-build",
    """This build of torch has no CUDA support.
    The wheel came from the CPU index (`.../whl/cpu`), the default wheel for this system has no CUDA, or
    another package pulled it in. `flatout doctor` names the build that fits the driver.
    https://pytorch.org/get-started/locally/""",
    Form(
        "the installed torch[[ {torch}]] was built without CUDA, and the program requests it",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128\n"
        'device = "cuda" if torch.cuda.is_available() else "cpu"   # to run on the CPU until then',
        r"Torch not compiled with CUDA enabled",
        r"PyTorch is not linked with support for cuda devices",
    ),
    types=ERRORS,
)


driver_too_old = pattern_kind(
    "FE004",
    "driver-too-old",
    """The NVIDIA driver is too old for this build of torch.
    torch was updated and the driver was not. Within one major version of CUDA old drivers usually work; across
    major versions they never do.
    https://docs.nvidia.com/deploy/cuda-compatibility/""",
    Form(
        "the NVIDIA driver[[, which supports CUDA up to {supports},]] is too old for this build of torch[[ (built for CUDA {cuda})]]",
        "update the NVIDIA driver, or install a torch built for the CUDA version that `nvidia-smi` shows:\n"
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel|cuXYZ}",
        r"The NVIDIA driver on your system is too old \(found version (?P<number>\d+)\)",
        r"CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        r"CUDA error: (?:the provided PTX was compiled with an unsupported toolchain|system has unsupported display driver / cuda driver combination)",
    ),
    types=ERRORS,
    values=lambda _, match: (
        {
            "supports": f"{number // 1000}.{number % 1000 // 10}",
            "wheel": f"cu{number // 1000}{number % 1000 // 10}",
        }
        if (number := match.number("number"))
        else {}
    ),
)

no_kernel_image = pattern_kind(
    "FE005",
    "no-kernel-image",
    """This build has no machine code for the GPU.
    The GPU is newer than the build of torch (or of an extension), or too old for it. An extension is rebuilt
    with TORCH_CUDA_ARCH_LIST set to the GPU's capability.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    https://github.com/pytorch/pytorch/issues/31285""",
    Form(
        "a kernel was launched that was not built for this GPU[[ ({gpu})]][[ of capability {capability}]][[; torch was built for {built_for}]]",
        'python -c "import torch; print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())"   # the list must contain the capability\n'
        "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128                    # the newest GPUs need a new build\n"
        "TORCH_CUDA_ARCH_LIST={capability|X.Y} pip install --no-binary :all: --force-reinstall EXTENSION   # if the kernel is from an extension",
        r"CUDA error: no kernel image is available for execution on the device",
    ),
)

no_such_device = pattern_kind(
    "FE006",
    "no-such-device",
    """The device number does not exist.
    More ranks were started than there are GPUs, CUDA_VISIBLE_DEVICES hides some (the rest are numbered from
    0), or the number is hard-coded in the script or the checkpoint.
    https://docs.pytorch.org/docs/stable/elastic/run.html""",
    Form(
        "the program named a GPU by a number that this process does not see[[ (this is rank {rank})]]",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\ntorchrun --nproc-per-node=$(nvidia-smi -L | wc -l) train.py   # at most one rank per GPU',
        r"CUDA error: invalid device ordinal",
        r"Invalid device id",
    ),
    Form(
        "the checkpoint was saved on GPU {number}, and this process sees {count} GPUs",
        'torch.load(path, map_location="cuda:0")   # or "cpu"',
        r"Attempting to deserialize object on CUDA device (?P<number>\d+) but torch\.cuda\.device_count\(\) is (?P<count>\d+)",
    ),
    types=ERRORS,
    values=lambda failure, _: {"rank": "" if failure.rank is None else str(failure.rank)},
)

cuda_after_fork = pattern_kind(
    "FE007",
    "cuda-after-fork",
    """CUDA was used before the process forked.
    The data set or its collate function uses CUDA in a worker, or processes are forked after `.cuda()`. Even
    `torch.cuda.init()`, or `torch.cuda.is_available()` with some settings, counts as use. Best keep workers on
    the CPU and move the batch in the training loop.
    https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing""",
    Form(
        "a forked process uses CUDA, and its parent had used CUDA before the fork",
        'DataLoader(..., multiprocessing_context="spawn")          # if the data set must use CUDA; moving the batch in the loop is better\n'
        'torch.multiprocessing.set_start_method("spawn")           # as the first line under if __name__ == "__main__":',
        r"Cannot re-initialize CUDA in forked subprocess",
        r"CUDA error: initialization error",
    ),
    when=lambda failure, match: (
        not match.error.message.startswith("CUDA error")
        or any(error.link == "carried" for error in failure.chain)
    ),
)

no_data_on_meta = pattern_kind(
    "FE008",
    "no-data-on-meta",
    """A module on the meta device has no data to move.
    Parameters made under `torch.device("meta")` have shapes, but no storage, so `to()` has nothing to copy.
    https://docs.pytorch.org/docs/stable/meta.html""",
    Form(
        "the module was made on the meta device: its parameters have no data",
        "module = module.to_empty(device=device)            # then initialise or load every parameter\n"
        "module.load_state_dict(state, assign=True)         # or take the tensors of a checkpoint",
        r"Cannot copy out of meta tensor; no data!",
    ),
)
