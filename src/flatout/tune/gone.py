"""Why a program of a search ended."""

from __future__ import annotations

from flatout.schema.errors import FlatoutError, NothingMeasured, ProgramFailed, last_line
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone


def why_gone(error: ProgramGone | LeverFailed) -> str:
    """Return the last line of the message with which a program or a lever failed."""
    return last_line(error.record.reason if isinstance(error, ProgramGone) else error.reason)


def program_failed(record: TrialRecord, what: str = "") -> ProgramFailed:
    """Return the error for a program that failed, with the end of its output."""
    what = what or f"the program fails on its own (exit code {record.exit_code})"
    return ProgramFailed(f"{what}:\n\n{record.log_tail.strip() or record.reason}", record.exit_code or 1)


def why_not(record: TrialRecord, what: str, shorter: str) -> FlatoutError:
    """Return the error for a program that ended before ``what``; ``shorter`` is an alternative remedy."""
    if record.status == "failed":
        return program_failed(record)
    if record.status == "ended":
        why = record.reason.strip() or "the program ended first"
        return NothingMeasured(f"{what}: {why}. Let it train longer, or {shorter}.")
    return NothingMeasured(
        f"{what}: {record.reason.strip().splitlines()[-1] if record.reason.strip() else record.status}."
    )
