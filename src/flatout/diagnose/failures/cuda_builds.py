"""A torch build, a driver and GPUs that do not fit together."""

from __future__ import annotations

from flatout.diagnose.kind import (
    RUNTIME,
    Diagnosis,
    kind,
    match_message,
    search_log,
)
from flatout.schema.failure import FailureRecord


@kind("FE003", "no-cuda-build")
def no_cuda_build(failure: FailureRecord) -> Diagnosis | None:
    """This build of torch has no CUDA support.

    What:
        The program requested CUDA, and the installed torch was built for the CPU only.
    Why it happens:
        The wheel came from the CPU index (`.../whl/cpu`), the default wheel for this system has no CUDA, or
        another package pulled it in.
    How to fix it:
        Install the build that fits the driver: `pip install --force-reinstall torch --index-url
        https://download.pytorch.org/whl/cu128`. `python -c "import torch; print(torch.__version__,
        torch.version.cuda)"` shows the installed build.
    Sources:
        https://pytorch.org/get-started/locally/
    """
    found = match_message(
        failure,
        ("AssertionError", "RuntimeError"),
        r"Torch not compiled with CUDA enabled",
        r"PyTorch is not linked with support for cuda devices",
    )
    if found is None:
        return None
    version = failure.facts.get("torch", "")
    return Diagnosis(
        f"the installed torch{' ' + version if version else ''} was built without CUDA, and the program requests it",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128\n"
        'device = "cuda" if torch.cuda.is_available() else "cpu"   # to run on the CPU until then',
    )


@kind("FE004", "driver-too-old")
def driver_too_old(failure: FailureRecord) -> Diagnosis | None:
    """The NVIDIA driver is too old for this build of torch.

    What:
        The driver supports CUDA up to the named version, and torch was built with a newer one.
    Why it happens:
        torch was updated and the driver was not. Within one major version of CUDA old drivers usually work;
        across major versions they never do.
    How to fix it:
        Update the driver, or install the build of torch for the CUDA version that `nvidia-smi` shows at the
        top right.
    Sources:
        https://docs.nvidia.com/deploy/cuda-compatibility/
    """
    found = match_message(
        failure,
        ("RuntimeError", "AssertionError"),
        r"The NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
        r"CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        r"CUDA error: (?:the provided PTX was compiled with an unsupported toolchain|system has unsupported display driver / cuda driver combination)",
    )
    if found is None:
        return None
    number = found.number("found")
    upto = f", which supports CUDA up to {number // 1000}.{number % 1000 // 10}," if number else ""
    wheel = f"cu{number // 1000}{number % 1000 // 10}" if number else "cuXYZ"
    built = f" (built for CUDA {failure.facts['cuda']})" if failure.facts.get("cuda") else ""
    return Diagnosis(
        f"the NVIDIA driver{upto} is too old for this build of torch{built}",
        "update the NVIDIA driver, or install a torch built for the CUDA version that `nvidia-smi` shows:\n"
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}",
    )


@kind("FE005", "no-kernel-image")
def no_kernel_image(failure: FailureRecord) -> Diagnosis | None:
    """This build has no machine code for the GPU.

    What:
        A kernel was launched for which the binary has no code that this GPU can run.
    Why it happens:
        The GPU is newer than the build of torch (or of an extension), or too old for it.
    How to fix it:
        Compare `torch.cuda.get_device_capability()` with `torch.cuda.get_arch_list()`. Install a build that
        lists the GPU's architecture. Rebuild an extension with `TORCH_CUDA_ARCH_LIST` set to it.
    Sources:
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        https://github.com/pytorch/pytorch/issues/31285
    """
    found = match_message(
        failure, RUNTIME, r"CUDA error: no kernel image is available for execution on the device"
    )
    warned = search_log(
        failure,
        r"with CUDA capability sm_(?P<capability>\d+) is not compatible with the current PyTorch installation",
    )
    if found is None:
        return None
    facts = failure.facts
    capability = facts.get("capability") or (
        f"{warned['capability'][:-1]}.{warned['capability'][-1]}" if warned else ""
    )
    gpu = (
        f"this GPU ({facts['gpu']}, capability {capability})"
        if facts.get("gpu")
        else f"this GPU (capability {capability})"
        if capability
        else "this GPU"
    )
    built = (
        [f"torch {facts.get('torch', '')} was built for {facts['built_for']}"]
        if facts.get("built_for")
        else []
    )
    return Diagnosis(
        f"a kernel was launched that was not built for {gpu}",
        'python -c "import torch; print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())"   # the list must contain the capability\n'
        "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128                    # the newest GPUs need a new build\n"
        f"TORCH_CUDA_ARCH_LIST={capability or 'X.Y'} pip install --no-binary :all: --force-reinstall EXTENSION   # if the kernel is from an extension",
        built,
    )
