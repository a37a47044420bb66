"""Divide weights, gradients and optimizer state over the ranks, for models that do not fit on one device.

What it does: under `flatout run --procs N` or `--gpus N` each rank keeps 1/N of every weight, of its gradient and of what the optimizer remembers of it. The
    weights of a block are put together when it computes, and let go again after that; its gradient is divided as soon as it is there (torch's FSDP2,
    `fully_shard`). The script is as it was, and so are its checkpoints: they hold whole tensors, and are read from and by one process. Over
    several machines weights are divided inside each machine, and machines hold copies of one another; `{over = "all"}` divides them over all ranks.
Why it is faster: it is not; it is smaller. A model that fits at all, or a larger batch, may pay for it.
When it does not help: where activations fill the memory (see `recompute`), where one block holds most of the weights, where the model does not fit even
    without gradients and optimizer state: the script makes it whole before it is divided.
What it can change: rounding of sums, on top of what `data_parallel` changes. `state_dict()` gives copies, not the live weights. Entries of a weight that a
    script changes through a view of some of its rows (`weight[3].zero_()`) stay as they were; `weight[3] = 0` works.
Evidence: 0.51 of the bytes of weights, gradients and optimizer state on each of two ranks (AdamW, CPU, torch 2.14.1); never chosen for speed, so time is
    not measured on your program before it is kept: `flatout run --shard auto` takes it where these bytes do not fit.
Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Zhao et al. 2023, "PyTorch FSDP"; torch
    documentation, "torch.distributed.fsdp.fully_shard".
"""

from __future__ import annotations

from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.standing import standing
from flatout.plan.words import Effect, Moment
from flatout.ranks.absent import why_none

NAME = "sharding"
OVER = ("node", "all")


def applies(facts: Facts, scene: Any) -> Options | Skip:
    here = standing()
    if here is None or here.world_size < 2:
        return Skip(why_none(scene.torch))
    if not scene.torch.distributed.is_available():
        return Skip("this torch was built without torch.distributed")
    return Options(({"over": "node"},))


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    """Raises TypeError for a value that is none, LookupError without `data_parallel`."""
    from flatout.ranks.sharding import Sharding
    from flatout.saved.blocks import repeated

    given = {} if value is True else value
    over = given.get("over", "node") if isinstance(given, dict) and set(given) <= {"over"} else None
    if over not in OVER:
        raise TypeError(f'sharding is a table, {{ over = "node" }} or {{ over = "all" }}, not {value!r}')
    divided, here = scene.divided, standing()
    if divided is None or here is None:
        raise LookupError("it acts through data_parallel, which is not applied")
    ledger.set(divided, "sharding", Sharding(scene.torch, scene, divided.here, str(over), lambda module: repeated(scene.torch, module), ledger))
    return ledger.restore


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Gradients are added up over the ranks, and not averaged."""
    undo = apply(scene, value, ledger)
    scene.divided.sharding.averages = False
    return undo


def code(value: Value) -> str:
    return ("from torch.distributed.fsdp import fully_shard\n"
            "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)  # before the optimizer is made\n"
            "# checkpoints: get_state_dict and set_state_dict of torch.distributed.checkpoint.state_dict, with full_state_dict=True")


LEVER = Lever(NAME, Moment.LOADER, Effect.ROUNDING, applies, code, apply=apply, known_bad=known_bad, after=("data_parallel",), needs=("data_parallel",),
              page=__doc__)
