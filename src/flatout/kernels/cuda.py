"""CUDA C++ from a string to a running kernel: NVRTC compiles it, the driver loads it, torch's stream runs it.

It needs no torch header and no nvcc. NVRTC comes with every CUDA build of torch, a kernel compiles in under a
second, nothing depends on the C++ ABI of a torch version, and the driver's interface has been stable since
CUDA 4. The price: a launch goes through ctypes, some microseconds more than a compiled binding (CUDA graphs
pay it once).

Without a GPU, the same text runs in ``emulator.h``, if FLATOUT_EMULATED names a folder of libraries compiled
from it (see ``flatout.launch.compiler``). The emulator shows whether a kernel is correct, never how fast it
is.
"""

import ctypes
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
EMULATED = "FLATOUT_EMULATED"
OPTIONS = ("--std=c++17", "--restrict")
# More needs a request (CUDA C++ Programming Guide, compute capability 7.0 and later).
DEFAULT_SHARED_BYTES = 48 << 10
MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class CudaUnavailable(RuntimeError):
    """There is neither a GPU nor an emulated library, or no NVRTC."""


class CudaError(RuntimeError):
    """The compiler or the driver failed; the message contains its output."""


class CudaSource:
    """One .cu file. Its kernels are ``extern "C" __global__ void name(...)``.

    Their arguments are pointers, ``long long`` and ``float``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions: dict[tuple[int, str], Any] = {}

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def emulated_name(self) -> str:
        """The file name of its emulator library."""
        return f"{self.path.parent.name}_{self.path.stem}.so"

    def kernels(self) -> list[str]:
        """The names of its kernels. Macros that name kernels (``KERNEL(f32, float)``) are expanded."""
        return kernels_in(self.text)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: int,
        arguments: Sequence[Any],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel on the current stream of ``device``.

        Tensors are passed by address, None as a null pointer, int as long long, float as float.
        """
        if 0 in grid:
            return
        c_values = [_as_c(arg) for arg in arguments]
        addresses = (ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in c_values)
        pointers = (ctypes.c_void_p * len(c_values))(*addresses)
        blocks = (*grid, 1, 1)[:3]
        if device.type != "cuda":
            shared = ctypes.c_size_t(shared_bytes)
            if self._emulated().flatout_launch(name.encode(), *blocks, block, shared, pointers):
                raise CudaError(f"{self.path.name} has no kernel {name}; it has {', '.join(self.kernels())}.")
            return
        with torch.cuda.device(device):
            function = self._function(torch.cuda.current_device(), name, shared_bytes)
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            threads = (block, 1, 1)
            _call(name, "cuLaunchKernel", function, *blocks, *threads, shared_bytes, stream, pointers, None)

    def _function(self, index: int, name: str, shared_bytes: int) -> Any:
        """The kernel on the device of this index, which is the current one."""
        key = (index, name)
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            major, minor = torch.cuda.get_device_capability(index)
            image = compile_for(self, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
            torch.cuda.current_stream(index).synchronize()  # makes the primary context current
            _call(self.path.name, "cuModuleLoadData", ctypes.byref(module), image)
            _call(name, "cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._functions[key] = function
        function = self._functions[key]
        if shared_bytes > DEFAULT_SHARED_BYTES:
            _call(name, "cuFuncSetAttribute", function, MAX_SHARED_ATTRIBUTE, shared_bytes)
        return function

    def _emulated(self) -> Any:
        folder = os.environ.get(EMULATED, "")
        path = Path(folder) / self.emulated_name
        if not folder or not path.is_file():
            raise CudaUnavailable(f"{self.path.name} needs a CUDA GPU, and torch sees none here.")
        return _library(str(path))


def kernels_in(text: str) -> list[str]:
    """The names of the ``extern "C"`` kernels of a source.

    ``forward_##suffix`` appears once per suffix of its macro.
    """
    names = []
    for name in re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+(?:##\w+)?)\(', text
    ):
        stem, separator, _ = name.partition("##")
        suffixes = re.findall(r"^KERNELS\((\w+)", text, re.MULTILINE) if separator else [""]
        names += [stem + suffix for suffix in suffixes]
    return names


def is_runnable() -> bool:
    """Whether CUDA C++ can run here, on a GPU or emulated."""
    return torch.cuda.is_available() or bool(os.environ.get(EMULATED))


def compile_for(source: CudaSource, target: str) -> bytes:
    """Machine code (a cubin) for ``target`` ("sm_80"), by NVRTC.

    Raises CudaError with the compiler's output, and CudaUnavailable without NVRTC.
    """
    return _compiled(source.text, source.path.name, target)


@cache
def _compiled(text: str, name: str, target: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    headers = ((HERE / "flatout.cuh").read_bytes(), b"flatout.cuh")
    body, header = ((ctypes.c_char_p * 1)(part) for part in headers)
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 1, body, header)
    options = [option.encode() for option in (f"--gpu-architecture={target}", *OPTIONS)]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    try:
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(
                f"{name} does not compile for {target}: {log.value.decode(errors='replace').strip()}"
            )
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _as_c(arg: torch.Tensor | float | None) -> Any:
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return ctypes.c_longlong(arg) if isinstance(arg, int) else ctypes.c_float(arg)


def _call(subject: str, function: str, *arguments: Any) -> None:
    driver = _library("libcuda.so.1")
    code = getattr(driver, function)(*arguments)
    if code:
        message = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(message))
        description = (message.value or b"unknown error").decode()
        raise CudaError(f"{subject}: the CUDA driver reports: {description} ({code}).")


@cache
def _library(path: str) -> Any:
    return ctypes.CDLL(path)


@cache
def _nvrtc() -> Any:
    """The NVRTC of torch's CUDA version: the loaded one, that of the nvidia wheels, or the toolkit's."""
    if torch.version.cuda is None:
        raise CudaUnavailable("this build of torch has no CUDA, so there is no NVRTC to compile CUDA C++.")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    wheels = sorted(Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}"))
    toolkit = f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/{name}"
    for candidate in (*map(str, wheels), name, toolkit):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaUnavailable(f"{name} was not found; run `pip install nvidia-cuda-nvrtc`.")
