"""The vocabulary: when a lever acts, what it may change, where a choice came from, how it ended."""

from __future__ import annotations

from enum import StrEnum


class Moment(StrEnum):
    """When a lever acts. The order of the members is the order of the moments in a run."""

    PROCESS = "process"  # before the interpreter starts: environment variables
    IMPORT = "import"  # right after `import torch`
    LOADER = "loader"  # while a DataLoader is being made
    MODEL = "model"  # after the first step, when the root modules are known
    OPTIMIZER = "optimizer"  # after the first step, when the optimizers are known
    STEP = "step"  # between any two steps


class Effect(StrEnum):
    """What a lever may change, from nothing to the maths."""

    EXACT = "exact"  # every bit stays
    ROUNDING = "rounding"  # the same maths, with other rounding in the same number format
    PRECISION = "precision"  # the same maths, multiplied or sent in half precision
    RESAMPLED = "resampled"  # the same distribution, other random draws
    CHANGES_MATH = "changes_math"  # only ever by name, never by the tuner

    @property
    def rank(self) -> int:
        return list(Effect).index(self)


class Origin(StrEnum):
    """Where a choice came from."""

    DEFAULT = "default"
    USER = "user"
    TUNER = "tuner"
    FILE = "file"


class Status(StrEnum):
    """How a lever ended."""

    APPLIED = "applied"
    REJECTED = "rejected"  # measured, and not kept
    SKIPPED = "skipped"  # not measured, with a sentence that says why
