"""Fenced memory and the emulator: an access one element too far ends the process."""

import ctypes
import faulthandler
import os
import signal

import pytest

torch = pytest.importorskip("torch")

from flatout.kernels.cuda import CudaError, CudaSource, CudaUnavailable, compile_for  # noqa: E402
from flatout.kernels.gate import Fenced, fenced  # noqa: E402
from flatout.launch.compiler import emulate  # noqa: E402

pytestmark = pytest.mark.processes


def end_of(act):
    """The name of the signal that ends a copy of this process, or nothing."""
    copy = os.fork()
    if not copy:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        act()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    return signal.Signals(-code).name if code < 0 else ""


@pytest.mark.parametrize("at_end", [True, False])
def test_a_copy_is_the_same_tensor(at_end):
    for tensor in (
        torch.randn(3, 5),
        torch.randn(4, 6).t()[::2],
        torch.arange(7, dtype=torch.uint8),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1).expand(4),
    ):
        copy = fenced(tensor, at_end)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.dtype is tensor.dtype


@pytest.mark.parametrize(
    ("at_end", "at", "dies"), [(True, 36, False), (True, 37, True), (False, 0, False), (False, -1, True)]
)
def test_one_element_too_far(at_end, at, dies):
    tensor = fenced(torch.randn(37).half(), at_end)
    assert end_of(lambda: ctypes.string_at(tensor.data_ptr() + at * 2, 2)) == ("SIGSEGV" if dies else "")


def test_allocations_of_a_function_are_fenced_and_poisoned():
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    torch.library.custom_op("flatout_test::forgets_to_write", function, mutates_args=())
    with Fenced({"flatout_test::forgets_to_write": function}, at_end=True):
        made = torch.ops.flatout_test.forgets_to_write(torch.randn(5))
    assert made.isnan().all()
    assert (made.data_ptr() + 5 * 4) % os.sysconf("SC_PAGESIZE") == 0


# -- the emulator

SOURCE = """
#include "flatout.cuh"
extern "C" __global__ void reversed(const float* x, float* y, long long n) {
    FLATOUT_SHARED(float, held);
    held[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = held[n - 1 - threadIdx.x];
}
extern "C" __global__ void no_barrier(const float* x, float* y, long long n) {
    FLATOUT_SHARED(float, held);
    held[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = held[n - 1 - threadIdx.x];
}
extern "C" __global__ void total(const float* x, float* y, long long n) { float s = block_sum(x[threadIdx.x]); if (threadIdx.x == 0) y[0] = s; }
extern "C" __global__ void half_a_block(const float* x, float* y, long long n) { if (threadIdx.x < 40) __syncthreads(); y[threadIdx.x] = 1; }
extern "C" __global__ void beyond_shared(const float* x, float* y, long long n) { FLATOUT_SHARED(float, held); held[n] = 1; }
extern "C" __global__ void types(const half_t* h, bfloat_t* b) { b[threadIdx.x] = rounded<bfloat_t>(to_float(h[threadIdx.x])); }
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "faults.cu"
    path.write_text(SOURCE)
    made = CudaSource(path)
    assert emulate(path, path.parent / made.emulated_name, made.kernels()) == ""
    return made


def test_the_emulator_runs_right_kernels_and_ends_wrong_ones(source, monkeypatch):
    monkeypatch.setenv("FLATOUT_EMULATED", str(source.path.parent))
    x, y = torch.arange(64.0), torch.zeros(64)
    source.launch("reversed", (1,), 64, (x, y, 64), x.device, shared_bytes=256)
    assert torch.equal(y, x.flip(0))
    source.launch("total", (1,), 64, (x, y, 64), x.device)
    assert y[0] == x.sum()
    source.launch("no_barrier", (1,), 64, (x, y, 64), x.device, shared_bytes=256)
    assert not torch.equal(y, x.flip(0))  # read before it was written: NaN
    with pytest.raises(CudaError, match="has no kernel nope; it has reversed"):
        source.launch("nope", (1,), 64, (x, y, 64), x.device)
    values = torch.tensor([1.0, -2.5, 65504.0, 6e-8, float("inf"), float("nan"), 1.00390625, 3.3]).half()
    made = torch.zeros(8, dtype=torch.bfloat16)
    source.launch("types", (1,), 8, (values, made), values.device)
    assert torch.equal(made, values.bfloat16()) or bool(((made == values.bfloat16()) | made.isnan()).all())
    assert made.isnan().tolist() == values.isnan().tolist()


@pytest.mark.parametrize(
    ("kernel", "signal_name"), [("half_a_block", "SIGABRT"), ("beyond_shared", "SIGSEGV"), ("total", "")]
)
def test_a_fault_ends_the_process(source, kernel, signal_name, monkeypatch):
    """A barrier that half of the block never reaches; a write beyond shared memory."""
    monkeypatch.setenv("FLATOUT_EMULATED", str(source.path.parent))
    x, y = torch.arange(64.0), torch.zeros(64)
    assert (
        end_of(lambda: source.launch(kernel, (1,), 64, (x, y, 64), x.device, shared_bytes=256)) == signal_name
    )


def test_without_a_gpu_and_without_a_library(source, monkeypatch):
    monkeypatch.delenv("FLATOUT_EMULATED", raising=False)
    with pytest.raises(CudaUnavailable, match=r"faults\.cu needs a CUDA GPU"):
        source.launch("total", (1,), 64, (torch.zeros(64), torch.zeros(64), 64), torch.device("cpu"))
    source.launch("total", (0,), 64, (), torch.device("cpu"))  # no work needs no GPU


def test_the_compilers_messages(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text(
        '#include "flatout.cuh"\nextern "C" __global__ void f(float* x) { x[0] = undefined_name; }\n'
    )
    if torch.version.cuda:
        with pytest.raises(CudaError, match="undefined_name"):
            compile_for(CudaSource(path), "sm_80")
    assert "undefined_name" in emulate(path, tmp_path / "x.so", ["f"])
