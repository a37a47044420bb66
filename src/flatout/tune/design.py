"""Chooses what to measure next: the settings of the next processes, and of the next blocks in a process.

Rows are chosen one after another by how much they would reduce the expected regret. Each draw from the
posterior has its own best set. The value of a row is the variance it removes from the differences between
these sets and the best set on average. Before any measurement this balances the design.
"""

from collections.abc import Sequence
from typing import Any

from flatout.tune.effects import Fitted, Space, TimedBlock, fit_effects
from flatout.tune.one_thread import np

SETTLED_CHANCE = 0.98  # chance of being in, or out of, the best set above which a factor is no longer varied
MAX_CANDIDATES = 192  # rows compared for each choice
BLOCKS_PER_PROCESS = 8  # expected for a newly chosen process
LIKELIEST_EVERY, FEW_BLOCKS = (
    4,
    2,
)  # one block in LIKELIEST_EVERY has the likeliest set on; of FEW_BLOCKS, one has
TOUR_BLOCKS = 5  # blocks; ending a measurement early only loses later tours
MIN_REGRET = 0.01  # expected regret, in log time

Array = Any  # a numpy array; the shape is in each docstring


def worth_more_time(fitted: Fitted, chosen: frozenset[str]) -> bool:
    """Whether more measuring can pay off: the expected regret of ``chosen`` exceeds ``MIN_REGRET``."""
    return fitted.regret(chosen) > MIN_REGRET


def next_processes(
    space: Space,
    fitted: Fitted | None,
    blocks: Sequence[TimedBlock],
    n: int,
    rng: np.random.Generator,
) -> list[frozenset[str]]:
    """Choose the process levers and warm-up levers of the next ``n`` processes, which start together.

    The first processes are the plain program and the likeliest plan by the priors.
    """
    process_factors = ~space.switchable
    fitted = fitted or fit_effects(space, blocks)
    plan = space.rows([fitted.best()])[0]
    chosen: list[Array] = []
    measured_sets = {block.active & space.keys(process_factors) for block in blocks}
    if not measured_sets:
        chosen.append(np.zeros(len(space.factors), dtype=bool))
    if (plan & process_factors).any() and not measured_sets - {frozenset()}:
        chosen.append(plan & process_factors)
    chosen = [
        row for i, row in enumerate(chosen[:n]) if not any((row == other).all() for other in chosen[:i])
    ]
    candidates = np.unique(
        _candidates(
            space, fitted, rng, process_factors | space.switchable, np.zeros(len(space.factors), dtype=bool)
        )
        & process_factors,
        axis=0,
    )
    candidate_rows = _add_allowed(space, candidates, plan & ~process_factors)
    noise = fitted.process_sd**2 + fitted.noise_sd**2 / BLOCKS_PER_PROCESS
    chosen_features = (
        space.features(_add_allowed(space, np.array(chosen), plan & ~process_factors)) if chosen else None
    )
    picked = _greedy(
        fitted.cov,
        _contrasts(fitted),
        space.features(candidate_rows),
        noise,
        n - len(chosen),
        chosen_features,
    )
    return [space.keys(row) for row in [*chosen, *(candidates[i] for i in picked)]]


