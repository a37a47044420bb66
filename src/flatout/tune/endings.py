"""Why a program of a search ended."""

from flatout.schema.errors import FlatoutError, NothingMeasured, ProgramFailed, last_line
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone


def end_reason(error: ProgramGone | LeverFailed) -> str:
    """The last line of the message with which a program or a lever failed."""
    return last_line(error.record.reason if isinstance(error, ProgramGone) else error.reason)


def failure_error(record: TrialRecord, headline: str = "") -> ProgramFailed:
    """The error for a program that failed, with the end of its output."""
    headline = headline or f"the program fails on its own (exit code {record.exit_code})"
    return ProgramFailed(f"{headline}:\n\n{record.log_tail.strip() or record.reason}", record.exit_code or 1)


def unmeasured_error(record: TrialRecord, goal: str, remedy: str) -> FlatoutError:
    """The error for a program that ended before ``goal``; ``remedy`` is another way out."""
    if record.status == "failed":
        return failure_error(record)
    if record.status == "ended":
        reason = record.reason.strip() or "the program ended first"
        return NothingMeasured(f"{goal}: {reason}. Let it train longer, or {remedy}.")
    return NothingMeasured(
        f"{goal}: {record.reason.strip().splitlines()[-1] if record.reason.strip() else record.status}."
    )
