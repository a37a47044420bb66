"""The gate: conditions that a kernel must meet before use.

It computes and returns records; it prints, times and starts nothing.

    values          outputs and gradients of every case against the reference in float64 (bounds
                    that follow from the type and the length of the sums)
    determinism     bitwise equal outputs and gradients
    memory          every case with each buffer against a protected page, at its end and at its beginning
                    (`fenced`); on a GPU, compute-sanitizer runs the same cases
    opcheck         torch.library.opcheck on the operators, with the arguments from the cases
    gradcheck       numerical against analytical gradients in float64, for implementations that support it
    compiles        CUDA C++ for sm_80 and sm_90a
    rejects ...     each known-wrong variant must fail ``values``; a gate that accepts one is itself broken

The gate runs in a child process (``python -m flatout.kernels``), because kernels may crash. A check that ends
the process has failed.
"""

import ctypes
import math
import mmap
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flatout.kernels import NAMES, cuda
from flatout.kernels.kernel import Case, Function, Implementation, Inputs, Kernel, has_triton, tensors_of

# Detect out-of-bounds access: each tensor ends (or begins) at a protected page.
#
# A kernel that reads or writes one element too far ends the process with SIGSEGV at that instruction. Memory
# that a kernel allocates is fenced as well and filled with NaN, which reveals elements that it never writes.
# This works on a CPU only: Triton's interpreter, the CUDA emulator, and plain code. On a GPU, compute-sanitizer
# does this.

