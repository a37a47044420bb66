"""Keep the operators of CUDA's autocast list in float32 on every device.

torch.autocast("cpu") has a shorter list than torch.autocast("cuda"). There, softmax, log_softmax, layer_norm,
exp, log, pow, sum, norm and others return bfloat16 (torch 2.14), so a loss computed from them has 8
significant bits. ``keep_float32`` registers the missing kernels at the dispatch key of the CPU's autocast.
While autocast is on, every call passes that key: functions, methods, TorchScript, checkpoints, and graphs as
they are traced. No other call does. A kernel converts its inputs and calls the operator again with that key
excluded, as torch's own kernels do.

CUDA's list is read from this torch. One operator is added on all devices: the mean over all elements. Its sum is in
CUDA's list, and it is usually a loss."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import Lock
from types import ModuleType
from typing import Any

from flatout.schema.program import Ledger

# Operators that CUDA's autocast runs in half precision, without a kernel for the CPU's. All others that only CUDA's
# list has stay in float32; so an unknown operator of a later torch does as well.
HALF_PRECISION = {
    "aten::_convolution",
    "aten::_cudnn_rnn",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
    "aten::addmv",
    "aten::addr",
    "aten::chain_matmul",
    "aten::convolution",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::einsum",
    "aten::gru_cell",
    "aten::linalg_multi_dot",
    "aten::lstm_cell",
    "aten::mv",
    "aten::rnn_relu_cell",
    "aten::rnn_tanh_cell",
}
# AT_FORALL_PROMOTE. Most of them expect one dtype and would raise if float32 from above meets bfloat16.
PROMOTED = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
}
EXTRA_FLOAT32 = "aten::mean"
CACHE_TAG = "flatout: float32 as autocast of CUDA"
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

Kernel = Callable[..., Any]


class _Registration:
    """The kernels of one dispatch key. They belong to the process, so all concurrent users share them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._undo = ExitStack()

    def begin(self, torch: ModuleType, key: str) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                library = torch.library.Library("aten", "IMPL")
                # As torch.library._scoped_library does; a generator would complain if the process ends first.
                self._undo.callback(library._destroy)
                for op, kernel in _missing(torch, key):
                    library.impl(op, kernel, key)
                self._undo.enter_context(_tag_compile_cache(torch))

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()


def _tag_compile_cache(torch: ModuleType) -> AbstractContextManager[Any]:
    """Tag AOTAutograd's disk cache, which stores graphs before autocast.

    Without a tag it would return graphs of another policy.
    """
    config = torch.compiler.config
    if not hasattr(config, "cache_key_tag"):
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(
        cache_key_tag=f"{config.cache_key_tag} {CACHE_TAG}".strip()
    )
    return patch


_REGISTRATIONS = {device: _Registration() for device in KEYS}


def keep_float32(torch: ModuleType, device: str, ledger: Ledger) -> None:
    """Until the ledger is restored, autocast on ``device`` keeps what CUDA keeps in float32.

    ``device`` is "cpu" or "cuda". This costs 3 ms the first time and 1 ms each later time. Each call of such
    an operator takes 3 to 6 us longer (torch 2.14, one core of an Intel Xeon with AMX).
    """
    registration = _REGISTRATIONS[device]
    # First, so that it also undoes a partial registration.
    ledger.on_restore(f"kernels at {KEYS[device]}", registration.end)
    registration.begin(torch, KEYS[device])


def _missing(torch: ModuleType, key: str) -> Iterator[tuple[Any, Kernel]]:
    """The operators for which this torch has no kernel at the key, but CUDA's autocast has; each with its kernel."""
    operators_at = torch._C._dispatch_get_registrations_for_dispatch_key
    for name in sorted(
        {*operators_at("AutocastCUDA"), EXTRA_FLOAT32} - set(operators_at(key)) - HALF_PRECISION
    ):
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            yield op, (_promoting_kernel if packet in PROMOTED else _float32_kernel)(torch, op, key)


def _float32_kernel(torch: ModuleType, op: object, key: str) -> Kernel:
    call_plain, halves = _without_autocast(torch, op, key), (torch.bfloat16, torch.float16)

    def kernel(*args: object, **kwargs: object) -> Any:
        return call_plain(
            [a.float() if isinstance(a, torch.Tensor) and a.dtype in halves else a for a in args], kwargs
        )

    return kernel


def _promoting_kernel(torch: ModuleType, op: object, key: str) -> Kernel:
    """A kernel that converts half precision to float32 if another input is float32."""
    call_plain, convert = _without_autocast(torch, op, key), _float32_kernel(torch, op, key)

    def kernel(*args: object, **kwargs: object) -> Any:
        has_float32 = any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args)
        return convert(*args, **kwargs) if has_float32 else call_plain(args, kwargs)

    return kernel


def _without_autocast(torch: ModuleType, op: Any, key: str) -> Callable[[Any, dict[str, Any]], Any]:
    exclude_keys = torch._C._ExcludeDispatchKeyGuard
    autocast_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with exclude_keys(autocast_keys):
            return op(*args, **kwargs)

    return call_plain
