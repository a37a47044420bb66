"""Failures of device setup: no device, the wrong device, or a driver or build that does not fit."""

from __future__ import annotations

import re

from flatout.diagnose.kind import (
    RUNTIME,
    SHORT,
    Diagnosis,
    describe_tensors,
    kind,
    layer,
    match_message,
    on_own_line,
)
from flatout.schema.failure import FailureRecord

DEVICE = r"[a-z]+(?::\d+)?"

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

    What:
        The program runs under `--device`, which redirects the devices that the program passes to torch. This
        use of CUDA does not go through torch, or needs a feature that the other device does not have.
    Why it happens:
        Triton kernels, CUDA extensions, NCCL, NVML and CUDA graphs exist only for GPUs. A tensor still
        reports its real device: `x.device.type == "cuda"` is False on the CPU.
    How to fix it:
        Use the script's path without this feature, usually an option. The last lines of the explanation give
        the next command. Without `--device` the script runs unchanged on a machine with such a device.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
    """
    device = str(failure.facts.get("device") or "")
    if not device or device.startswith("cuda"):
        return None
    for thrown in failure.chain:
        own = thrown.own.text if thrown.own is not None else ""
        if thrown.raised_by_user and "cuda" in own:
            return Diagnosis(
                f"the script compares a device with cuda, but under --device {device} its tensors are on {device}",
                "change or remove this line: a tensor reports its real device",
            )
        seen_at = [own, *(f"{frame.file}:{frame.function}" for frame in thrown.frames if not frame.mine)]
        for what, where, says, why, fix in () if thrown.raised_by_user else NOT_REDIRECTED:
            if any(re.search(where, place) for place in seen_at) or re.match(says, thrown.message, re.DOTALL):
                return Diagnosis(
                    f"--device {device} cannot redirect {what}: {why}", fix.format(device=device)
                )
    return None


@kind("FE001", "two-devices")
def two_devices(failure: FailureRecord) -> Diagnosis | None:
    """Tensors are on two devices.

    What:
        An operation got tensors on different devices. torch never copies between devices implicitly.
    Why it happens:
        A batch was not moved to the device of the model, or a tensor was created inside `forward` without
        `device=`. Or a tensor is a plain attribute of a module, which `.to(device)` does not move.
    How to fix it:
        Move the named tensor to the device of the other: `x = x.to(next(model.parameters()).device)`.
        Register a module's constant with `register_buffer`, so that `.to(device)` moves it.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html
        https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer
    """
    found = match_message(
        failure,
        ("RuntimeError", "NotImplementedError"),
        rf"Expected all tensors to be on the same device, but (?:found at least two devices, (?P<one>{DEVICE}) and (?P<other>{DEVICE})"
        rf"|got (?P<name>\w+) is on (?P<other2>{DEVICE}), different from other tensors on (?P<one2>{DEVICE}))",
        rf"(?P<short>Expected all tensors) to be on the same device(?:, but found at least two devices)?{SHORT}",
        rf"Tensor on device (?P<other>{DEVICE}) is not on the expected device (?P<one>{DEVICE})",
        r"Input type \(torch\.cuda\.(?P<kind>\w+Tensor)\) and (?:weight|bias) type \(torch\.(?P=kind)\)",
        r"Input type \(torch\.(?P<kind2>\w+Tensor)\) and (?:weight|bias) type \(torch\.(?P<weight2>cuda)\.(?P=kind2)\)",
        r"Unhandled FakeTensor Device Propagation for [\w.]+, found two different devices (?P<one>\S+), (?P<other>[a-z]+(?::\d+)?)",
    )
    if found is None:
        return None
    one, other = found["one"] or found["one2"] or "cpu", found["other"] or found["other2"] or "cpu"
    if found["kind"] or found["kind2"]:
        one, other = ("cuda", "cpu") if found["weight2"] else ("cpu", "cuda")
    where = f" in {layer(failure)}" if layer(failure) else ""
    tensors = on_own_line(failure) or failure.tensors
    culprit = next((tensor.name for tensor in tensors if tensor.device == other), found["name"])
    inside = failure.module
    fix = (
        f"{culprit} = {culprit}.to({one!r})"
        if culprit and culprit.isidentifier() and one != "meta"
        else "x = x.to(next(model.parameters()).device)"
    )
    if inside and inside.path and culprit in ("input", "x", ""):
        fix = f"{inside.path}.to(device) and, for the batch, x = x.to(device), with the same device"
    which = "two devices" if found["short"] else f"{one} and on {other}"
    return Diagnosis(f"an operation{where} got tensors on {which}", fix, describe_tensors(tensors, 6))


@kind("FE002", "no-gpu")
def no_gpu(failure: FailureRecord) -> Diagnosis | None:
    """The program requests a GPU and torch sees none.

    What:
        The program requested CUDA. Either no NVIDIA driver answers, or the driver shows no device to this
        process.
    Why it happens:
        The machine has no GPU, the container was started without it (`--gpus all`), CUDA_VISIBLE_DEVICES is
        empty, or the driver is not loaded after a kernel update.
    How to fix it:
        `nvidia-smi` shows whether the driver works. To run on either device, use
        `device = "cuda" if torch.cuda.is_available() else "cpu"`.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices
    """
    found = match_message(
        failure,
        ("RuntimeError", "AssertionError"),
        r"Found no NVIDIA driver on your system(?P<driver>)",
        r"No CUDA GPUs are available(?P<hidden>)",
        r"CUDA error: no CUDA-capable device is detected",
        r"Unexpected error from cudaGetDeviceCount\(\)\.",
        r"CUDA driver initialization failed, you might not have a CUDA gpu",
    )
    if found is None:
        return None
    why = (
        "no NVIDIA driver answers on this machine"
        if "driver" in found.thrown.message[:24]
        else "torch sees no GPU from this process"
    )
    return Diagnosis(
        f"the program requests CUDA, and {why}",
        'device = "cuda" if torch.cuda.is_available() else "cpu"   # and use it instead of "cuda" and .cuda()\n'
        "nvidia-smi                                               # does the driver see a GPU? (container: docker run --gpus all)\n"
        "echo $CUDA_VISIBLE_DEVICES                               # an empty value or -1 hides all GPUs",
    )


@kind("FE006", "no-such-device")
def no_such_device(failure: FailureRecord) -> Diagnosis | None:
    """The device number does not exist.

    What:
        The program named a GPU by a number for which this process sees no device.
    Why it happens:
        More ranks were started than there are GPUs, CUDA_VISIBLE_DEVICES hides some (the rest are numbered
        from 0), or the number is hard-coded in the script or the checkpoint.
    How to fix it:
        Use LOCAL_RANK as the number, start at most `torch.cuda.device_count()` ranks, and count from 0 under
        CUDA_VISIBLE_DEVICES.
    Sources:
        https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "AssertionError"),
        r"CUDA error: invalid device ordinal",
        r"Invalid device id",
        r"Attempting to deserialize object on CUDA device (?P<number>\d+) but torch\.cuda\.device_count\(\) is (?P<count>\d+)",
    )
    if found is None:
        return None
    if found["count"]:
        return Diagnosis(
            f"the checkpoint was saved on GPU {found['number']}, and this process sees {found['count']} GPUs",
            'torch.load(path, map_location="cuda:0")   # or "cpu"',
        )
    rank = (
        f" (this is rank {failure.rank} of {failure.world_size})"
        if failure.rank is not None and failure.world_size
        else ""
    )
    return Diagnosis(
        f"the program named a GPU by a number that this process does not see{rank}",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\ntorchrun --nproc-per-node=$(nvidia-smi -L | wc -l) train.py   # at most one rank per GPU',
    )


