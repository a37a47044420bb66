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

TAIL = 4.0  # default degrees of freedom of the noise
ROUNDS = 14
SETTLED = 0.02  # largest change of a log variance in the last round; standard errors then change by 1 %
LARGEST_STEP = 1.5  # of the log of a variance in one round
NODES = (-2.0, -1.0, 0.0, 1.0, 2.0)  # values of the mixed component, in its standard deviations
QUARTILE = 0.74  # of t with four degrees of freedom; initial value of its scale
SCALE_ROUNDS = 4
LEAST_SLOPE = 0.3  # of the score, on average; smaller slopes would inflate residuals
LEAST_FREE = 0.02  # of the measurements, degrees of freedom of the residuals
LEAST_NOISE = 1e-3  # sd; below it sums lose precision
LEAST_SHARE = 1e-3  # of a node in the mixture

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

    ``tail``: degrees of freedom of a t prior with scale ``sd``, which shrinks coefficients far from their
    mean less. None for a normal prior.
    """

    columns: int
    sd: Component | Array
    mean: Array | float = 0.0
    tail: float | None = None


@dataclass(frozen=True)
class PosteriorPart:
    """One Gaussian of the posterior: weight, mean (columns,) and covariance (columns, columns)."""

    weight: float
    mean: Array
    cov: Array


@dataclass(frozen=True)
class Solution:
    """The posterior ``parts``, heaviest first; the ``noise``; and ``sds``, one per group (None if known)."""

    parts: tuple[PosteriorPart, ...]
    noise: float
    sds: tuple[float | None, ...]


class _System:
    """The state of a solution: data, priors, and current variances."""

    def __init__(self, x: Array, y: Array, groups: Sequence[Group], noise: Component, tail: float) -> None:
        self.x, self.y, self.groups, self.noise, self.tail = x, y, groups, noise, tail
        self.gram = x.T @ x
        self.prior = np.concatenate([np.broadcast_to(group.mean, group.columns) for group in groups]).astype(
            float
        )
        ends = np.cumsum([group.columns for group in groups])
        self.slices = [slice(end - group.columns, end) for group, end in zip(groups, ends, strict=True)]
        self.free = [at for at, group in enumerate(groups) if isinstance(group.sd, Component)]
        self.log_variance = {at: 2 * float(np.log(groups[at].sd.median)) for at in self.free}
        self.dof: dict[int, float] = dict.fromkeys(self.free, 0.0)
        self.known = {
            at: np.broadcast_to(group.sd, group.columns) ** 2
            for at, group in enumerate(groups)
            if at not in self.free
        }
        self.log_noise = 2 * float(np.log(noise.median))
        self.pseudo = y.copy()

    def variances(self) -> Array:
        parts = [
            np.full(group.columns, np.exp(self.log_variance[at]))
            if at in self.log_variance
            else self.known[at]
            for at, group in enumerate(self.groups)
        ]
        return np.concatenate(parts)

    def posterior(self) -> tuple[Array, Array]:
        """Mean and covariance, given all variances."""
        noise = np.exp(self.log_noise)
        precision = self.gram / noise
        precision[np.diag_indices_from(precision)] += 1 / self.variances()
        cov = np.linalg.inv(precision)
        return self.prior + cov @ (self.x.T @ (self.pseudo - self.x @ self.prior)) / noise, cov

    def evidence(self) -> float:
        """The log of the marginal likelihood times the priors of the components, up to a constant."""
        noise, variances = np.exp(self.log_noise), self.variances()
        scaled = np.sqrt(variances)
        inner = scaled[:, None] * self.gram * scaled[None, :] / noise
        inner[np.diag_indices_from(inner)] += 1.0
        root = np.linalg.cholesky(inner)
        rest = self.pseudo - self.x @ self.prior
        projected = np.linalg.solve(root, scaled * (self.x.T @ rest)) / noise
        value = (
            -np.log(np.diag(root)).sum()
            - 0.5 * len(rest) * self.log_noise
            - 0.5 * (rest @ rest / noise - projected @ projected)
        )
        return (
            float(value)
            + self.noise.log_prior(self.log_noise)
            + sum(self.groups[at].sd.log_prior(value) for at, value in self.log_variance.items())
        )

    def round(self) -> float:
        """Take one step of the fixed-point iteration; return the largest change of a log variance."""
        before = {**self.log_variance, -1: self.log_noise}
        mean, cov = self.posterior()
        variances, diagonal = self.variances(), np.diag(cov)
        fitted = self.x @ mean
        # Degrees of freedom of the residuals
        free = max(len(self.y) - float((1 - diagonal / variances).sum()), LEAST_FREE * len(self.y))
        self.pseudo = fitted + _scores(self.y - fitted, free, self.tail)
        self.log_noise += _step(self.log_noise, float(((self.pseudo - fitted) ** 2).sum()), free, self.noise)
        self.log_noise = max(self.log_noise, 2 * float(np.log(LEAST_NOISE)))
        for at, group in enumerate(self.groups):
            # Expected variance of each coefficient; a t distribution is a mixture of normals
            if group.tail is not None:
                columns = self.slices[at]
                squared = (mean[columns] - self.prior[columns]) ** 2 + diagonal[columns]
                self.known[at] = (group.tail * np.broadcast_to(group.sd, group.columns) ** 2 + squared) / (
                    group.tail + 1
                )
        for at in self.free:
            columns = self.slices[at]
            variance = np.exp(self.log_variance[at])
            self.dof[at] = max(float((1 - diagonal[columns] / variance).sum()), 1e-9)
            squares = float(((mean[columns] - self.prior[columns]) ** 2).sum())
            self.log_variance[at] += _step(self.log_variance[at], squares, self.dof[at], self.groups[at].sd)
        return max(abs(value - before[at]) for at, value in {**self.log_variance, -1: self.log_noise}.items())


def _scores(residuals: Array, free: float, tail: float) -> Array:
    """(n,) pseudo-residuals of a t distribution with the scale of ``residuals``.

    A Gaussian with their variance gives the same standard errors.
    """
    inflate = len(residuals) / free
    square = max(float(np.median(np.abs(residuals))) / QUARTILE, 1e-9) ** 2 * inflate
    for _ in range(SCALE_ROUNDS):
        weights = (tail + 1) / (tail + residuals**2 / square)
        square = max(float((weights * residuals**2).mean()) * inflate, 1e-18)
    z = residuals**2 / square
    slope = float(((tail + 1) * (tail - z) / (tail + z) ** 2).mean())
    return (tail + 1) / (tail + z) * residuals / max(slope, LEAST_SLOPE)


def _step(log_variance: float, squares: float, dof: float, prior: Component) -> float:
    """Return the step of a log variance towards ``squares / dof``, damped by its prior."""
    towards = float(np.log(max(squares, 1e-300) / dof)) - log_variance
    pull = -(log_variance / 2 - float(np.log(prior.median))) / (2 * prior.log_sd**2)
    step = (dof / 2 * towards + pull) / (dof / 2 + 1 / (4 * prior.log_sd**2))
    return max(-LARGEST_STEP, min(LARGEST_STEP, step))


def solve(
    x: Array,
    y: Array,
    groups: Sequence[Group],
    noise: Component,
    keep: slice,
    mixed: int | None = None,
    tail: float = TAIL,
) -> Solution:
    """Return the posterior of the columns ``keep``, for ``x`` (n, columns) and ``y`` (n,).

    The noise has ``tail`` degrees of freedom. The sd of group ``mixed`` is integrated out; all others are at
    their mode.
    """
    system = _System(x, y, groups, noise, tail)
    for _ in range(ROUNDS):
        if system.round() < SETTLED:
            break
    sds = tuple(
        float(np.exp(system.log_variance[at] / 2)) if at in system.log_variance else None
        for at in range(len(groups))
    )
    parts = []
    if mixed is None:
        mean, cov = system.posterior()
        parts = [PosteriorPart(1.0, mean[keep], cov[keep, keep])]
    else:
        component, mode = groups[mixed].sd, system.log_variance[mixed]
        width = 1 / np.sqrt(system.dof[mixed] / 2 + 1 / (4 * component.log_sd**2))
        scored = []
        for node in NODES:
            system.log_variance[mixed] = mode + node * width
            scored.append((system.evidence(), system.log_variance[mixed]))
        best = max(score for score, _ in scored)
        weights = [float(np.exp(score - best)) for score, _ in scored]
        for weight, (_, system.log_variance[mixed]) in zip(weights, scored, strict=True):
            if weight > LEAST_SHARE:
                mean, cov = system.posterior()
                parts.append(PosteriorPart(weight, mean[keep], cov[keep, keep]))
        total = sum(part.weight for part in parts)
        parts = sorted(
            (PosteriorPart(part.weight / total, part.mean, part.cov) for part in parts),
            key=lambda part: -part.weight,
        )
    return Solution(tuple(parts), float(np.exp(system.log_noise / 2)), sds)
