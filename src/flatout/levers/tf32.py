"""Use the TF32 mode of the Tensor Cores for float32 matrix products and convolutions.

What it does: calls torch.set_float32_matmul_precision("high"). cuDNN's convolutions and RNNs use TF32 by
    default already.
Why it is faster: TF32 multiplies with 10 bits of mantissa at several times the rate of float32, and adds in
    float32.
When it does not help: CPUs; GPUs before Ampere; models that already run in half precision.
What it can change: products, which have about three decimal digits: the mantissa of float16 with the range of
    float32. So its effect is that of half precision, and `--effects exact,rounding` excludes it.
Evidence: a 124M GPT 2.21x (one A100, torch 2.6, LLMs-from-scratch, chapter 5).
Sources: PyTorch documentation, "CUDA semantics", section "TensorFloat-32 on Ampere (and later) devices".
"""

from types import ModuleType

from flatout.levers.reasons import NO_CUDA
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    torch = context.torch
    device = next((p.device for p in context.parameters if p.is_cuda), None)
    if context.device_type != "cuda" and device is None:
        return Skip(NO_CUDA)
    if torch.cuda.get_device_capability(device)[0] < 8:
        return Skip("this GPU has no TF32, which needs compute capability 8.0 or higher")
    if context.kernel_flags()["deterministic"]:
        return Skip("deterministic algorithms are enabled, so the precision does not change")
    return _choice_of_the_script(torch) or Options((True,))


def _choice_of_the_script(torch: ModuleType) -> Skip | None:
    """The reason to skip if either family of flags is set.

    The newer flag is "none" by default; "ieee" is a choice of the script.
    """
    newer = torch.backends.cuda.matmul.fp32_precision
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises if the families disagree
        older = "highest"
    chosen = newer if newer != "none" else older
    return (
        Skip(f"the float32 precision of matrix products is already set to {chosen}")
        if (newer, older) != ("none", "highest")
        else None
    )


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    set_matmul_precision(context.torch, "high", ledger)
    return ledger.restore


def set_matmul_precision(torch: ModuleType, precision: str, ledger: Ledger) -> None:
    """Set torch's float32 matmul precision until the ledger is restored."""
    # The older flags keep both families consistent. With the newer ones alone, reading allow_tf32 or
    # get_float32_matmul_precision raises (torch 2.14): in the script, in flex attention, in max-autotune.
    for owner in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        # Undone last: setting "highest" leaves "ieee" behind.
        ledger.set_flag(owner, "fp32_precision", owner.fp32_precision)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    ledger.on_restore(
        "torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision(before)
    )


def code(value: Value) -> str:
    return 'torch.set_float32_matmul_precision("high")'


LEVER = Lever(
    "tf32",
    Moment.MODEL,
    Effect.PRECISION,
    applies,
    code,
    apply=apply,
    live=True,
    reduced_part=lambda value: "TF32 products",
    page=__doc__,
)
