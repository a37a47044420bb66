"""Chooses what to measure next: the settings of the next processes, and of the next blocks in a process.

Rows are chosen one after another by how much they would reduce the expected regret. Each draw from the
posterior has its own best set. The value of a row is the variance it removes from the differences between
these sets and the best set on average. Before any measurement this balances the design.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.tune.effects import Fitted, Space, TimedBlock, fit
from flatout.tune.one_thread import np

SETTLED = 0.98  # chance of being in, or out of, the best set above which a factor is no longer varied
MOST_CANDIDATES = 192  # rows compared for each choice
BLOCKS_A_PROCESS = 8  # expected for a newly chosen process
NEAR_PLAN_SHARE, FEW = 4, 2  # one block in NEAR_PLAN_SHARE has the likeliest set on; of FEW blocks, one has
TOUR = 5  # blocks; ending a measurement early only loses later tours
WORTH_MEASURING = 0.01  # expected regret, in log time

Array = Any  # a numpy array; the shape is in each docstring


def worth_more_time(fitted: Fitted, chosen: frozenset[str], most: float = WORTH_MEASURING) -> bool:
    """Whether more measuring can pay off: the expected regret of ``chosen`` exceeds ``most`` in log time."""
    return fitted.regret(chosen) > most


def next_processes(
    space: Space,
    fitted: Fitted | None,
    blocks: Sequence[TimedBlock],
    n: int,
    rng: np.random.Generator,
    always_plain: bool,
) -> list[frozenset[str]]:
    """Choose the process levers and warm-up levers of the next ``n`` processes, which start together.

    The first processes are the plain program and the likeliest plan by the priors. ``always_plain``: each
    wave includes the plain program.
    """
    fixed = ~space.switched
    known = fitted or fit(space, blocks)
    plan = space.rows([known.best()])[0]
    chosen: list[Array] = []
    seen = {block.on & space.keys(fixed) for block in blocks}
    if always_plain or not seen:
        chosen.append(np.zeros(len(space.factors), dtype=bool))
    if (plan & fixed).any() and not seen - {frozenset()}:
        chosen.append(plan & fixed)
    chosen = [
        row for at, row in enumerate(chosen[:n]) if not any((row == other).all() for other in chosen[:at])
    ]
    candidates = np.unique(
        _candidates(space, known, rng, fixed | space.switched, np.zeros(len(space.factors), dtype=bool))
        & fixed,
        axis=0,
    )
    rest = _completed(space, candidates, plan & ~fixed)
    noise = known.luck**2 + known.noise**2 / BLOCKS_A_PROCESS
    start = space.features(_completed(space, np.array(chosen), plan & ~fixed)) if chosen else None
    picked = _greedy(known.cov, _contrasts(known), space.features(rest), noise, n - len(chosen), start)
    return [space.keys(row) for row in [*chosen, *(candidates[at] for at in picked)]]


def live_rows(
    space: Space, fitted: Fitted | None, process_on: frozenset[str], n: int, rng: np.random.Generator
) -> list[frozenset[str]]:
    """Return the live settings of ``n`` consecutive blocks in a process with ``process_on``.

    The most informative settings come first, ordered for few switches.
    """
    known = fitted or fit(space, ())
    base = space.rows([process_on])[0]
    candidates = _candidates(space, known, rng, space.switched, base)
    plan = _completed(space, base[None, :], space.rows([known.best()])[0] & space.switched)[0]
    chosen = (
        [plan] * (1 if 0 < n <= FEW else n // NEAR_PLAN_SHARE)
        if (plan & ~base).any() and space.allowed_rows(plan[None, :])[0]
        else []
    )
    features = np.hstack([space.features(candidates), np.ones((len(candidates), 1))])
    columns = len(known.cov)
    cov = np.zeros((columns + 1, columns + 1))  # the last column is the variation of the process
    cov[:columns, :columns], cov[columns, columns] = known.cov, known.luck**2
    contrasts = np.hstack([_contrasts(known), np.zeros((len(_contrasts(known)), 1))])
    start = np.hstack([space.features(np.array(chosen)), np.ones((len(chosen), 1))]) if chosen else None
    picked = _greedy(cov, contrasts, features, known.noise**2, n - len(chosen), start)
    rows = [*chosen, *(candidates[at] for at in picked)]
    tours = [_short_tour(rows[at : at + TOUR], rng) for at in range(0, len(rows), TOUR)]
    return [space.keys(row & ~base) for tour in tours for row in tour]


def _candidates(space: Space, known: Fitted, rng: np.random.Generator, free: Array, base: Array) -> Array:
    """(n, factors) allowed rows that differ in ``free`` factors only; settled factors keep their state."""
    chance = known.best_draws[1].mean(axis=0)
    measured = space.rows([known.measured])[0]
    on, off = free & measured & (chance > SETTLED), free & measured & (chance < 1 - SETTLED)
    for fixed, open_ in ((base | on, free & ~on & ~off), (base, free & ~off), (base, free)):
        rows = space.sample(rng, 4 * MOST_CANDIDATES, fixed, open_)
        if len(rows):
            return rows[rng.permutation(len(rows))[:MOST_CANDIDATES]]
    return base[None, :]


def _completed(space: Space, rows: Array, more: Array) -> Array:
    """Return each row with the factors of ``more`` that are allowed with it."""
    found = rows.copy()
    for at in np.flatnonzero(more):
        wider = found.copy()
        wider[:, at] = True
        found = np.where(space.allowed_rows(wider)[:, None], wider, found)
    return found


def _contrasts(known: Fitted) -> Array:
    """(draws, features): the best set of each draw minus the best set on average.

    If all draws agree, that set minus the plain program.
    """
    plan = known.space.features(known.space.rows([known.best()]))
    differences = known.space.features(known.best_draws[1]) - plan
    differing = differences[differences.any(axis=1)]
    return differing if len(differing) else plan


def _greedy(
    cov: Array, contrasts: Array, candidates: Array, noise: float, n: int, start: Array | None
) -> list[int]:
    """Choose the candidates that remove most variance from the contrasts, after the rows ``start``.

    ``noise``: variance of one measurement.
    """
    spread = contrasts @ cov  # (contrasts, features)
    reach = candidates @ cov  # (candidates, features)

    def update(row: Array) -> None:
        nonlocal spread, reach, cov
        column = cov @ row
        size = row @ column + noise
        spread = spread - np.outer(spread @ row, column) / size
        reach = reach - np.outer(reach @ row, column) / size
        cov = cov - np.outer(column, column) / size

    for row in start if start is not None else ():
        update(row)
    picked = []
    for _ in range(n):
        variance = (reach * candidates).sum(axis=1) + noise
        worth = ((spread @ candidates.T) ** 2).sum(axis=0) / variance
        at = int(np.argmax(worth))
        picked.append(at)
        update(candidates[at])
    return picked


def _short_tour(rows: Sequence[Array], rng: np.random.Generator) -> list[Array]:
    """Order the rows so that each is the fewest switches from the row before it; the first is random."""
    left = list(rows)
    if not left:
        return []
    tour = [left.pop(int(rng.integers(len(left))))]
    while left:
        tour.append(left.pop(int(np.argmin([(row ^ tour[-1]).sum() for row in left]))))
    return tour
