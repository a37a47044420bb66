"""What `flatout lr` saw: the loss as the learning rate grows from step to step, of the script's own optimizer and of others in its place."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from flatout.plan.errors import UsageError
from flatout.plan.records import ProgramRecord, Record

LR_SCHEMA = 1
OWN = "own"  # the script's optimizer


@dataclass
class LrPoint(Record):
    """One step: the learning rate of the first parameter group, the loss before its update, and the loss smoothed over the steps so far."""

    lr: float
    loss: float | None  # None where it was not finite
    smooth: float | None = None


@dataclass
class LrRange(Record):
    """The test of one optimizer.

    ``steepest`` is the learning rate at which the smoothed loss falls fastest, ``lowest`` where it is lowest, ``diverged`` where it has left for good.
    """

    name: str = OWN  # as it was asked for
    optimizer: str = ""  # the class
    groups: list[float] = field(default_factory=list)  # the script's own learning rates when the test began, group by group
    warmup_steps: int = 0  # of the script's own optimizer, at its own learning rate, before the test
    step_ms: float | None = None  # under this optimizer, median
    points: list[LrPoint] = field(default_factory=list)
    steepest: float | None = None
    lowest: float | None = None
    diverged: float | None = None
    suggestion: float | None = None
    why: str = ""  # this suggestion, or none


@dataclass
class LrTraining(Record):
    """Steps at one learning rate, the first group's: an optimizer at the one that its test suggests, or the script's own at the script's own."""

    name: str
    lr: float | None = None
    as_is: bool = False
    step_ms: float | None = None
    points: list[LrPoint] = field(default_factory=list)
    why: str = ""  # it did not train


@dataclass
class LrRecord(ProgramRecord):
    schema: int = LR_SCHEMA
    tests: list[LrRange] = field(default_factory=list)
    compute_s: float | None = None  # of each training
    trainings: list[LrTraining] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerWish:
    """An optimizer to put in the script's place: a name of torch.optim in any case, or ``package.Class``, and keyword arguments of its."""

    text: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> OptimizerWish:
        """``adamw``, ``sgd(momentum=0.9)``, ``package.Class(beta=0.5)``, ``own``. Raises UsageError."""
        text = text.strip()
        try:
            node = ast.parse(text, mode="eval").body
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError(text)
            return cls(text, _dotted(call.func), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(f"--optimizers: {text[:80]!r} is none. Write own, adamw, \"sgd(momentum=0.9)\" or package.Class, separated by commas.") from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError


def read_optimizers(text: str) -> list[OptimizerWish]:
    """A list separated by commas, none twice. Raises UsageError."""
    found, piece, depth = list[str](), "", 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found, piece = [*found, piece], ""
        else:
            piece += letter
    wishes = [OptimizerWish.read(each) for each in [*found, piece]]
    if len({wish.text.lower() for wish in wishes}) < len(wishes):
        raise UsageError(f"--optimizers {text}: each one once.")
    return wishes
