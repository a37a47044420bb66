"""Exceptions of flatout and their exit codes. A message says what happened, why, and the next command.

FlatoutError
├── UsageError            the command line cannot be understood                      exit 2
│   └── NoBaseline        the named baseline is missing, or of another machine       exit 11
├── PlanError             a flatout.toml that is broken, hostile or too new           exit 2
├── ProgramNotFound       there is no such program or script                         exit 127
├── ProgramFailed         the user's program failed by itself                        its own exit code
├── NothingMeasured       the program ran, but no training step could be measured    exit 3
├── TrialFailed           a trial died, hung or lost its program                     exit 3
├── CannotParallelize     the program cannot be split over ranks                     exit 6
├── LoopError             a Loop cannot train as requested without a mistake         exit 1
├── StorageError          a folder or a disk cannot be written                       exit 4
├── CheckpointError       no valid checkpoint, or one of another program             exit 7
├── CannotResume          the program cannot resume exactly                          exit 10
├── ProgramHung           a monitored program hung, and no restart is left           exit 8
├── NotFinite             a loss was NaN or infinite, and the run must stop          exit 9
└── NodesUnreachable      the machines of a job cannot find or lost each other       exit 5
"""

from __future__ import annotations

# Raised by reading JSON of another form.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class FlatoutError(Exception):
    """Base class of errors that flatout shows as a message, without a traceback."""

    exit_code = 1


class UsageError(FlatoutError):
    exit_code = 2


class NoBaseline(UsageError):
    """The baseline to compare with is missing, or was measured on another machine."""

    exit_code = 11


class PlanError(FlatoutError):
    exit_code = 2


class ProgramNotFound(FlatoutError):
    exit_code = 127


class ProgramFailed(FlatoutError):
    """The user's program failed by itself. flatout exits with the same code, except in a comparison."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code


class NothingMeasured(FlatoutError):
    exit_code = 3


class TrialFailed(FlatoutError):
    exit_code = 3


class CannotParallelize(FlatoutError):
    """A program cannot run as several ranks and learn the same.

    If raised inside the program, the message is the reason: a sentence without a full stop.
    """

    exit_code = 6


class LoopError(FlatoutError):
    """A `flatout.Loop` cannot do exactly what was requested, or its model, loss and batches do not match."""


class StorageError(FlatoutError):
    exit_code = 4


class CheckpointError(FlatoutError):
    """A checkpoint is corrupt, belongs to another program, or is missing."""

    exit_code = 7


class NodesUnreachable(FlatoutError):
    exit_code = 5


class ProgramHung(FlatoutError):
    exit_code = 8


class NotFinite(FlatoutError):
    exit_code = 9


class CannotResume(FlatoutError):
    """A program cannot resume from a checkpoint to exactly the results of an uninterrupted run."""

    exit_code = 10


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def last_line(reason: str) -> str:
    """Return the last line of the message with which a program ended, at most 240 characters."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    return lines[-1][:240] if lines else "it ended without a message"
