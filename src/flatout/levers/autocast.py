"""Compute in bfloat16 where it is safe, or in float16 with loss scaling where bfloat16 is not native.

What it does: runs the forward of each root module under torch.autocast and returns float32 to the script.
    Softmax, norms, sums, losses and the other operators that CUDA's autocast keeps in float32 stay in float32
    on every device. So does the mean over all elements. With float16, backward passes start from a scaled
    loss, gradients are unscaled at the parameters, and a step with infinite gradients is skipped. Dropout
    drops the elements that it would drop in float32.
Why it is faster: Tensor Cores (and AMX on CPUs) multiply half precision at two to sixteen times the rate, and
    only half the bytes move.
When it does not help: processors without bfloat16 instructions (0.61x to 0.89x on such CPUs); models made of
    small operations.
What it can change: products, which have two (bfloat16) or three (float16) decimal digits. Parameters, their
    updates and losses stay in float32.
Evidence: a 124M GPT 1.60x over TF32 (A100, torch 2.6, LLMs-from-scratch, chapter 5); measured on your program
    before it is kept.
Sources: torch.amp documentation, "CUDA Ops that can autocast to float32"; Micikevicius et al., Mixed
    Precision Training, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.autocast_policy import keep_float32
from flatout.levers.reasons import why_model_is_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

    from flatout.schema.program import Ledger, TrainingContext

INITIAL_SCALE = 2.0**14
STEPS_BEFORE_GROWTH = 2000  # as GradScaler


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    torch = context.torch
    if context.autocast_seen:
        return Skip("the program already trains under autocast")
    if why := why_model_is_split(context):
        return Skip(why)
    other_dtypes = sorted({str(p.dtype) for p in context.parameters if p.dtype != torch.float32})
    if other_dtypes:
        return Skip(f"the program trains parameters that are not float32 ({', '.join(other_dtypes)})")
    if context.device_type == "cuda":
        if torch.cuda.get_device_capability(context.device)[0] >= 8:
            return Options(("bfloat16",))
        return (
            Skip("the program already scales its losses with a GradScaler")
            if context.scalers
            else Options(("float16",))
        )
    if context.device_type == "cpu":
        if not {"amx_bf16", "avx512_bf16", "bf16"} & set(facts.cpu_flags):
            return Skip(
                "this processor has no bfloat16 instructions (AMX, AVX512-BF16 or those of ARM), and bfloat16 is slower without them"
            )
        return Options(("bfloat16",))
    return Skip(f"the parameters are on {context.device_type}, where flatout has not measured autocast")


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[str(value)]
    scale = _LossScale(context, ledger) if value == "float16" else None
    device = context.device_type
    keep_float32(torch, device, ledger)

    def wrapper(forward: Callable[..., Any]) -> Any:
        def in_half_precision(*args: object, **kwargs: object) -> Any:
            if scale is not None:
                scale.unscale_leaves((args, kwargs))
            with torch.autocast(device, dtype=dtype):
                output = forward(*args, **kwargs)
            return _float32(torch, output)

        return in_half_precision

    for root in context.roots:
        context.wrap_forward(root, wrapper, ledger)
    functional = torch.nn.functional
    if device == "cuda" and not _draws_alike(torch, context.device, dtype):
        ledger.set(functional, "dropout", _drawn_in_float32(torch, dtype, functional.dropout))
    return ledger.restore


def _draws_alike(torch: ModuleType, device: Device, dtype: Any) -> bool:
    """Whether dropout drops the same elements in both formats. On an H100 with torch 2.11 it does not."""
    masks = []
    with torch.random.fork_rng([device]):
        for each in (torch.float32, dtype):
            torch.manual_seed(0)
            masks.append(torch.native_dropout(torch.ones(4096, dtype=each, device=device), 0.5, True)[1])
    return bool(torch.equal(*masks))


def _drawn_in_float32(torch: ModuleType, dtype: Any, dropout: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        plain = inplace or not training or not 0 < p < 1 or type(input) is not torch.Tensor
        if plain or input.dtype is not dtype or not input.numel():
            return dropout(input, p, training, inplace)
        drawn_from = torch.empty(input.shape, dtype=torch.float32, device=input.device)
        mask = torch.native_dropout(drawn_from, p, True)[1]
        return torch.ops.aten.native_dropout_backward(input, mask, 1 / (1 - p))  # the product

    return drawn


def _float32(torch: ModuleType, output: Any) -> Any:
    """Convert outputs to float32: F.binary_cross_entropy and .numpy() reject half precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if type(output) is dict:
        return {key: _float32(torch, value) for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(_float32(torch, value) for value in output)
    return output


class _LossScale:
    """Starts backward passes from a multiple of the loss and divides each gradient at its leaf.

    The script never sees a scaled number in its loss, its gradients or its clipping. All paths from the loss
    to a parameter are scaled alike, also those that bypass the module (a weight penalty) or pass two modules
    (a GAN).
    """

    def __init__(self, context: TrainingContext, ledger: Ledger) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.torch = context.torch
        self.scale = INITIAL_SCALE
        self.good_steps = 0
        # optimizer, device -> whether a gradient was infinite; read once per step of that optimizer
        self._infinite: dict[tuple[int, Any], Any] = {}
        self._in_backward = False
        owners: dict[int, list[int]] = {}
        for number, optimizer in enumerate(context.optimizers):
            for p in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                owners.setdefault(id(p), []).append(number)
        self._handles = WeakIdKeyDictionary(
            (p, p.register_hook(partial(self._unscale, owners.get(id(p), ())))) for p in context.parameters
        )
        ledger.on_restore(
            "gradient hooks", lambda: [handle.remove() for handle in list(self._handles.values())]
        )
        for number, optimizer in enumerate(context.optimizers):
            ledger.set(optimizer, "step", self._skip_on_overflow(number, optimizer.step), new=True)
        ledger.set(self.torch.autograd, "backward", self._scale_backward(self.torch.autograd.backward))

    def _scale_backward(self, backward: Callable[..., Any]) -> Any:
        torch = self.torch

        def backward_from_scaled(
            tensors: Any, grad_tensors: Any = None, *args: object, **kwargs: object
        ) -> Any:
            if self._in_backward:  # a reentrant checkpoint calls backward inside a backward pass
                return backward(tensors, grad_tensors, *args, **kwargs)
            roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            gradients = (
                (grad_tensors,)
                if isinstance(grad_tensors, torch.Tensor)
                else tuple(grad_tensors or (None,) * len(roots))
            )
            scaled = [
                g * self.scale
                if g is not None
                else torch.full_like(root, self.scale)
                if root.numel() == 1
                else None
                for root, g in zip(roots, gradients, strict=True)
            ]
            self._in_backward = True
            try:
                return backward(roots, scaled, *args, **kwargs)
            finally:
                self._in_backward = False

        return backward_from_scaled

    def unscale_leaves(self, inputs: Any) -> None:
        """Unscale inputs whose gradient the script needs, such as an adversarial example."""
        for group in inputs:
            for tensor in group.values() if isinstance(group, dict) else group:
                if (
                    isinstance(tensor, self.torch.Tensor)
                    and tensor.is_leaf
                    and tensor.requires_grad
                    and tensor not in self._handles
                ):
                    self._handles[tensor] = tensor.register_hook(partial(self._unscale, ()))

    def _unscale(self, owners: Sequence[int], grad: Tensor) -> Any:
        """``owners``: the optimizers that have this parameter."""
        grad = grad / self.scale
        infinite = ~self.torch.isfinite(grad).all()
        for key in ((owner, grad.device) for owner in owners):
            previous = self._infinite.get(key)
            self._infinite[key] = infinite if previous is None else previous | infinite
        return grad.masked_fill(infinite, 0.0)

    def _skip_on_overflow(self, number: int, step: Callable[..., Any]) -> Any:
        @wraps(step)  # keeps the mark of learning-rate schedulers, which warn if it is missing
        def step_unless_overflow(*args: object, **kwargs: object) -> Any:
            flags = [self._infinite.pop(key) for key in list(self._infinite) if key[0] == number]
            if any(map(bool, flags)):
                self.scale, self.good_steps = self.scale / 2, 0
                return None
            self.good_steps += 1
            if self.good_steps % STEPS_BEFORE_GROWTH == 0:
                self.scale *= 2
            return step(*args, **kwargs)

        return step_unless_overflow


def code(value: Value) -> str:
    if value == "float16":
        return (
            "with torch.autocast(device, torch.float16): loss = ...\n"
            "scaler.scale(loss).backward(); scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()"
        )
    return "with torch.autocast(device, torch.bfloat16): loss = ...  # on the CPU, softmax, norms, sums and losses in float32: x.float().softmax(-1)"


def reduced_part(value: Value) -> str:
    return f"{value} products"


LEVER = Lever(
    "autocast",
    Moment.MODEL,
    Effect.PRECISION,
    applies,
    code,
    apply=apply,
    live=True,
    after=("channels_last",),
    reduced_part=reduced_part,
    accepts=("bfloat16", "float16"),
    page=__doc__,
)
