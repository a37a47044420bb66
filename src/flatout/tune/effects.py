"""Estimates the effect of each lever by one Bayesian regression on the log times of all blocks.

    log ms = host + process +  drift, moment and turn of the machine + work of the tick window
             + cold start + effects of active factors + effects of active pairs + noise

Effects and pairs have Gaussian priors. Process, work, moments (of two seconds), turns (blocks whose slices
alternate) and cold starts (the first block of a process, and of one that was stopped for long) are random effects
with estimated variances. The drift is a piecewise random walk, and the noise has heavy tails
(`flatout.tune.mixed_model`). A factor that was never on keeps its prior. Priors shrink weakly supported effects,
which also corrects for selecting the luckiest candidate. They have heavy tails too, but not for `unsupported` factors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flatout.schema.records import Ratio
from flatout.tune.mixed_model import Component, Group, PosteriorPart, solve
from flatout.tune.one_thread import np
from flatout.tune.space import Factor as Factor
from flatout.tune.space import Space as Space

REGRET_DRAWS = 200
MAX_DRIFT_PIECES = 16  # of the drift, per host
HOST_SD = 3.0  # of a host's log time around the median; hosts may differ by any factor
BISECTIONS = 36
NORMAL_DOF = 1e9  # Student's t with these degrees of freedom is normal
QUANTILES = (0.5, 0.025, 0.975)
PLAN = "the whole plan"  # the key of the blocks of a plan's fresh processes
PLAN_SD = 1.0  # of its prior, in log time
PLAN_MISFIT = 0.008  # in log time

Array = Any  # a numpy array; the shape is in each docstring


@dataclass(frozen=True)
class TimedBlock:
    """Consecutive steps measured together, at ``ms`` milliseconds a step.

    ``at_s`` is the wall time in seconds; blocks whose slices alternated have the same one. Blocks of different
    processes with the same ``window`` did the same work (the same ticks of the program).
    """

    process: int
    active: frozenset[str]
    at_s: float
    window: int
    ms: float
    host: str = ""
    busy: float = 0.0  # cores that other processes used meanwhile


@dataclass(frozen=True)
class PriorScales:
    """Prior standard deviations in log time.

    The variance components (process, noise, work, drift, moment, turn) have log-normal priors: median, and sd of
    the logarithm.
    """

    # Degrees of freedom, above 2, of the priors of effects and pairs; a few are large
    t_dof: float = 4.0
    pair: float = 0.035  # scale of the prior of pairs; the scale of effects follows from their sd
    known_pair: float = 0.1
    process: tuple[float, float] = (0.04, 0.6)
    noise: tuple[float, float] = (0.05, 0.7)
    noise_t_dof: float = 4.0  # degrees of freedom
    work: tuple[float, float] = (0.01, 1.2)
    drift: tuple[float, float] = (0.01, 0.8)  # of one piece
    piece_s: float = 10.0  # shortest piece of the drift
    moment: tuple[float, float] = (0.02, 1.0)
    moment_s: float = 2.0  # clock rates and the load of other processes change within seconds
    turn: tuple[float, float] = (0.02, 1.0)  # tenants of a shared machine disturb for parts of a second
    cold: tuple[float, float] = (0.02, 1.5)  # empty queues, levers that fill their stores
    cold_stop_s: float = 15.0


@dataclass(frozen=True)
class Estimate:
    """A speed ratio: the posterior median, a 95 % interval, and the chance that its effects make it faster at all."""

    median: float
    low: float
    high: float
    chance: float


@dataclass(frozen=True)
class Fitted:
    """The joint posterior of the effects.

    All sds are in log time. ``parts``: Gaussians over ``space.features``.
    """

    space: Space
    parts: tuple[PosteriorPart, ...]
    process_sd: float
    noise_sd: float
    measured_keys: frozenset[str]  # keys that were on in some block

    @cached_property
    def mean(self) -> Array:
        """(factors + pairs,) posterior means."""
        return sum(part.weight * part.mean for part in self.parts)

    @cached_property
    def cov(self) -> Array:
        """(factors + pairs, factors + pairs) covariance, within and between the parts."""
        gaps = [part.mean - self.mean for part in self.parts]
        return sum(
            part.weight * (part.cov + np.outer(gap, gap)) for part, gap in zip(self.parts, gaps, strict=True)
        )

    def draws(self, n: int, seed: int = 0) -> Array:
        """(n, factors + pairs) joint draws; the same seed gives the same draws."""
        rng = np.random.default_rng(seed)
        counts = np.floor(np.cumsum([part.weight for part in self.parts]) * n + 0.5).astype(int)
        samples = []
        for part, count in zip(self.parts, np.diff(counts, prepend=0), strict=True):
            values, vectors = np.linalg.eigh(part.cov)
            normal = rng.standard_normal((count, len(values)))
            samples.append(part.mean + normal * np.sqrt(np.maximum(values, 0.0)) @ vectors.T)
        return np.vstack(samples)

    def gain(self, active: frozenset[str], against: frozenset[str] = frozenset()) -> Estimate:
        """The speed of ``active`` relative to ``against``.

        Raises ValueError for a key without a factor.
        """
        a, b = self.space.features(self.space.rows([against, active]))
        means = np.array([(a - b) @ part.mean for part in self.parts])
        misfit = 2 * self.space.misfit**2 if active != against else 0.0
        variances = np.maximum([(a - b) @ part.cov @ (a - b) for part in self.parts], 1e-24)
        sds = np.sqrt(variances + misfit)
        weights = np.array([part.weight for part in self.parts])
        median, low, high = (math.exp(_mixture_quantile(q, weights, means, sds)) for q in QUANTILES)
        return Estimate(median, low, high, 1 - _mixture_cdf(0.0, weights, means, np.sqrt(variances)))

    def effect(self, key: str, others: frozenset[str] = frozenset()) -> Estimate:
        """The speed-up of ``key`` given ``others``; it replaces another value of its lever."""
        lever = self.space.factors[self._column(key)].lever
        rest = frozenset(other for other in others if self.space.factors[self._column(other)].lever != lever)
        return self.gain(rest | {key}, rest)

    def _column(self, key: str) -> int:
        self.space.rows([frozenset({key})])  # raises for an unknown one
        return self.space.index[key]

    def best(self, min_gain_per_lever: float = 0.003) -> frozenset[str]:
        """The allowed set with the least expected log time.

        Each factor must save at least ``min_gain_per_lever`` of it.
        """
        return self.space.keys(self.space.best_rows(self.mean[None, :], min_gain_per_lever)[0])

    @cached_property
    def best_draws(self) -> tuple[Array, Array]:
        """Draws (n, factors + pairs), and the best set of each draw, (n, factors) booleans."""
        draws = self.draws(REGRET_DRAWS)
        return draws, self.space.best_rows(draws)

    def regret(self, active: frozenset[str]) -> float:
        """The expected loss in log time from choosing ``active`` now instead of the true best set."""
        draws, best = self.best_draws
        chosen = self.space.features(self.space.rows([active]))[0]
        return float((draws @ chosen - (draws * self.space.features(best)).sum(axis=1)).mean())


def unsupported(blocks: Sequence[TimedBlock]) -> Iterator[str]:
    """The factors without both sides in one process, or each in two. They stand for all that their process was."""
    for key in frozenset().union(*(block.active for block in blocks)):
        on, off = (
            {(b.host, b.process) for b in blocks if (key in b.active) is side} for side in (True, False)
        )
        if not on & off and min(len(on), len(off)) < 2:
            yield key


def fit_effects(space: Space, blocks: Iterable[TimedBlock], scales: PriorScales = PriorScales()) -> Fitted:
    """The posterior after these blocks, in any order; without blocks, the prior.

    Raises ValueError for a time that is not positive and finite.
    """
    ordered = sorted(blocks, key=lambda b: (b.host, b.process, b.at_s, b.window, b.ms, sorted(b.active)))
    if any(not (block.ms > 0 and math.isfinite(block.ms)) for block in ordered):
        raise ValueError("the time of a block must be a positive number of milliseconds")
    prior_mean = np.concatenate([[factor.mean for factor in space.factors], np.zeros(len(space.pairs))])
    prior_sd = np.concatenate(
        [[factor.sd for factor in space.factors], np.where(space.known_mask, scales.known_pair, scales.pair)]
    )
    if not ordered:
        prior = PosteriorPart(1.0, prior_mean, np.diag(prior_sd**2))
        return Fitted(space, (prior,), scales.process[0], scales.noise[0], frozenset())
    features = space.features(space.rows([block.active for block in ordered]))
    columns = np.flatnonzero(features.any(axis=0))
    hosts = _indicators([block.host for block in ordered])
    processes = _indicators([block.process for block in ordered])
    windows = _indicators([block.window for block in ordered])
    drift = _drift_columns(ordered, hosts, scales.piece_s)
    first_s = {block.host: block.at_s for block in sorted(ordered, key=lambda b: -b.at_s)}
    moments = _indicators(
        [(block.host, int((block.at_s - first_s[block.host]) / scales.moment_s)) for block in ordered]
    )
    log_ms = np.log([block.ms for block in ordered])
    n, t_dof, scale = len(space.factors), np.full(len(prior_sd), scales.t_dof), prior_sd.copy()
    t_dof[[space.index[key] for key in unsupported(ordered)]] = NORMAL_DOF
    scale[:n] *= np.sqrt(1 - 2 / t_dof[:n])
    turns, cold = _turn_columns(ordered), _cold_columns(ordered, scales.cold_stop_s)
    groups = [
        Group(len(columns), scale[columns], prior_mean[columns], t_dof[columns]),
        Group(hosts.shape[1], np.full(hosts.shape[1], HOST_SD)),
        Group(processes.shape[1], Component(*scales.process)),
        Group(windows.shape[1], Component(*scales.work)),
        Group(drift.shape[1], Component(*scales.drift)),
        Group(moments.shape[1], Component(*scales.moment)),
        Group(turns.shape[1], Component(*scales.turn)),
        Group(cold.shape[1], Component(*scales.cold)),
    ]
    solution = solve(
        np.hstack([features[:, columns], hosts, processes, windows, drift, moments, turns, cold]),
        log_ms - np.median(log_ms),
        groups,
        Component(*scales.noise),
        keep=slice(0, len(columns)),
        integrated=2,
        t_dof=scales.noise_t_dof,
    )
    measured_keys = frozenset().union(*(block.active for block in ordered))
    parts = tuple(_with_unmeasured(part, columns, prior_mean, prior_sd) for part in solution.parts)
    return Fitted(space, parts, solution.sd, solution.noise_sd, measured_keys)


def plan_speed(fresh: Iterable[TimedBlock]) -> Estimate:
    """The speed of a plan in its fresh pairs: ``fresh`` are plain blocks, and blocks of the plan with `PLAN` on.

    Its factor has a flat prior. The blocks of the search do not count: they chose the plan, and where effects do not
    add up, they show processes that vary too much.
    """
    space = Space((Factor(PLAN, PLAN, live=False, sd=PLAN_SD),), misfit=PLAN_MISFIT)
    return fit_effects(space, fresh).gain(frozenset({PLAN}))


def _with_unmeasured(
    part: PosteriorPart, columns: Array, prior_mean: Array, prior_sd: Array
) -> PosteriorPart:
    mean, cov = prior_mean.copy(), np.diag(prior_sd**2)
    mean[columns] = part.mean
    cov[np.ix_(columns, columns)] = part.cov
    return PosteriorPart(part.weight, mean, cov)


def _indicators(labels: Sequence[Any]) -> Array:
    """(n, distinct labels) floats."""
    order = {label: i for i, label in enumerate(sorted(set(labels)))}
    return np.eye(len(order))[[order[label] for label in labels]]


def _turn_columns(blocks: Sequence[TimedBlock]) -> Array:
    """(n, turns) floats: the turn of each block. A turn of one block cannot be told from its noise."""
    turns = _indicators([(block.host, block.at_s) for block in blocks])
    return turns[:, turns.sum(axis=0) > 1]


def _cold_columns(blocks: Sequence[TimedBlock], stop_s: float) -> Array:
    """(n, columns) floats: one for each block that is the first of its process, or the first after a long stop."""
    warm = [
        a.host == b.host and a.process == b.process and b.at_s - a.at_s <= stop_s
        for a, b in itertools.pairwise(blocks)
    ]
    return np.eye(len(blocks))[:, ~np.array([False, *warm])]


def _drift_columns(blocks: Sequence[TimedBlock], hosts: Array, piece_s: float) -> Array:
    """(n, pieces): how much of each piece of wall time has passed on a block's host.

    Coefficients are the steps of a random walk, linear within a piece.
    """
    at_s = np.array([block.at_s for block in blocks])
    columns = []
    for host in hosts.T:
        host_s = at_s[host > 0]
        pieces = min(MAX_DRIFT_PIECES, int((host_s.max() - host_s.min()) / piece_s))
        edges = np.linspace(host_s.min(), host_s.max(), pieces + 1)
        columns += [
            host * np.clip((at_s - low) / (high - low), 0.0, 1.0) for low, high in itertools.pairwise(edges)
        ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(blocks), 0))


def _mixture_cdf(value: float, weights: Array, means: Array, sds: Array) -> float:
    parts = zip(weights, means, sds, strict=True)
    return float(sum(w * 0.5 * math.erfc((m - value) / (s * math.sqrt(2))) for w, m, s in parts))


def _mixture_quantile(q: float, weights: Array, means: Array, sds: Array) -> float:
    low, high = float((means - 12 * sds).min()), float((means + 12 * sds).max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mixture_cdf(middle, weights, means, sds) < q else (low, middle)
    return (low + high) / 2


def ratio_of(estimate: Estimate, n: int) -> Ratio:
    return Ratio(estimate.median, estimate.low, estimate.high, n)