PAGE_BYTES = mmap.PAGESIZE
POISON_BYTE = 0x7F  # for types that are not floating: far from any sensible number
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FILLED_ALLOCATIONS = {
    *["zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like"]
}
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(tensor: torch.Tensor, at_end: bool = True) -> torch.Tensor:
    """A copy with the same sizes and strides, with a protected page at its end or at its beginning."""
    if tensor.numel() == 0:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = extent * tensor.element_size()
    data_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES
    buffer = mmap.mmap(-1, data_bytes + PAGE_BYTES)
    guard_offset = data_bytes if at_end else 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    flat = torch.frombuffer(
        buffer, dtype=tensor.dtype, count=extent, offset=data_bytes - size if at_end else PAGE_BYTES
    )
    if _libc.mprotect(ctypes.c_void_p(address + guard_offset), ctypes.c_size_t(PAGE_BYTES), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat.copy_(tensor.detach().as_strided((extent,), (1,)))  # including gaps between elements
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


class Fenced(TorchDispatchMode):
    """While active, fences the allocations of the given operators' functions.

    ``functions``: by operator name.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], at_end: bool) -> None:
        super().__init__()
        self._functions, self._at_end = functions, at_end

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().rpartition(".")[0] if "." in function.name() else function.name()
        python_function = self._functions.get(name)
        if python_function is not None:  # call the function itself, to fence its allocations
            with self:
                return python_function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        operator = name.removeprefix("aten::")
        if operator not in ALLOCATIONS | FILLED_ALLOCATIONS or result.device.type != "cpu":
            return result
        if operator in ALLOCATIONS and result.numel():
            result.view(torch.uint8).fill_(
                POISON_BYTE
            ) if not result.is_floating_point() and result.dtype is not torch.bool else result.fill_(
                float("nan")
            )
        return fenced(result, self._at_end)


# Evaluate a kernel's function on a case, and compare outputs and gradients with the reference in float64.
#
# Two things round: the storage type, once or a few times per output (relative to that output), and the sums,
# which are kept in float32 or better (relative to the largest output). n random roundings add up like sqrt(n):
# Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019. So
#
# |result - float64|  <=  MAX_ULPS * u(dtype) * |float64|
# +  (inner_roundings * u(dtype) + SUM_SLACK * u(sums) * (1 + sqrt(terms))) * max |float64|
#
# If all of the exact result is zero (the gradient of a row of one element), its terms cancel, and each of them is
# rounded. The scale is then that of the other results.
# ``inner_roundings`` counts the values inside the formula that are rounded to the storage type before further
# use, and u is the unit roundoff. No limit is tuned by hand for a kernel.

MAX_ULPS = 4.0  # roundings in the storage type per output
SUM_SLACK = 8.0


class CheckFailed(Exception):
    """A check failed; the message says why."""


@dataclass(frozen=True)
class Distance:
    """``error_ratio`` is the largest error as a share of the allowed error; at most 1 passes."""

    error_ratio: float
    position: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0


def distance(
    result: torch.Tensor,
    expected: torch.Tensor,
    terms: int,
    inner_roundings: float = 0.0,
    input_dtype: torch.dtype | None = None,
    other_scale: float = 0.0,
) -> Distance:
    """The distance of ``result`` from the float64 tensor ``expected`` of the same shape.

    NaN equals only NaN, and an infinity only itself. ``input_dtype`` is the type of the inputs, if coarser than
    the result's. ``other_scale`` replaces the largest value of ``expected`` if that is zero.
    """
    if result.numel() == 0:
        return Distance(0.0)
    sum_dtype = torch.promote_types(result.dtype, torch.float32)
    actual = result.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    scale = _scale(expected) or other_scale
    u = max(torch.finfo(dtype).eps / 2 for dtype in (result.dtype, input_dtype or result.dtype))
    sum_error = SUM_SLACK * torch.finfo(sum_dtype).eps / 2 * (1 + math.sqrt(terms))
    allowed = MAX_ULPS * u * expected.abs() + (inner_roundings * u + sum_error) * scale
    smallest_step = torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
    ratio = torch.where(equal, 0.0, (actual - expected).abs() / (allowed + smallest_step))
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    worst = ratio.argmax()
    indices = torch.unravel_index(worst, ratio.shape) if ratio.dim() else ()
    ratio, actual, expected = (float(tensor.flatten()[worst]) for tensor in (ratio, actual, expected))
    return Distance(ratio, tuple(map(int, indices)), actual, expected)


def _scale(expected: torch.Tensor) -> float:
    finite = expected.detach()[expected.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare(kernel: Kernel, case: Case, seed: int, call: Function) -> float:
    """The largest error as a share of the allowed error. Raises CheckFailed with the position if it exceeds 1."""
    expected = evaluate(kernel.reference, in_double(inputs_of(case, seed)), case, seed)
    results = run_case(call, case, seed)
    if len(results) != len(expected):
        raise CheckFailed(f"{case.title}: {len(results)} results, but the reference has {len(expected)}")
    other_scale = max(map(_scale, expected), default=0.0)
    outputs, max_ratio = len(results) - len(case.differentiate), 0.0
    for index, (result, expected_result) in enumerate(zip(results, expected, strict=True)):
        title = f"output {index}" if index < outputs else f"gradient of {case.differentiate[index - outputs]}"
        if result.shape != expected_result.shape:
            raise CheckFailed(
                f"{case.title}: {title} has shape {tuple(result.shape)}, not {tuple(expected_result.shape)}"
            )
        error = distance(result, expected_result, case.terms, case.inner_roundings, case.dtype, other_scale)
        if error.error_ratio > 1:
            raise CheckFailed(
                f"{case.title}: {title} at {error.position} is {error.got:.9g}, not {error.expected:.9g} ({error.error_ratio:.3g} times the allowed error)"
            )
        max_ratio = max(max_ratio, error.error_ratio)
    return max_ratio


def run_case(call: Function, case: Case, seed: int) -> list[torch.Tensor]:
    return evaluate(call, on_device(inputs_of(case, seed)), case, seed)


def evaluate(call: Function, inputs: Inputs, case: Case, seed: int) -> list[torch.Tensor]:
    """Outputs, then gradients of the differentiated inputs.

    Output gradients are drawn from the case's seed.
    """
    leaves = [inputs[name].requires_grad_() for name in case.differentiate]
    outputs = tensors_of(call(**inputs))
    results = [output.detach() for output in outputs]
    if leaves:
        generator = torch.Generator().manual_seed(1000 + seed)
        differentiable = [output for output in outputs if output.requires_grad]
        grad_outputs = [
            torch.randn(output.shape, generator=generator).to(case.dtype).to(output.device, output.dtype)
            for output in differentiable
        ]
        grads = torch.autograd.grad(
            differentiable, leaves, grad_outputs, allow_unused=True, materialize_grads=True
        )
        results += grads
    return results


def inputs_of(case: Case, seed: int) -> Inputs:
    return case.make(torch.Generator().manual_seed(seed))


def on_device(inputs: Inputs) -> Inputs:
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs) if torch.cuda.is_available() else inputs


def in_double(inputs: Inputs) -> Inputs:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs
    )


TARGETS = ("sm_80", "sm_90a")
SANITIZED = "FLATOUT_SANITIZED"  # set in a child that runs under compute-sanitizer
GRADCHECK_ELEMENTS = 400  # in all inputs of a case together
GRADCHECK_CASES = 3
OPCHECK_CALLS = 2  # argument sets per operator


@dataclass(frozen=True)
class GateCheck:
    """The outcome of one check: "ok", "failed" or "not run".

    ``why`` is a sentence. For "ok", it says what was done, if useful.
    """

    name: str
    status: str
    why: str = ""


class NotRun(Exception):
    """A check cannot run here; the message is the reason."""


def checks(kernel: Kernel) -> list[tuple[str, Callable[[], str]]]:
    """The checks of a kernel by name, in order. A function returns a remark, or raises CheckFailed or NotRun."""
    gpu, all_checks = torch.cuda.is_available(), list[tuple[str, Callable[[], str]]]()
    for implementation in kernel.implementations:
        mode = (
            "" if gpu else {"triton": " (interpreter)", "cuda": " (emulated)"}.get(implementation.needs, "")
        )
        title = f"{implementation.name}{mode}"
        all_checks += [
            (f"{title}: values", partial(values, kernel, implementation)),
            (f"{title}: determinism", partial(determinism, kernel, implementation)),
            (f"{title}: memory", partial(memory, kernel, implementation)),
        ]
        if torch.float64 in implementation.dtypes and any(case.differentiate for case in kernel.cases()):
            all_checks.append((f"{title}: gradcheck", partial(gradcheck, kernel, implementation)))
        if implementation.needs and not gpu:
            all_checks.append(
                (f"{implementation.name} on a GPU", partial(not_run, "torch sees no CUDA device here"))
            )
    all_checks += [(f"opcheck {name}", partial(opcheck, kernel, name)) for name in kernel.operators]
    all_checks += [
        (f"{source.path.name} compiles for {target}", partial(compiles, source, target))
        for source in kernel.sources
        for target in TARGETS
    ]
    all_checks += [
        (f"rejects {name}", partial(rejects, kernel, variant)) for name, variant in kernel.wrong.items()
    ]
    if not kernel.wrong and kernel.name not in NAMES:  # theirs are in tests/kernels/wrong
        reason = (
            "there is no known-wrong variant, so it is unknown whether these cases would detect a mistake"
        )
        all_checks.append(("rejects wrong variants", partial(not_run, reason)))
    return all_checks


def run(name: str, check: Callable[[], str]) -> GateCheck:
    """Run one check."""
    try:
        return GateCheck(name, "ok", check())
    except CheckFailed as failed:
        return GateCheck(name, "failed", str(failed))
    except (NotRun, cuda.CudaUnavailable) as reason:
        return GateCheck(name, "not run", str(reason))
    except Exception as error:  # any exception of the kernel is a failure
        return GateCheck(name, "failed", f"it raised {type(error).__name__}: {_one_line(error)}")


# -- the checks


def values(kernel: Kernel, implementation: Implementation) -> str:
    ratios = [
        compare(kernel, case, seed, implementation.call) for seed, case in _cases(kernel, implementation)
    ]
    return f"{len(ratios)} cases, at most {100 * max(ratios, default=0.0):.0f} % of the allowed error"


def determinism(kernel: Kernel, implementation: Implementation) -> str:
    for seed, case in _cases(kernel, implementation):
        one, two = (run_case(implementation.call, case, seed) for _ in range(2))
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            if not torch.equal(_bytes(a), _bytes(b)):
                raise CheckFailed(
                    f"{case.title}: result {index} differs between two calls with the same inputs; does a sum have no fixed order (atomics)?"
                )
    return ""


def memory(kernel: Kernel, implementation: Implementation) -> str:
    cases = _cases(kernel, implementation)
    if torch.cuda.is_available() and implementation.needs:
        if not os.environ.get(SANITIZED):
            raise NotRun("compute-sanitizer was not found; it comes with the CUDA toolkit")
        for seed, case in cases:
            run_case(implementation.call, case, seed)
        torch.cuda.synchronize()
        return "under compute-sanitizer"
    for at_end in (True, False):
        for seed, case in cases:
            inputs = tree_map_only(torch.Tensor, partial(fenced, at_end=at_end), inputs_of(case, seed))
            with Fenced(kernel.operators, at_end):
                evaluate(implementation.call, inputs, case, seed)
    return "every buffer against a protected page, at its end and at its beginning"


def gradcheck(kernel: Kernel, implementation: Implementation) -> str:
    """Check the smallest cases in float64, whatever their declared type."""
    checked = 0
    for seed, case in enumerate(kernel.cases()):
        if case.bench or not case.differentiate or checked == GRADCHECK_CASES:
            continue
        inputs = in_double(inputs_of(case, seed))
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
        size = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        if not 0 < size <= GRADCHECK_ELEMENTS:
            continue
        if not all(bool(output.isfinite().all()) for output in tensors_of(kernel.reference(**inputs))):
            continue  # there is no finite slope to measure

        def of_leaves(*leaves: torch.Tensor, inputs: Inputs = inputs, case: Case = case) -> Any:
            named = dict(zip(case.differentiate, leaves, strict=True))
            return tensors_of(implementation.call(**{**inputs, **named}))

        try:
            leaves = [inputs[name].requires_grad_() for name in case.differentiate]
            torch.autograd.gradcheck(of_leaves, leaves, fast_mode=True)
        except GradcheckError as error:
            raise CheckFailed(f"{case.title}: {_one_line(error)}") from None
        checked += 1
    if not checked:
        raise NotRun(f"no case has at most {GRADCHECK_ELEMENTS} elements")
    return f"{checked} cases"


def opcheck(kernel: Kernel, name: str) -> str:
    calls: list[Any] = []
    for implementation in kernel.implementations:
        try:
            cases = _cases(kernel, implementation)[:3]
        except NotRun:
            continue
        for seed, case in cases:
            inputs = on_device(inputs_of(case, seed))
            with _CallRecorder(name) as recorder:
                evaluate(implementation.call, inputs, replace(case, differentiate=()), seed)
                forward = bool(recorder.calls)
                evaluate(implementation.call, inputs, case, seed)
            # An operator that only the backward pass calls need not be differentiable itself.
            leaves = {id(inputs[name]) for name in case.differentiate} if forward else set()
            calls += [
                tree_map_only(
                    torch.Tensor,
                    lambda tensor, leaves=leaves: (
                        tensor.detach().clone().requires_grad_(id(tensor) in leaves)
                    ),
                    call,
                )
                for call in recorder.calls[:1]
            ]
    if not calls:
        raise CheckFailed(f"no case calls the operator {name}")
    for function, args, kwargs in calls[:OPCHECK_CALLS]:
        try:
            torch.library.opcheck(function, args, kwargs)
        except Exception as error:  # its own class is not public
            raise CheckFailed(_one_line(error)) from None
    return f"{len(calls[:OPCHECK_CALLS])} calls"


def compiles(source: cuda.CudaSource, target: str) -> str:
    try:
        return f"NVRTC, {len(cuda.compile_for(source, target)):,} bytes"
    except cuda.CudaError as error:
        raise CheckFailed(str(error)) from None


def rejects(kernel: Kernel, variant: Function) -> str:
    """A known-wrong variant must fail ``values`` by its numbers.

    A variant that raises proves nothing about the gate.
    """
    for seed, case in enumerate(kernel.cases()):
        if case.bench:
            continue
        try:
            compare(kernel, case, seed, variant)
        except CheckFailed as failure:
            return f"rejected: {failure}"
    raise CheckFailed("the gate accepted this wrong variant: add a case that reveals its mistake")


def not_run(reason: str) -> str:
    raise NotRun(reason)


# -- shared helpers


class _CallRecorder(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().partition(".")[0] == self._name:
            self.calls.append((function, args, dict(kwargs or {})))
        return function(*args, **(kwargs or {}))


def _cases(kernel: Kernel, implementation: Implementation) -> list[tuple[int, Case]]:
    gpu = torch.cuda.is_available()
    if implementation.needs == "triton":
        if not has_triton():
            raise NotRun("Triton is not installed; it comes with CUDA builds of torch")
        if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise NotRun(
                "there is no GPU, and Triton's interpreter is off; set TRITON_INTERPRET=1 before Triton is imported"
            )
        if not gpu and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
            raise NotRun(
                "the interpreter of Triton before 3.7 reads loop bounds from NumPy in a way that NumPy 2.4 rejects; "
                'run `pip install "numpy<2.4"`'
            )
    if implementation.needs == "cuda" and not cuda.is_runnable():
        raise NotRun("there is no GPU and no C++ compiler to emulate one; run `apt-get install g++`")
    return [
        (seed, case)
        for seed, case in enumerate(kernel.cases())
        if not case.bench and case.dtype in implementation.dtypes
    ]


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", import_module(package).__version__)[:2])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare by their bits as well."""
    return tensor.detach().cpu().contiguous().flatten().unsqueeze(-1).view(torch.uint8).flatten()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
