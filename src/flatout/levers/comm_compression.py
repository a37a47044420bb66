"""Send gradients between ranks in fewer bytes.

What it does: after each backward pass, the ranks exchange gradients in one of three forms: bfloat16 ("bf16");
    float16 with a dynamic scale for each bucket ("fp16"); or two low-rank matrices per weight, as in
    {kind = "powersgd", rank = 2, after = 100}. PowerSGD sends the first 100 passes uncompressed and adds the
    approximation error to the next pass. Every rank switches at the same pass. You select PowerSGD by name
    only. On ranks that flatout started, gradients accumulated in earlier passes stay as they are. A script's
    own DistributedDataParallel sends through a communication hook, accumulated gradients included, unless the
    script has registered a hook itself.
Why it is faster: half the bytes ("bf16", "fp16"), or a few percent of them, cross a link that is the
    bottleneck.
When it does not help: the exchange overlaps the backward pass; the ranks share a machine; casting costs as
    much as it saves. PowerSGD computes on each matrix, in two exchanges that wait for each other.
What it can change: gradients, which travel with three digits ("bf16") or four ("fp16"). PowerSGD changes the
    maths: an update has low rank, the rest follows later, and training reaches another result.
Evidence: bytes and exposed time in `bench/exchange.py` of the repository; measured on your program before it
    is kept.
Sources: Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization";
    torch documentation, "DDP Communication Hooks".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.distributed.absent import why_left_alone, why_none
from flatout.schema.accepted import Number, Table
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from flatout.schema.program import Ledger, TrainingContext

ONLY = "this lever acts on a DistributedDataParallel, or on ranks that `flatout run --procs N` starts"
NAME = "comm_compression"
WORDS = "bf16", "fp16"
CHANGES = "PowerSGD changes the maths: updates have low rank, and the rest follows later; the first {after} backward passes are sent uncompressed"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if why := _why_not(context):
        return Skip(why)
    torch = context.torch
    parameters = (
        context.divided.that_train()
        if context.divided is not None
        else [p for ddp in context.ddp_modules for p in ddp.parameters() if p.requires_grad]
    )
    if parameters and not any(p.dtype in (torch.float32, torch.float64) for p in parameters):
        return Skip("no gradient is float32 or float64, and this lever compresses only those")
    return Options(WORDS)


def _why_not(context: TrainingContext) -> str:
    """Why this process sends no gradients that this lever could compress, or an empty string."""
    if context.divided is not None:
        return ""
    return why_left_alone(context.ddp_modules) if context.ddp_modules else why_none(context.torch, ONLY)


def _way(value: object) -> Any:
    """The wire format of a value."""
    from flatout.distributed import powersgd, wire

    given: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
    if given["kind"] == "powersgd":
        return powersgd.way(given.get("rank", 2), given.get("after", powersgd.AFTER))
    return {"bf16": wire.BF16, "fp16": wire.FP16}[given["kind"]]


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError without ranks."""
    way = _way(value)
    _send_by(context, way, ledger)
    if way.name.startswith("powersgd"):
        context.report(NAME, CHANGES.format(after=way.name.rpartition(" ")[2]))
    return ledger.restore


def _send_by(context: TrainingContext, way: object, ledger: Ledger) -> None:
    from flatout.distributed.script_ddp import change

    if why := _why_not(context):
        raise LookupError(why)
    if context.divided is None:
        change(context, ledger, way=way)
    else:
        ledger.set(context.divided, "wanted", replace(context.divided.wanted, way=way))


def code(value: Value) -> str:
    hooks = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook\n"
    if value in ("bf16", "fp16"):
        return f"{hooks}model.register_comm_hook(None, default_hooks.{value}_compress_hook)"
    given = value if isinstance(value, dict) else {}
    state = f"powerSGD_hook.PowerSGDState(None, matrix_approximation_rank={given.get('rank', 2)}, start_powerSGD_iter={given.get('after', 100)})"
    return f"{hooks}model.register_comm_hook({state}, powerSGD_hook.powerSGD_hook)"


def half(value: Value) -> str:
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
    live=True,
    excludes=("sharding",),
    half=half,
    accepts=(
        *WORDS,
        "powersgd",
        Table({"kind": WORDS}, ("kind",)),
        Table({"kind": ("powersgd",), "rank": (Number(1, 10**5),), "after": (Number(0, 10**9),)}, ("kind",)),
    ),
    page=__doc__,
)
