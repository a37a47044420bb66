"""Let the CUDA caching allocator grow its segments instead of adding new ones.

What it does: starts the program with PYTORCH_ALLOC_CONF=expandable_segments:True.
Why it is faster: tensors of changing sizes no longer fragment memory. The allocator no longer has to return
    its cache to the driver and allocate again in the middle of a step.
When it does not help: every step has the same shapes. Without a CUDA device it has no effect.
What it can change: nothing; the values in memory are the same.
Evidence: measured on your program before it is kept.
Sources: PyTorch documentation, "CUDA semantics", section "Optimizing memory usage with PYTORCH_ALLOC_CONF".
"""

from flatout.levers.reasons import NO_CUDA, NO_GPU
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Value
from flatout.schema.program import TrainingContext

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    on_cuda = context is not None and context.device_type == "cuda"
    if not facts.cuda and not on_cuda:  # the program may use a device that is not listed
        return Skip(NO_GPU)
    name = next((name for name in VARIABLES if facts.environment.get(name)), None)
    if name is not None:
        return Skip(f"the environment sets {name} already; unset it to measure this lever")
    if context is not None and context.parameters and not on_cuda:
        return Skip(NO_CUDA)
    return Options((True,))


def environment(facts: Facts, value: Value) -> dict[str, str]:
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def code(value: Value) -> str:
    return "PYTORCH_ALLOC_CONF=expandable_segments:True python train.py"


LEVER = Lever("allocator", Moment.PROCESS, Effect.EXACT, applies, code, environment=environment, page=__doc__)