def live_factor_sets(
    space: Space, fitted: Fitted | None, process_active: frozenset[str], n: int, rng: np.random.Generator
) -> list[frozenset[str]]:
    """The live settings of ``n`` consecutive blocks in a process with ``process_active``.

    The most informative settings come first, ordered for few switches.
    """
    fitted = fitted or fit_effects(space, ())
    base = space.rows([process_active])[0]
    candidates = _candidates(space, fitted, rng, space.switchable, base)
    plan = _add_allowed(space, base[None, :], space.rows([fitted.best()])[0] & space.switchable)[0]
    chosen = (
        [plan] * (1 if 0 < n <= FEW_BLOCKS else n // LIKELIEST_EVERY)
        if (plan & ~base).any() and space.allowed_rows(plan[None, :])[0]
        else []
    )
    features = np.hstack([space.features(candidates), np.ones((len(candidates), 1))])
    columns = len(fitted.cov)
    cov = np.zeros((columns + 1, columns + 1))  # the last column is the variation of the process
    cov[:columns, :columns], cov[columns, columns] = fitted.cov, fitted.process_sd**2
    contrasts = np.hstack([_contrasts(fitted), np.zeros((len(_contrasts(fitted)), 1))])
    ones = np.ones((len(chosen), 1))
    chosen_features = np.hstack([space.features(np.array(chosen)), ones]) if chosen else None
    picked = _greedy(cov, contrasts, features, fitted.noise_sd**2, n - len(chosen), chosen_features)
    rows = [*chosen, *(candidates[i] for i in picked)]
    tours = [_short_tour(rows[i : i + TOUR_BLOCKS], rng) for i in range(0, len(rows), TOUR_BLOCKS)]
    return [space.keys(row & ~base) for tour in tours for row in tour]


def _candidates(space: Space, fitted: Fitted, rng: np.random.Generator, free: Array, base: Array) -> Array:
    """(n, factors) allowed rows that differ in ``free`` factors only; settled factors keep their state."""
    chance = fitted.best_draws[1].mean(axis=0)
    measured = space.rows([fitted.measured_keys])[0]
    surely_on, surely_off = (
        free & measured & (chance > SETTLED_CHANCE),
        free & measured & (chance < 1 - SETTLED_CHANCE),
    )
    for always_on, free_factors in (
        (base | surely_on, free & ~surely_on & ~surely_off),
        (base, free & ~surely_off),
        (base, free),
    ):
        rows = space.sample(rng, 4 * MAX_CANDIDATES, always_on, free_factors)
        if len(rows):
            return rows[rng.permutation(len(rows))[:MAX_CANDIDATES]]
    return base[None, :]


def _add_allowed(space: Space, rows: Array, additions: Array) -> Array:
    """Turn on each of these factors in the rows that allow it."""
    completed = rows.copy()
    for i in np.flatnonzero(additions):
        wider = completed.copy()
        wider[:, i] = True
        completed = np.where(space.allowed_rows(wider)[:, None], wider, completed)
    return completed


def _contrasts(fitted: Fitted) -> Array:
    """(draws, features): the best set of each draw minus the best set on average.

    If all draws agree, that set minus the plain program.
    """
    plan = fitted.space.features(fitted.space.rows([fitted.best()]))
    differences = fitted.space.features(fitted.best_draws[1]) - plan
    differing = differences[differences.any(axis=1)]
    return differing if len(differing) else plan


def _greedy(
    cov: Array, contrasts: Array, candidates: Array, noise: float, n: int, chosen_features: Array | None
) -> list[int]:
    """Choose the candidates that remove most variance from the contrasts, after the rows ``chosen_features``.

    ``noise``: variance of one measurement.
    """
    contrast_cov = contrasts @ cov  # (contrasts, features)
    candidate_cov = candidates @ cov  # (candidates, features)

    def update(row: Array) -> None:
        nonlocal contrast_cov, candidate_cov, cov
        column = cov @ row
        scale = row @ column + noise
        contrast_cov = contrast_cov - np.outer(contrast_cov @ row, column) / scale
        candidate_cov = candidate_cov - np.outer(candidate_cov @ row, column) / scale
        cov = cov - np.outer(column, column) / scale

    for row in chosen_features if chosen_features is not None else ():
        update(row)
    picked = []
    for _ in range(n):
        variance = (candidate_cov * candidates).sum(axis=1) + noise
        removed_variance = ((contrast_cov @ candidates.T) ** 2).sum(axis=0) / variance
        i = int(np.argmax(removed_variance))
        picked.append(i)
        update(candidates[i])
    return picked


def _short_tour(rows: Sequence[Array], rng: np.random.Generator) -> list[Array]:
    """Order the rows so that each is the fewest switches from the row before it; the first is random."""
    remaining = list(rows)
    if not remaining:
        return []
    tour = [remaining.pop(int(rng.integers(len(remaining))))]
    while remaining:
        tour.append(remaining.pop(int(np.argmin([(row ^ tour[-1]).sum() for row in remaining]))))
    return tour
