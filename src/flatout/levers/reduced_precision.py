"""Let oneDNN compute float32 convolutions and matrix products with bfloat16 multiplications on the CPU.

What it does: calls torch.set_float32_matmul_precision("medium") and sets fp32_precision = "bf16" for oneDNN's
    convolutions and RNNs.
Why it is faster: processors with AMX or AVX512-BF16 multiply bfloat16 at several times the rate of float32.
    Tensors stay float32.
When it does not help: processors without these instructions; small operations.
What it can change: products, which have about two decimal digits; sums and tensors stay float32.
Evidence: oneDNN convolution backward 1.14-1.48x (Sapphire Rapids, pytorch pull request 126054).
Sources: PyTorch documentation, "MKLDNN backend".
"""

from flatout.levers.tf32 import set_matmul_precision
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

FLAGS = ("amx_bf16", "avx512_bf16")


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    torch = context.torch
    if context.device_type != "cpu":
        return Skip(f"the parameters are on {context.device_type}, and this lever acts on the CPU")
    if not set(FLAGS) & set(facts.cpu_flags):
        return Skip("this processor has neither AMX-BF16 nor AVX512-BF16 instructions")
    if not torch.backends.mkldnn.is_available():
        return Skip("this PyTorch was built without oneDNN")
    mkldnn = torch.backends.mkldnn
    precision = next(
        (
            backend.fp32_precision
            for backend in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
            if backend.fp32_precision != "none"
        ),
        None,
    )
    if precision is not None:  # "none" is the default; "ieee" is a choice of the program
        return Skip(f"the program has already set the float32 precision of oneDNN to {precision}")
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    mkldnn = context.torch.backends.mkldnn
    set_matmul_precision(context.torch, "medium", ledger)
    for owner in (mkldnn.conv, mkldnn.rnn):
        ledger.set_flag(owner, "fp32_precision", "bf16")
    return ledger.restore


def code(value: Value) -> str:
    return 'torch.set_float32_matmul_precision("medium"); torch.backends.mkldnn.conv.fp32_precision = "bf16"'


LEVER = Lever(
    "reduced_precision",
    Moment.MODEL,
    Effect.PRECISION,
    applies,
    code,
    apply=apply,
    live=True,
    reduced_part=lambda value: "bfloat16 products",
    page=__doc__,
)
