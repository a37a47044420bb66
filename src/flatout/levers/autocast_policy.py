"""Keep the operators of CUDA's autocast list in float32 on every device.

torch.autocast("cpu") has a shorter list than torch.autocast("cuda"). There, softmax, log_softmax, layer_norm,
exp, log, pow, sum, norm and others return bfloat16 (torch 2.14), so a loss computed from them has 8
significant bits. ``keep_float32`` registers the missing kernels at the dispatch key of the CPU's autocast.
While autocast is on, every call passes that key: functions, methods, TorchScript, checkpoints, and graphs as
they are traced. No other call does. A kernel converts its inputs and calls the operator again with that key
excluded, as torch's own kernels do.

CUDA's list is read from this torch. One operator is added on all devices: the mean over all elements. Its sum is in
CUDA's list, and it is usually a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.schema.program import Ledger

# Operators that CUDA's autocast runs in half precision, without a kernel for the CPU's. All others that only CUDA's
# list has stay in float32; so an unknown operator of a later torch does as well.
IN_HALF = {
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
WIDEST = {
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
ADDED = "aten::mean"
TAG = "flatout: float32 as autocast of CUDA"
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

Kernel = Callable[..., Any]


class _Registration:
    """The kernels of one dispatch key. They belong to the process, so all concurrent users share them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._held = ExitStack()

    def begin(self, torch: ModuleType, key: str) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                library = torch.library.Library("aten", "IMPL")
                # As torch.library._scoped_library does; a generator would complain if the process ends first.
                self._held.callback(library._destroy)
                for op, kernel in _missing(torch, key):
                    library.impl(op, kernel, key)
                self._held.enter_context(_tagged(torch))

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._held.close()


def _tagged(torch: ModuleType) -> AbstractContextManager[Any]:
    """Tag AOTAutograd's disk cache, which stores graphs before autocast.

    Without a tag it would return graphs of another policy.
    """
    config = torch.compiler.config
    if not hasattr(config, "cache_key_tag"):
        return nullcontext()
    tagged: AbstractContextManager[Any] = config.patch(cache_key_tag=f"{config.cache_key_tag} {TAG}".strip())
    return tagged


_REGISTRATIONS = {device: _Registration() for device in KEYS}


def keep_float32(torch: ModuleType, device: str, ledger: Ledger) -> None:
    """Until the ledger is restored, autocast on ``device`` keeps what CUDA keeps in float32.

    ``device`` is "cpu" or "cuda". This costs 3 ms the first time and 1 ms each later time. Each call of such
    an operator takes 3 to 6 us longer (torch 2.14, one core of an Intel Xeon with AMX).
    """
    registration = _REGISTRATIONS[device]
    ledger.call(
        f"kernels at {KEYS[device]}", registration.end
    )  # first, so that it also undoes a partial registration
    registration.begin(torch, KEYS[device])


def _missing(torch: ModuleType, key: str) -> Iterator[tuple[Any, Kernel]]:
    """The operators for which this torch has no kernel at the key, but CUDA's autocast has; each with its kernel."""
    of_key = torch._C._dispatch_get_registrations_for_dispatch_key
    for name in sorted({*of_key("AutocastCUDA"), ADDED} - set(of_key(key)) - IN_HALF):
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            yield op, (_in_widest if packet in WIDEST else _in_float32)(torch, op, key)


def _in_float32(torch: ModuleType, op: object, key: str) -> Kernel:
    """A kernel that converts half precision to float32."""
    again, halves, float32, plain = (
        _without_autocast(torch, op, key),
        (torch.bfloat16, torch.float16),
        torch.float32,
        torch.Tensor,
    )

    def kernel(*args: object, **kwargs: object) -> Any:
        return again(
            [a.to(float32) if isinstance(a, plain) and a.dtype in halves else a for a in args], kwargs
        )

    return kernel


def _in_widest(torch: ModuleType, op: object, key: str) -> Kernel:
    """A kernel that converts half precision to float32 if another input is float32."""
    again, convert, float32, plain = (
        _without_autocast(torch, op, key),
        _in_float32(torch, op, key),
        torch.float32,
        torch.Tensor,
    )

    def kernel(*args: object, **kwargs: object) -> Any:
        meets = any(isinstance(a, plain) and a.dtype is float32 for a in args)
        return convert(*args, **kwargs) if meets else again(args, kwargs)

    return kernel


def _without_autocast(torch: ModuleType, op: Any, key: str) -> Callable[[Any, dict[str, Any]], Any]:
    exclude, autocast = (
        torch._C._ExcludeDispatchKeyGuard,
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)),
    )

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with exclude(autocast):
            return op(*args, **kwargs)

    return again
