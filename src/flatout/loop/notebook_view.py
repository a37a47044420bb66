"""What a notebook shows of a Loop: progress, speed, sizing, and each lever with its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.schema.plan import spell

if TYPE_CHECKING:
    from flatout.loop.loop import Loop


def loop_view(loop: Loop, total: int | None, samples_per_s: float | None) -> str:
    """Return HTML. It shows the moment of the call; display the Loop again for a later one."""
    from flatout.render.formatting import per_second
    from flatout.render.loop_view import loop_html

    facts = [("epochs done", f"{loop.epoch} of {loop.epochs}"), ("plan", loop.plan.describe())]
    if samples_per_s is not None:
        facts.insert(0, ("throughput", per_second(samples_per_s)))
    if loop.sizing:
        facts.append(("now", "sizing micro-batches"))
    elif loop.tuning:
        facts.append(("now", "tuning levers"))
    if loop.sized is not None:
        facts.append(("micro-batches", loop.sized.sentence()))
    if loop.tuned is not None:
        levers = [
            (
                spell(tried.choice.name, tried.choice.value),
                "kept" if tried.kept else "not used",
                ", ".join(filter(None, (tried.evidence, tried.reason))),
            )
            for tried in loop.tuned.tried
        ]
    else:
        levers = [
            (
                spell(outcome.choice.name, outcome.choice.value),
                "active" if outcome.applied else "not active",
                outcome.reason,
            )
            for outcome in loop.outcomes
        ]
    title = f"{type(loop.model).__name__}, {type(loop.optimizer).__name__}"
    return loop_html(title, loop.index, total, facts, levers)
