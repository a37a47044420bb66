"""Let each rank take several steps by itself before the ranks are brought together.

What it does: after some steps that exchange gradients ({warmup = 0}, two at least), each rank steps on its own share of every batch, and exchanges
    nothing. After {every = 8} steps the weights become the mean of all ranks' ({outer = "average"}), or go on from it with a momentum of their own
    ({outer = "nesterov"}: DiLoCo, rate 0.7, momentum 0.9). {overlap = true}: what a round brought travels while the next one trains, and is applied one
    round late. The state of the optimizer (its moments) stays each rank's and is not exchanged. Before an evaluation, state_dict(), torch.save,
    load_state_dict and at the end of the program the ranks are brought together, so that what is decided and saved there is the same. Ranks that do
    different numbers of steps are found out, and the program ends with a sentence.
Why it is faster: one exchange in so many steps, and none of them is waited for with `overlap`.
When it does not help: where exchanging gradients is a small part of a step (`flatout scale` says); scripts that run their model without gradients in
    every step, which counts as an evaluation each time; with loss scaling, where gradients go on being exchanged. Models that are divided alone
    (`--whole`), or with `--sync-batchnorm`, exchange something in every forward pass and are refused.
What it can change: the maths, so it is used by name only. Ranks part and meet; the longer a round, the further they part. The loss that the script reads
    is its own share's. What reads weights between rounds in another way (an average that the script keeps beside) reads its rank's.
Evidence: loss curves beside the synchronous run in `bench/exchange.py` of the repository; measured on your program before it is kept cannot be said here.
Sources: Stich 2018, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD" (warmup: post-local
    SGD); Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"; Shen et al. 2019, "Faster Distributed Deep Net
    Training: Computation and Communication Decoupled SGD" (overlap); Kale et al. 2025, "Eager Updates for Overlapped Communication and Computation in
    DiLoCo" (what a late outer step costs).
"""

from __future__ import annotations

from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Comparison, Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment
from flatout.ranks.absent import why_none

NAME = "local_sgd"
EXCHANGES = "it does not work with {why} of data_parallel, which exchanges data between the ranks in forward passes"
LOSSES = "between rounds the loss that the script reads is that of each rank's own share, so decide by an evaluation; the optimizer's state stays each rank's"


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if scene.divided is None:
        return Skip(why_none(scene.torch))
    why = _exchanges(scene.divided.division)
    return Skip(EXCHANGES.format(why=why)) if why else Options(({"every": 8, "outer": "average"}, {"every": 8, "outer": "nesterov"}))


def _exchanges(division: Any) -> str:
    from flatout.ranks.division import ALL, WHOLE

    return 'batches = "whole"' if division.batches == WHOLE else 'batchnorm = "all"' if division.batchnorm == ALL else ""


def check(value: Value) -> None:
    from flatout.ranks.rounds import Rounds

    Rounds.read(value)


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    """Raises TypeError for a value that is none, LookupError where the ranks cannot step by themselves."""
    return _install(scene, value, ledger, None)


def _install(scene: Any, value: Value, ledger: Any, rate: float | None) -> Undo:
    from flatout.ranks.local_steps import LocalSteps
    from flatout.ranks.rounds import Rounds

    rounds = Rounds.read(value)
    if scene.divided is None:
        raise LookupError(why_none(scene.torch))
    if why := _exchanges(scene.divided.division):
        raise LookupError(EXCHANGES.format(why=why))
    local = LocalSteps(scene.divided, rounds, rate)
    local.install(ledger)
    ledger.set(scene.divided, "local", local)
    scene.report(NAME, LOSSES)
    return ledger.restore


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """What the ranks did is added up, as if each had done a part of the way."""
    world = scene.divided.here.world_size if scene.divided is not None else 1
    return _install(scene, value, ledger, float(world))


def code(value: Value) -> str:
    every = value.get("every", 8) if isinstance(value, dict) else 8
    if isinstance(value, dict) and value.get("outer") == "nesterov":
        return ("outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)  # shared: a copy of the model's parameters\n"
                f"if step % {every} == 0:\n    for p, s in zip(model.parameters(), shared):\n        s.grad = s.detach() - p.detach()\n"
                "        torch.distributed.all_reduce(s.grad, torch.distributed.ReduceOp.AVG)\n    outer.step()\n"
                "    for p, s in zip(model.parameters(), shared):\n        p.data.copy_(s)")
    return ("from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
            f"averager = PeriodicModelAverager(period={every}, warmup_steps=100)\n"
            "optimizer = torch.distributed.optim.PostLocalSGDOptimizer(optimizer, averager)")


LEVER = Lever(NAME, Moment.IMPORT, Effect.CHANGES_MATH, applies, code, apply=apply, guard=Comparison.GRADIENT, known_bad=known_bad, needs=("data_parallel",),
              excludes=("sharding",), check=check, page=__doc__)
