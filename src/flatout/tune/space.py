"""Defines what a search may switch on: factors, and which sets of them are allowed together.

Callers see sets of keys. Internally, a set is a row of booleans, one column per factor, in the order of
``Space.factors``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flatout.tune.one_thread import np

MAX_ENUMERATED = 8192  # sets up to this number are enumerated; beyond it they are searched
MAX_SWEEPS = 12  # of the coordinate descent
DESCENT_STARTS = 512  # sampled sets; the best one is a second start of the descent
MIN_STEP = 1e-12  # in log time

Array = Any  # a numpy array; the shape is in each docstring


@dataclass(frozen=True)
class Factor:
    """One lever with one value. Factors of one lever exclude each other.

    ``mean`` and ``sd`` are the prior of its effect on the log of the step time: negative is faster. ``live``:
    it can be switched between two steps. ``warms_up``: a switch causes a long slow phase, so it is on for the
    whole life of a process or not at all.
    """

    key: str
    lever: str
    live: bool
    mean: float = 0.0
    sd: float = 0.15
    warms_up: bool = False

    @property
    def switchable(self) -> bool:
        return self.live and not self.warms_up


@dataclass(frozen=True)
class Space:
    """All factors of a search.

    ``excludes`` and ``known_pairs`` are pairs of levers; ``needs`` maps a lever to all levers that it needs.

    ``known_pairs`` have a wider prior of their interaction. ``misfit``: the sd of a set's log time around the sum of
    its effects and pairs, because three levers can interact too. A lever whose needed lever has no factor here is
    never allowed. Raises ValueError for a duplicate key.
    """

    factors: tuple[Factor, ...]
    excludes: frozenset[frozenset[str]] = frozenset()
    needs: Mapping[str, Iterable[str]] = field(default_factory=dict)
    known_pairs: frozenset[frozenset[str]] = frozenset()
    misfit: float = 0.015

    def __post_init__(self) -> None:
        keys = [factor.key for factor in self.factors]
        if len(set(keys)) < len(keys):
            raise ValueError(
                f"a key occurs twice among the factors: {sorted(key for key in set(keys) if keys.count(key) > 1)}"
            )

    # -- columns

    @cached_property
    def index(self) -> dict[str, int]:
        """The column of each key."""
        return {factor.key: i for i, factor in enumerate(self.factors)}

    @cached_property
    def columns_of(self) -> dict[str, list[int]]:
        """The columns of each lever, in the order of the factors."""
        columns: dict[str, list[int]] = {}
        for i, factor in enumerate(self.factors):
            columns.setdefault(factor.lever, []).append(i)
        return columns

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Columns that can be on together."""
        levers = [factor.lever for factor in self.factors]
        return [
            (i, j)
            for i, j in itertools.combinations(range(len(levers)), 2)
            if levers[i] != levers[j] and frozenset((levers[i], levers[j])) not in self.excludes
        ]

    @cached_property
    def lever_of(self) -> dict[str, str]:
        """The lever of each key."""
        return {factor.key: factor.lever for factor in self.factors}

    @cached_property
    def known_mask(self) -> Array:
        """(pairs,) booleans: whether the levers of each pair are among ``known_pairs``."""
        levers = [factor.lever for factor in self.factors]
        known = [frozenset((levers[i], levers[j])) in self.known_pairs for i, j in self.pairs]
        return np.array(known, dtype=bool)

    @cached_property
    def switchable(self) -> Array:
        """(factors,) booleans."""
        return np.array([factor.switchable for factor in self.factors], dtype=bool)

    def rows(self, sets: Iterable[frozenset[str]]) -> Array:
        """(sets, factors) booleans. Raises ValueError for a key without a factor."""
        sets = list(sets)
        rows: Array = np.zeros((len(sets), len(self.factors)), dtype=bool)
        for i, active in enumerate(sets):
            for key in active:
                if key not in self.index:
                    keys = ", ".join(self.index)
                    raise ValueError(f"{key!r} is not among the factors of this search: {keys}")
                rows[i, self.index[key]] = True
        return rows

    def keys(self, row: Array) -> frozenset[str]:
        """The set of one row of booleans."""
        return frozenset(self.factors[i].key for i in np.flatnonzero(row))

    def features(self, rows: Array) -> Array:
        """(n, factors + pairs) floats: active factors and active pairs."""
        left, right = self._pair_columns
        return np.hstack([rows, rows[:, left] & rows[:, right]]).astype(float)

    @cached_property
    def _pair_columns(self) -> tuple[Array, Array]:
        ends = np.array(self.pairs, dtype=int).reshape(-1, 2)
        return ends[:, 0], ends[:, 1]

    # -- allowed sets

    def allowed(self, active: frozenset[str]) -> bool:
        """Raises ValueError for a key without a factor."""
        return bool(self.allowed_rows(self.rows([active]))[0])

    def allowed_rows(self, rows: Array) -> Array:
        """(n,) booleans for (n, factors) rows."""
        counts = rows.astype(np.int16) @ self._levers
        allowed: Array = (counts <= 1).all(axis=1)
        for a, b in self._excluded:
            allowed &= ~((counts[:, a] > 0) & (counts[:, b] > 0))
        for a, needed in self._needed:
            allowed &= (
                (counts[:, a] == 0) | (counts[:, needed] > 0) if needed is not None else counts[:, a] == 0
            )
        return allowed

    @cached_property
    def _levers(self) -> Array:
        matrix: Array = np.zeros((len(self.factors), len(self.columns_of)), dtype=np.int16)
        for i, columns in enumerate(self.columns_of.values()):
            matrix[columns, i] = 1
        return matrix

    @cached_property
    def _excluded(self) -> list[tuple[int, int]]:
        lever_index = {lever: i for i, lever in enumerate(self.columns_of)}
        return [
            (lever_index[a], lever_index[b])
            for a, b in (sorted(pair) for pair in self.excludes if len(pair) == 2)
            if a in lever_index and b in lever_index
        ]

    @cached_property
    def _needed(self) -> list[tuple[int, int | None]]:
        lever_index = {lever: i for i, lever in enumerate(self.columns_of)}
        return [
            (lever_index[lever], lever_index.get(needed))
            for lever, all_needed in self.needs.items()
            if lever in lever_index
            for needed in all_needed
        ]

    @cached_property
    def allowed_sets(self) -> Array | None:
        """All allowed sets, smaller ones first; None if there are too many to enumerate."""
        if math.prod(len(columns) + 1 for columns in self.columns_of.values()) > MAX_ENUMERATED:
            return None
        rows = np.stack(list(self._lever_rows(list(self.columns_of))))
        rows = rows[self.allowed_rows(rows)]
        return rows[np.argsort(rows.sum(axis=1), kind="stable")]

    @cached_property
    def _allowed_features(self) -> Array:
        return self.features(self.allowed_sets)

    def _lever_rows(self, levers: Sequence[str]) -> Iterable[Array]:
        for chosen in itertools.product(*((-1, *self.columns_of[lever]) for lever in levers)):
            row: Array = np.zeros(len(self.factors), dtype=bool)
            row[[i for i in chosen if i >= 0]] = True
            yield row

    def sample(
        self, rng: np.random.Generator, n: int, always_on: Array | None = None, free: Array | None = None
    ) -> Array:
        """Return at most ``n`` distinct random allowed rows.

        ``always_on`` (factors,) are on in all of them. Only ``free`` factors change, each lever on in half.
        """
        start = np.zeros(len(self.factors), dtype=bool) if always_on is None else always_on
        free_factors = np.ones(len(self.factors), dtype=bool) if free is None else free
        rows = np.repeat(start[None, :], n, axis=0)
        for lever in rng.permutation(np.array(list(self.columns_of), dtype=object)):
            columns = [i for i in self.columns_of[lever] if free_factors[i]]
            if columns and not start[self.columns_of[lever]].any():
                chosen = np.array(columns)[rng.integers(len(columns), size=n)]
                rows[np.arange(n), chosen] = rng.random(n) < 0.5
        for _ in range(len(self.factors)):
            invalid = ~self.allowed_rows(rows)
            if not invalid.any():
                break
            rows[invalid] &= (rng.random((int(invalid.sum()), len(self.factors))) < 0.75) | start
        return np.unique(rows[self.allowed_rows(rows)], axis=0)

    # -- the best set

    def best_rows(self, effects: Array, penalty: float = 0.0) -> Array:
        """(n, factors) sets with the least log time, one for each row of ``effects`` (n, factors + pairs).

        ``penalty`` is added for each active factor.
        """
        if self.allowed_sets is not None:
            times = self._allowed_features @ effects.T
            times += penalty * self.allowed_sets.sum(axis=1)[:, None]
            return self.allowed_sets[np.argmin(times, axis=0)]
        starts = self.sample(np.random.default_rng(0), DESCENT_STARTS)
        sampled = starts[
            np.argmin(self.features(starts) @ effects.T + penalty * starts.sum(axis=1)[:, None], axis=0)
        ]
        solutions = [self._descend(effects, penalty, start) for start in (np.zeros_like(sampled), sampled)]
        times = np.stack(
            [(self.features(rows) * effects).sum(axis=1) + penalty * rows.sum(axis=1) for rows in solutions]
        )
        return np.where((times[0] <= times[1])[:, None], solutions[0], solutions[1])

    def _descend(self, effects: Array, penalty: float, rows: Array) -> Array:
        """Coordinate descent, one lever or two linked levers at a time, until nothing changes."""
        count, (left, right) = len(self.factors), self._pair_columns
        pair_effects = np.zeros((len(effects), count, count))
        pair_effects[:, left, right] = pair_effects[:, right, left] = effects[:, count:]
        rows = rows.copy()
        for _ in range(MAX_SWEEPS):
            previous = rows.copy()
            for columns, options in self._moves:
                rest = rows.copy()
                rest[:, columns] = False
                slopes = (
                    effects[:, columns] + penalty + np.einsum("dcj,dj->dc", pair_effects[:, columns], rest)
                )
                pair_times = (
                    np.einsum("oc,dce,oe->do", options, pair_effects[:, columns][:, :, columns], options) / 2
                )
                times = slopes @ options.T + pair_times
                current = (rows[:, None, columns] == (options > 0)[None]).all(axis=2)
                times[current] -= MIN_STEP
                for i, option in enumerate(options > 0):
                    rest[:, columns] = option
                    times[~self.allowed_rows(rest), i] = np.inf
                rows[:, columns] = (options > 0)[np.argmin(times, axis=1)]
            if (rows == previous).all():
                break
        return rows

    @cached_property
    def _moves(self) -> list[tuple[list[int], Array]]:
        """Columns that change together, and their settings (options, columns).

        First each lever, then levers that exclude, need or are known to affect each other.
        """
        linked = {
            *self.excludes,
            *self.known_pairs,
            *(frozenset((lever, other)) for lever, others in self.needs.items() for other in others),
        }
        linked_levers = [sorted(pair) for pair in linked if len(pair) == 2 and pair <= set(self.columns_of)]
        groups = [*([lever] for lever in self.columns_of), *sorted(linked_levers)]
        moves = []
        for levers in groups:
            columns = [i for lever in levers for i in self.columns_of[lever]]
            moves.append((columns, np.array([row[columns] for row in self._lever_rows(levers)], dtype=float)))
        return moves
