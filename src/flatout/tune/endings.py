"""Why a program of a search or a profile ended."""

from flatout.schema.errors import FlatoutError, NothingMeasured, ProgramFailed, error_line
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone


def end_reason(error: ProgramGone | LeverFailed) -> str:
    """The line that says why a program or a lever failed."""
    return error_line(error.record.reason if isinstance(error, ProgramGone) else error.reason)


def failure_error(record: TrialRecord, headline: str = "") -> ProgramFailed:
    """The error for a program that failed, with the end of its output."""
    headline = headline or f"the program fails on its own (exit code {record.exit_code})"
    return ProgramFailed(f"{headline}:\n\n{record.log_tail.strip() or record.reason}", record.exit_code or 1)


def unmeasured_error(record: TrialRecord, goal: str, remedy: str) -> FlatoutError:
    """The error for a program that ended before ``goal``; ``remedy`` is a way out if it did not train enough."""
    if record.status == "failed":
        return failure_error(record)
    if record.status == "broken":
        return NothingMeasured(
            f"flatout could not analyse this program and did not change it. Please report this:\n\n{record.reason.strip()}"
        )
    steps = len(set(record.loss_steps))
    trained = (
        f"after {steps} training step{'' if steps == 1 else 's'}" if steps else "without a training step"
    )
    why = {
        "ended": f"the program ended {trained}. {remedy}",
        "hung": f"the program did not train: {record.reason}. {remedy}",
    }
    return NothingMeasured(f"{goal}: {why.get(record.status, record.error_line)}.")
