"""Enumerations: when a lever acts, what it may change, the origin of a choice, and the outcome of a lever."""

from enum import Enum


class StrEnum(str, Enum):
    """Members that are shown as their values, as with enum.StrEnum, which Python 3.10 lacks."""

    __str__ = str.__str__


class Moment(StrEnum):
    """When a lever acts. Members are in the order of a run."""

    PROCESS = "process"  # before the interpreter starts: environment variables
    IMPORT = "import"  # right after `import torch`
    LOADER = "loader"  # when a DataLoader is created
    MODEL = "model"  # after the first step, when the root modules are known
    OPTIMIZER = "optimizer"  # after the first step, when the optimizers are known
    STEP = "step"  # between any two steps


class Effect(StrEnum):
    """What a lever may change, from nothing to the maths."""

    EXACT = "exact"  # results stay the same, bit for bit
    ROUNDING = "rounding"  # the same maths with different rounding, in the same number format
    PRECISION = "precision"  # the same maths, with products or communication in half precision
    RESAMPLED = "resampled"  # the same distribution, different random draws
    CHANGES_MATH = "changes_math"  # only if named by the user, never chosen by the tuner

    @property
    def rank(self) -> int:
        return list(Effect).index(self)


class Origin(StrEnum):
    """Origin of a choice."""

    USER = "user"
    TUNER = "tuner"
    FILE = "file"


class Status(StrEnum):
    """Outcome of a lever."""

    APPLIED = "applied"
    REJECTED = "rejected"  # measured and not kept
    SKIPPED = "skipped"  # not measured, with a reason
