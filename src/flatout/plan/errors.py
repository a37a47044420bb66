"""The one tree of errors. A message says what happened, why, and the next command.

    FlatoutError
    ├── UsageError            the command line cannot be understood                      exit 2
    ├── PlanError             a flatout.toml that is broken, hostile or too new           exit 2
    ├── ProgramNotFound       there is no such program or script                         exit 127
    ├── ProgramFailed         the user's program failed by itself                        its own exit code
    ├── NothingMeasured       the program ran, but no training step could be measured    exit 3
    ├── TrialFailed           a trial died, hung or lost its program                     exit 3
    ├── CannotDivide          a program that does not divide over ranks                   exit 6
    ├── LoopError             a Loop cannot train as it is asked to, or without a mistake exit 1
    ├── StorageError          a folder or a disk refuses to be written                   exit 4
    ├── SaveError             no save that can be believed, or one of something else     exit 7
    ├── CannotResume          a program that cannot be gone on with exactly               exit 10
    ├── ProgramHung           a watched program stood still, and no restart is left      exit 8
    ├── NotFinite             a loss was NaN or infinite, and that was to be the end     exit 9
    └── NodesApart            the machines of a job do not find or have lost each other  exit 5
"""

from __future__ import annotations


class FlatoutError(Exception):
    """Anything that flatout reports to a person instead of showing a traceback."""

    exit_code = 1


class UsageError(FlatoutError):
    exit_code = 2


class PlanError(FlatoutError):
    exit_code = 2


class ProgramNotFound(FlatoutError):
    exit_code = 127


class ProgramFailed(FlatoutError):
    """The user's program ended with an error of its own; flatout leaves with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code


class NothingMeasured(FlatoutError):
    exit_code = 3


class TrialFailed(FlatoutError):
    exit_code = 3


class CannotDivide(FlatoutError):
    """A program was to run as several ranks and would not learn the same. Raised inside it, the words are why, a sentence without its stop."""

    exit_code = 6


class LoopError(FlatoutError):
    """A `flatout.Loop` was asked for what it cannot do exactly, or its model, loss or batches do not fit together."""


class StorageError(FlatoutError):
    exit_code = 4


class SaveError(FlatoutError):
    """A save is damaged or belongs to another program, or there is none where one is needed."""

    exit_code = 7


class NodesApart(FlatoutError):
    exit_code = 5


class ProgramHung(FlatoutError):
    exit_code = 8


class NotFinite(FlatoutError):
    exit_code = 9


class CannotResume(FlatoutError):
    """Why a program does not go on from a save to exactly what it would have learned."""

    exit_code = 10
