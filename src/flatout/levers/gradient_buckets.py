"""Change the size of the buckets in which ranks exchange gradients.

What it does: gradients travel in buckets of about the given size in MiB (a number), or in one bucket ("all");
    the default is 25. A bucket is sent during the backward pass, as soon as all its gradients are ready.
Why it is faster: small buckets start earlier, and more of their transfer overlaps the backward pass. Large
    ones need fewer exchanges, each of which has a fixed cost.
When it does not help: the exchange is short compared with the backward pass; ranks share the cores that
    compute; each pass touches only some of the parameters (several optimizers), where nothing is sent early.
What it can change: rounding. The order in which ranks add a number depends on its position in the bucket.
    With two ranks there is one order, and every bit stays.
Evidence: exposed time by bucket size in `bench/exchange.py` of the repository.
Sources: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section
    3.2.3.
"""

from dataclasses import replace
from typing import Any

from flatout.distributed.division import why_not_split
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

NAME = "gradient_buckets"
ALL = "all"
CANDIDATES: tuple[int | str, ...] = (1, 5, 25, 100, ALL)
SAME_BUCKETS = "all bucket sizes that this lever tries give the same buckets"


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.data_parallel is None:
        return Skip(why_not_split(context.torch))
    parallel = context.data_parallel
    parameters = parallel.trained_parameters()
    if not parameters:
        return Skip("no forward pass has used a parameter with requires_grad yet")
    from flatout.distributed.exchange import buckets_of

    known_buckets, values = [buckets_of(parameters, parallel.transport.bucket_bytes)], []
    for value in CANDIDATES:
        if (buckets := buckets_of(parameters, _bytes(value))) not in known_buckets:
            known_buckets.append(buckets)
            values.append(value)
    if not values:
        return Skip(SAME_BUCKETS)
    exact = parallel.env.world_size == 2 and parallel.transport.kind == "plain"
    return Options(tuple(values), effect=Effect.EXACT if exact else Effect.ROUNDING)


def _bytes(value: Any) -> int | None:
    return None if value == ALL else max(1, int(value * 2**20))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError without ranks."""
    if (parallel := context.data_parallel) is None:
        raise LookupError(why_not_split(context.torch))
    ledger.set(parallel, "transport", replace(parallel.transport, bucket_bytes=_bytes(value)))
    return ledger.restore


def code(value: Value) -> str:
    return f"model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={2**20 if value == ALL else value})"


LEVER = Lever(
    NAME,
    Moment.STEP,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    needs=("data_parallel",),
    excludes=("sharding",),
    after=("comm_compression",),
    accepts=(ALL, Number(1e-6, 2**20, integer=False)),
    page=__doc__,
)
