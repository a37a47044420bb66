"""Let cuDNN try its convolution algorithms once for each shape and keep the fastest.

What it does: sets torch.backends.cudnn.benchmark = True before the first step. ATen caches a plan for each
    shape and reads the flag only for shapes without one (Conv_v8.cpp of torch 2.14). Set later, it has no
    effect on known shapes.
Why it is faster: the default heuristic sometimes chooses an algorithm that is far from the best.
When it does not help: shapes that change from step to step (each new one is tried again); no convolutions; no
    CUDA.
What it can change: rounding, and the algorithm that is chosen from run to run.
Evidence: measured on your program before it is kept.
Sources: torch.backends.cudnn.benchmark; PyTorch performance tuning guide.
"""

from flatout.levers.reasons import NO_CUDA, NO_GPU
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    flags, known = context.kernel_flags(), bool(context.parameters)
    if not known and not facts.cuda:
        return Skip(NO_GPU)
    if known and context.device_type != "cuda" and not any(p.is_cuda for p in context.parameters):
        return Skip(NO_CUDA)
    if flags["cudnn.deterministic"] or flags["deterministic"]:
        return Skip("deterministic algorithms are enabled, and this lever would choose other algorithms")
    if flags["cudnn.benchmark"]:
        return Skip("torch.backends.cudnn.benchmark is already True")
    if known and not context.has_layer("Conv"):
        return Skip("no module of the model is an nn.Conv layer")
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    ledger.set_flag(context.torch.backends.cudnn, "benchmark", True)
    return ledger.restore


def code(value: Value) -> str:
    return "torch.backends.cudnn.benchmark = True"


LEVER = Lever(
    "cudnn_benchmark",
    Moment.IMPORT,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    warms_up=True,
    takes_memory="the workspaces of the algorithms that cuDNN tries once for each shape",
    page=__doc__,
)
