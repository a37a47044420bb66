"""What a search is asked for, and within what time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from flatout.schema.enums import Effect
from flatout.schema.plan import Choice
from flatout.tune.effects import Space


@dataclass(frozen=True)
class Goal:
    """What you asked for.

    ``budget_s`` None means a default for this kind of program. ``horizon_s`` is the duration of the real job;
    a warm-up must pay off within it. ``memory_limit_bytes`` limits the tensors of a step; the search then looks for the
    fastest plan that fits. ``named`` levers are measured alongside the search and never adopted.
    """

    budget_s: float | None
    effects: frozenset[Effect] = frozenset(
        {Effect.EXACT, Effect.ROUNDING, Effect.PRECISION, Effect.RESAMPLED}
    )
    only_levers: frozenset[str] | None = None
    horizon_s: float = 3600.0
    memory_limit_bytes: int | None = None
    named: tuple[Choice, ...] = ()


def restricted(space: Space, keys: Collection[str]) -> Space:
    """The same space restricted to these factors."""
    return replace(space, factors=tuple(factor for factor in space.factors if factor.key in keys))
