"""Exceptions of flatout and their exit codes. A message says what happened, why, and the next command."""

# Raised by reading JSON of another form.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class FlatoutError(Exception):
    """Base class of errors that flatout shows as a message, without a traceback."""

    exit_code = 1


class UsageError(FlatoutError):
    """The command line cannot be understood."""

    exit_code = 2


class NoBaseline(UsageError):
    """The baseline to compare with is missing, or was measured on another machine."""

    exit_code = 11


class PlanError(FlatoutError):
    """A flatout.toml that is broken, hostile or too new."""

    exit_code = 2


class ProgramNotFound(FlatoutError):
    """There is no such program or script."""

    exit_code = 127


class ProgramFailed(FlatoutError):
    """The user's program failed by itself. flatout exits with the same code, except in a comparison."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code


class NothingMeasured(FlatoutError):
    """The program ran, but no training step could be measured."""

    exit_code = 3


class TrialFailed(FlatoutError):
    """A trial died, hung or lost its program."""

    exit_code = 3


class CannotParallelize(FlatoutError):
    """A program cannot run as several ranks and learn the same.

    If raised inside the program, the message is the reason: a sentence without a full stop."""

    exit_code = 6


class LoopError(FlatoutError):
    """A `flatout.Loop` cannot do exactly what was requested, or its model, loss and batches do not match."""


class StorageError(FlatoutError):
    """A folder or a disk cannot be written."""

    exit_code = 4


class CheckpointError(FlatoutError):
    """A checkpoint is corrupt, belongs to another program, or is missing."""

    exit_code = 7


class NodesUnreachable(FlatoutError):
    """The machines of a job cannot find or lost each other."""

    exit_code = 5


class ProgramHung(FlatoutError):
    """A monitored program hung, and no restart is left."""

    exit_code = 8


class NotFinite(FlatoutError):
    """A loss was NaN or infinite, and the run must stop."""

    exit_code = 9


class CannotResume(FlatoutError):
    """A program cannot resume from a checkpoint to exactly the results of an uninterrupted run."""

    exit_code = 10


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def error_line(reason: str) -> str:
    """Return what a program ended with, in at most 240 characters.

    The first line of the last exception: CUDA's messages end with advice for its developers. Or the last line."""
    lines = [line.rstrip() for line in reason.strip().splitlines() if line.strip()]
    headers = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if headers:
        after = lines[headers[-1] + 1 :]
        message = next((at for at, line in enumerate(after) if not line.startswith(" ")), 0)
        lines = [" ".join(after[message : message + 1 + after[message].endswith(":")])] if after else lines
    lines = [line for line in lines if "CUDA error: " in line][:1] or lines
    return " ".join(lines[-1].split())[:240] if lines else "it ended without a message"
