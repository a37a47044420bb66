"""The explanation below the traceback of a program that flatout ran. Imported only after a crash."""

from collections.abc import Sequence

from flatout.agent.failure_details import record_failure
from flatout.diagnose import explain as explanations
from flatout.schema.failure import FailureRecord


def explain(error: BaseException) -> list[str]:
    """The lines that explain an error; none if the failure is unknown. The crash report calls this."""
    failure = record_failure(error)
    ranks = [failure.rank] if failure.rank is not None and (failure.world_size or 0) > 1 else []
    return _explained(failure, ranks)


def _explained(failure: FailureRecord, ranks: Sequence[int] = ()) -> list[str]:
    finding = explanations.explain(failure)
    return explanations.format_lines(finding, ranks) if finding else []


def explain_signal(code: int | None, log: str, oom_kills: int | None) -> list[str]:
    """Explain the death of a program by a signal, which leaves no traceback.

    ``oom_kills`` is the number of OOM kills in its process group during the run."""
    if code is None or not (code < 0 or 128 < code < 160):
        return []
    return _explained(
        FailureRecord(
            signal=-code if code < 0 else code - 128,
            log_lines=log.split("\n")[-80:],
            facts={"oom_kills": oom_kills or 0},
        )
    )
