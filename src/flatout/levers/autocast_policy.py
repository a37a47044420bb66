"""Keep the operators of CUDA's autocast list in float32 on every device.

torch.autocast("cpu") has a shorter list than torch.autocast("cuda"). There, softmax, log_softmax, layer_norm,
exp, log, pow, sum, norm and others return bfloat16 (torch 2.14), so a loss computed from them has 8
significant bits. ``keep_float32`` registers the missing kernels at the dispatch key of the CPU's autocast.
While autocast is on, every call passes that key: functions, methods, TorchScript, checkpoints, and graphs as
they are traced. No other call does. A kernel converts its inputs and calls the operator again with that key
excluded, as torch's own kernels do.

The lists come from aten/src/ATen/autocast_mode.h. One operator is added on all devices: the mean over all
elements. Its sum is in CUDA's list, and it is usually a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.schema.program import Ledger

# AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE.
FLOAT32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    # of named tensors, which torch 2.14 no longer has
    "softmax.Dimname",
    "log_softmax.Dimname",
    "sum.dim_DimnameList",
    "prod.dim_Dimname",
    "cumsum.dimname",
    "cumprod.dimname",
    "norm.names_ScalarOpt_dim",
)
# AT_FORALL_PROMOTE. Most of them expect one dtype and would raise if float32 from above meets bfloat16.
WIDEST = (
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
)
ADDED = ("mean",)
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
    """The listed operators for which this torch has no kernel at the key, each with its kernel."""
    for names, kernel_of in ((FLOAT32 + ADDED, _in_float32), (WIDEST, _in_widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None and not op.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)):
                yield op, kernel_of(torch, op, key)


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
