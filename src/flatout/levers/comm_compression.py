"""Send gradients between ranks in fewer bytes.

What it does: after each backward pass, one of torch's communication hooks exchanges the gradients: as bfloat16
    ("bf16"), as float16 ("fp16", by name only), or as two low-rank matrices per weight, as in
    {kind = "powersgd", rank = 2, after = 100} (by name only). PowerSGD sends the first 100 passes uncompressed
    and adds the approximation error to the next pass. The lever acts on ranks that flatout started, and on a
    script's own DistributedDataParallel, unless the script has registered a hook itself.
Why it is faster: half the bytes ("bf16", "fp16"), or a few percent of them, cross a link that is the
    bottleneck.
When it does not help: the exchange overlaps the backward pass; the ranks share a machine; casting costs as
    much as it saves. PowerSGD computes on each matrix, in two exchanges that wait for each other.
What it can change: gradients, which travel with three digits ("bf16") or four ("fp16", which overflows above
    65,504). Gradients accumulated in earlier passes are sent, and rounded, again. PowerSGD changes the maths:
    an update has low rank, the rest follows later, and training reaches another result.
Evidence: bytes and exposed time in `bench/exchange.py` of the repository.
Sources: Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization";
    torch documentation, "DDP Communication Hooks".
"""

from dataclasses import replace

from flatout.distributed.division import why_not_hookable, why_not_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Table, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

ACTS_ON = "this lever acts on a DistributedDataParallel, or on ranks that `flatout run --procs N` starts"
NAME = "comm_compression"
DTYPES = "bf16", "fp16"
POWERSGD_NOTE = "PowerSGD changes the maths: updates have low rank, and the rest follows later; the first {after} backward passes are sent uncompressed"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if why := _why_not(context):
        return Skip(why)
    torch = context.torch
    parameters = (
        context.data_parallel.trained_parameters()
        if context.data_parallel is not None
        else [p for ddp in context.ddp_modules for p in ddp.parameters() if p.requires_grad]
    )
    if parameters and not any(p.dtype in (torch.float32, torch.float64) for p in parameters):
        return Skip("no gradient is float32 or float64, and this lever compresses only those")
    return Options(DTYPES[:1])


def _why_not(context: TrainingContext) -> str:
    if context.data_parallel is not None:
        return ""
    return (
        why_not_hookable(context.ddp_modules)
        if context.ddp_modules
        else why_not_split(context.torch, ACTS_ON)
    )


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError without ranks, or for PowerSGD without NumPy."""
    from flatout.distributed.exchange import Transport

    if why := _why_not(context):
        raise LookupError(why)
    transport = Transport.read(value)
    transport.hook()  # raises before a rank would fail in its backward pass
    if (parallel := context.data_parallel) is not None:
        transport = replace(transport, bucket_bytes=parallel.transport.bucket_bytes)
        ledger.set(parallel, "transport", transport)
    else:
        for ddp in context.ddp_modules:
            transport.register(context.torch, ddp)
    if transport.kind == "powersgd":
        context.report(NAME, POWERSGD_NOTE.format(after=transport.after))
    return ledger.restore


def code(value: Value) -> str:
    hooks = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook\n"
    if value in DTYPES:
        return f"{hooks}model.register_comm_hook(None, default_hooks.{value}_compress_hook)"
    settings = value if isinstance(value, dict) else {}
    state = f"powerSGD_hook.PowerSGDState(None, matrix_approximation_rank={settings.get('rank', 2)}, start_powerSGD_iter={settings.get('after', 100)})"
    return f"{hooks}model.register_comm_hook({state}, powerSGD_hook.powerSGD_hook)"


def reduced_part(value: Value) -> str:
    return {"bf16": "bfloat16 gradients between ranks", "fp16": "float16 gradients between ranks"}.get(
        str(value), "gradients of low rank between ranks"
    )


LEVER = Lever(
    NAME,
    Moment.STEP,
    Effect.PRECISION,
    applies,
    code,
    apply=apply,
    excludes=("sharding",),
    reduced_part=reduced_part,
    accepts=(
        *DTYPES,
        "powersgd",
        Table({"kind": DTYPES}, ("kind",)),
        Table({"kind": ("powersgd",), "rank": (Number(1, 10**5),), "after": (Number(2, 10**9),)}, ("kind",)),
    ),
    page=__doc__,
)
