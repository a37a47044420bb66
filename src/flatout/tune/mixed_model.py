"""Solves a linear mixed model with Gaussian priors and heavy-tailed noise, for small data, in milliseconds.

    y = x b + noise,  b_j ~ normal(mean_j, sd_j),  noise ~ Student's t

Columns belong to groups. The sd of a group is known for each column, or one unknown for the whole group with
a log-normal prior (variance component).

Variance components are estimated by restricted maximum likelihood, with MacKay's fixed-point iteration damped
by each prior. Heavy tails are handled with pseudo-values (Huber): residuals are replaced by their score, so
outliers lose their influence while the model stays Gaussian. The uncertainty of one component enters the
result: the posterior is a mixture over several values of its sd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.tune.one_thread import np

NOISE_T_DOF = 4.0  # degrees of freedom
MAX_ITERATIONS = 14
CONVERGED_CHANGE = (
    0.02  # largest change of a log variance in the last round; standard errors then change by 1 %
)
MAX_STEP = 1.5  # of the log of a variance in one round
NODES = (-2.0, -1.0, 0.0, 1.0, 2.0)  # values of the mixed component, in its standard deviations
T4_QUARTILE = 0.74  # of t with four degrees of freedom; initial value of its scale
SCALE_ITERATIONS = 4
MIN_SLOPE = 0.3  # of the score, on average; smaller slopes would inflate residuals
MIN_FREE_SHARE = 0.02  # of the measurements, degrees of freedom of the residuals
MIN_NOISE_SD = 1e-3  # below it sums lose precision
MIN_NODE_WEIGHT = 1e-3  # of a node in the mixture

Array = Any  # a numpy array; the shape is in each docstring


@dataclass(frozen=True)
class Component:
    """An unknown sd: its prior median, and the sd of its logarithm."""

    median: float
    log_sd: float

    def log_prior(self, log_variance: float) -> float:
        return float(-0.5 * ((log_variance / 2 - np.log(self.median)) / self.log_sd) ** 2)


@dataclass(frozen=True)
class Group:
    """Adjacent columns. ``sd`` is a shared ``Component``, or (columns,) known values.

    ``t_dof``: degrees of freedom of t priors with scale ``sd``, one or (columns,), which shrink coefficients far from
    their mean less. None for a normal prior.
    """

    columns: int
    sd: Component | Array
    mean: Array | float = 0.0
    t_dof: Array | float | None = None


@dataclass(frozen=True)
class PosteriorPart:
    """One Gaussian of the posterior: weight, mean (columns,) and covariance (columns, columns)."""

    weight: float
    mean: Array
    cov: Array


@dataclass(frozen=True)
class Solution:
    """The posterior ``parts``, heaviest first; the sd of the noise, and of the integrated group."""

    parts: tuple[PosteriorPart, ...]
    noise_sd: float
    sd: float


class _System:
    """The state of a solution: data, priors, and current variances."""

    def __init__(self, x: Array, y: Array, groups: Sequence[Group], noise: Component, t_dof: float) -> None:
        self.x, self.y, self.groups, self.noise, self.t_dof = x, y, groups, noise, t_dof
        self.prior_mean = np.concatenate(
            [np.broadcast_to(group.mean, group.columns) for group in groups]
        ).astype(float)
        ends = np.cumsum([group.columns for group in groups])
        self.slices = [slice(end - group.columns, end) for group, end in zip(groups, ends, strict=True)]
        self.unknown_groups = [i for i, group in enumerate(groups) if isinstance(group.sd, Component)]
        self.log_variance = {i: 2 * float(np.log(groups[i].sd.median)) for i in self.unknown_groups}
        self.dof: dict[int, float] = dict.fromkeys(self.unknown_groups, 0.0)
        self.known_variances = {
            i: np.broadcast_to(group.sd, group.columns) ** 2
            for i, group in enumerate(groups)
            if i not in self.unknown_groups
        }
        self.log_noise = 2 * float(np.log(noise.median))
        self.pseudo_y = y.copy()

    def variances(self) -> Array:
        parts = [
            np.full(group.columns, np.exp(self.log_variance[i]))
            if i in self.log_variance
            else self.known_variances[i]
            for i, group in enumerate(self.groups)
        ]
        return np.concatenate(parts)

    def data_cov(self, weighted: Array) -> Array:
        """(n, n): of the measurements. Smaller than that of the columns. ``weighted``: the columns times their variances."""
        cov = weighted @ self.x.T
        cov[np.diag_indices_from(cov)] += np.exp(self.log_noise)
        return cov

    @property
    def residual(self) -> Array:
        return self.pseudo_y - self.x @ self.prior_mean

    def posterior(self, keep: slice = slice(None, 0)) -> tuple[Array, Array, Array]:
        """Mean and variance of all columns, and covariance of the columns ``keep``, given all variances."""
        variances = self.variances()
        weighted = self.x * variances
        gain = np.linalg.inv(self.data_cov(weighted)) @ weighted  # (n, columns)
        cov = np.diag(variances[keep]) - weighted[:, keep].T @ gain[:, keep]
        mean = self.prior_mean + gain.T @ self.residual
        return mean, variances - (weighted * gain).sum(axis=0), cov

    def evidence(self) -> float:
        """The log of the marginal likelihood times the priors of the components, up to a constant."""
        lower = np.linalg.cholesky(self.data_cov(self.x * self.variances()))
        projected = np.linalg.solve(lower, self.residual)
        value = -np.log(np.diag(lower)).sum() - 0.5 * projected @ projected
        return (
            float(value)
            + self.noise.log_prior(self.log_noise)
            + sum(self.groups[i].sd.log_prior(value) for i, value in self.log_variance.items())
        )

    def iterate(self) -> float:
        """Take one step of the fixed-point iteration; return the largest change of a log variance."""
        before = {**self.log_variance, -1: self.log_noise}
        mean, diagonal, _ = self.posterior()
        variances = self.variances()
        fitted = self.x @ mean
        # Degrees of freedom of the residuals
        free_dof = max(len(self.y) - float((1 - diagonal / variances).sum()), MIN_FREE_SHARE * len(self.y))
        self.pseudo_y = fitted + _scores(self.y - fitted, free_dof, self.t_dof)
        self.log_noise += _step(
            self.log_noise, float(((self.pseudo_y - fitted) ** 2).sum()), free_dof, self.noise
        )
        self.log_noise = max(self.log_noise, 2 * float(np.log(MIN_NOISE_SD)))
        for i, group in enumerate(self.groups):
            # Expected variance of each coefficient; a t distribution is a mixture of normals
            if group.t_dof is not None:
                columns = self.slices[i]
                squared = (mean[columns] - self.prior_mean[columns]) ** 2 + diagonal[columns]
                self.known_variances[i] = (
                    group.t_dof * np.broadcast_to(group.sd, group.columns) ** 2 + squared
                ) / (group.t_dof + 1)
        for i in self.unknown_groups:
            columns = self.slices[i]
            variance = np.exp(self.log_variance[i])
            self.dof[i] = max(float((1 - diagonal[columns] / variance).sum()), 1e-9)
            squares = float(((mean[columns] - self.prior_mean[columns]) ** 2).sum())
            self.log_variance[i] += _step(self.log_variance[i], squares, self.dof[i], self.groups[i].sd)
        return max(abs(value - before[i]) for i, value in {**self.log_variance, -1: self.log_noise}.items())


def _scores(residuals: Array, free_dof: float, t_dof: float) -> Array:
    """(n,) pseudo-residuals of a t distribution with the scale of ``residuals``.

    A Gaussian with their variance gives the same standard errors.
    """
    inflate = len(residuals) / free_dof
    square = max(float(np.median(np.abs(residuals))) / T4_QUARTILE, 1e-9) ** 2 * inflate
    for _ in range(SCALE_ITERATIONS):
        weights = (t_dof + 1) / (t_dof + residuals**2 / square)
        square = max(float((weights * residuals**2).mean()) * inflate, 1e-18)
    z = residuals**2 / square
    slope = float(((t_dof + 1) * (t_dof - z) / (t_dof + z) ** 2).mean())
    return (t_dof + 1) / (t_dof + z) * residuals / max(slope, MIN_SLOPE)


def _step(log_variance: float, squares: float, dof: float, prior: Component) -> float:
    """The step of a log variance towards ``squares / dof``, damped by its prior."""
    target_step = float(np.log(max(squares, 1e-300) / dof)) - log_variance
    prior_pull = -(log_variance / 2 - float(np.log(prior.median))) / (2 * prior.log_sd**2)
    step = (dof / 2 * target_step + prior_pull) / (dof / 2 + 1 / (4 * prior.log_sd**2))
    return max(-MAX_STEP, min(MAX_STEP, step))


def solve(
    x: Array,
    y: Array,
    groups: Sequence[Group],
    noise: Component,
    keep: slice,
    integrated: int,
    t_dof: float = NOISE_T_DOF,
) -> Solution:
    """The posterior of the columns ``keep``, for ``x`` (n, columns) and ``y`` (n,).

    The noise has ``t_dof`` degrees of freedom. The sd of group ``integrated`` is integrated out.
    """
    system = _System(x, y, groups, noise, t_dof)
    for _ in range(MAX_ITERATIONS):
        if system.iterate() < CONVERGED_CHANGE:
            break
    component, mode = groups[integrated].sd, system.log_variance[integrated]
    width = 1 / np.sqrt(system.dof[integrated] / 2 + 1 / (4 * component.log_sd**2))
    scored = []
    for node in NODES:
        system.log_variance[integrated] = mode + node * width
        scored.append((system.evidence(), system.log_variance[integrated]))
    best, parts = max(score for score, _ in scored), []
    for score, system.log_variance[integrated] in scored:
        if score - best > np.log(MIN_NODE_WEIGHT):
            mean, _, cov = system.posterior(keep)
            parts.append(PosteriorPart(float(np.exp(score - best)), mean[keep], cov))
    total = sum(part.weight for part in parts)
    parts = [PosteriorPart(part.weight / total, part.mean, part.cov) for part in parts]
    parts.sort(key=lambda part: -part.weight)
    return Solution(tuple(parts), float(np.exp(system.log_noise / 2)), float(np.exp(mode / 2)))
