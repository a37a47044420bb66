"""Records of `flatout lr`: the loss under a growing learning rate, for the script's optimizer and for others."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from flatout.schema.errors import UsageError
from flatout.schema.records import ProgramRecord, Record

LR_SCHEMA = 1
OWN = "own"  # the script's optimizer


@dataclass
class LrPoint(Record):
    """One step: learning rate of the first parameter group, loss before the update, loss smoothed so far."""

    lr: float
    loss: float | None  # None if it was not finite
    smooth: float | None = None


@dataclass
class LrRange(Record):
    """The range test of one optimizer.

    ``steepest`` is the learning rate at which the smoothed loss falls fastest, ``lowest`` the one at which it
    is lowest, ``diverged`` the one at which it diverges.
    """

    name: str = OWN  # as requested
    optimizer: str = ""  # class name
    groups: list[float] = field(
        default_factory=list
    )  # the script's learning rates at the start of the test, by group
    warmup_steps: int = 0  # steps of the script's own optimizer, at its own learning rate, before the test
    step_ms: float | None = None  # under this optimizer, median
    points: list[LrPoint] = field(default_factory=list)
    steepest: float | None = None
    lowest: float | None = None
    diverged: float | None = None
    suggestion: float | None = None
    why: str = ""  # reason for the suggestion, or for its absence


@dataclass
class LrTraining(Record):
    """A training at one learning rate (of the first group).

    Other optimizers use the rate that their test suggests; the script's own optimizer uses the script's rate.
    """

    name: str
    lr: float | None = None
    as_is: bool = False
    step_ms: float | None = None
    points: list[LrPoint] = field(default_factory=list)
    why: str = ""  # reason why it did not train


@dataclass
class LrRecord(ProgramRecord):
    schema: int = LR_SCHEMA
    tests: list[LrRange] = field(default_factory=list)
    compute_s: float | None = None  # of each training
    trainings: list[LrTraining] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerOption:
    """An optimizer to use in place of the script's own.

    ``name`` is a class of torch.optim in any case, or ``package.Class``. ``options`` are its keyword
    arguments.
    """

    text: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> OptimizerOption:
        """Parse ``adamw``, ``sgd(momentum=0.9)``, ``package.Class(beta=0.5)`` or ``own``.

        Raises UsageError.
        """
        text = text.strip()
        try:
            node = ast.parse(text, mode="eval").body
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError(text)
            return cls(
                text,
                _dotted(call.func),
                {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
            )
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(
                f'--optimizers: {text[:80]!r} is not an optimizer. Use own, adamw, "sgd(momentum=0.9)" or package.Class, separated by commas.'
            ) from None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError


def read_optimizers(text: str) -> list[OptimizerOption]:
    """Parse a comma-separated list without duplicates. Raises UsageError."""
    found, piece, depth = list[str](), "", 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found, piece = [*found, piece], ""
        else:
            piece += letter
    requested = [OptimizerOption.read(each) for each in [*found, piece]]
    if len({request.text.lower() for request in requested}) < len(requested):
        raise UsageError(f"--optimizers {text}: name each optimizer only once.")
    return requested