@kind("FE007", "cuda-after-fork")
def cuda_after_fork(failure: FailureRecord) -> Diagnosis | None:
    """CUDA was used before the process forked.

    What:
        A forked child tried to use CUDA, and its parent had used it before the fork. A CUDA context cannot be
        forked.
    Why it happens:
        The data set or its collate function uses CUDA in a worker, or processes are forked after `.cuda()`.
        Even `torch.cuda.init()`, or `torch.cuda.is_available()` with some settings, counts as use.
    How to fix it:
        Keep workers on the CPU and move the batch in the training loop. If a child must use CUDA, start it
        with spawn: pass `multiprocessing_context="spawn"` to the loader, or call
        `torch.multiprocessing.set_start_method("spawn")` first under the main guard.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing
    """
    found = match_message(
        failure,
        RUNTIME,
        r"Cannot re-initialize CUDA in forked subprocess",
        r"CUDA error: initialization error(?P<old>)",
    )
    if found is None or (
        found.thrown.message.startswith("CUDA error")
        and not any(one.link == "carried" for one in failure.chain)
    ):
        return None
    return Diagnosis(
        "a forked process uses CUDA, and its parent had used CUDA before the fork",
        'DataLoader(..., multiprocessing_context="spawn")          # if the data set must use CUDA; moving the batch in the loop is better\n'
        'torch.multiprocessing.set_start_method("spawn")           # as the first line under if __name__ == "__main__":',
    )
