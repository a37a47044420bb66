"""The explanation below the traceback of a program that flatout ran. Imported only after a crash."""

from __future__ import annotations

from flatout.agent.failure_details import look
from flatout.diagnose.explain import explain as explained
from flatout.diagnose.explain import lines
from flatout.schema.failure import FailureRecord


def explain(error: BaseException) -> list[str]:
    """Return the lines that explain an error; none if the failure is unknown. The crash report calls this."""
    failure = look(error)
    finding = explained(failure)
    if finding is None:
        return []
    several = failure.rank is not None and (failure.world_size or 0) > 1
    return lines(finding, [failure.rank or 0] if several else [])


def of_death(code: int | None, log: str, oom_kills: int | None) -> list[str]:
    """Explain the death of a program by a signal, which leaves no traceback.

    ``oom_kills`` is the number of OOM kills in its process group during the run."""
    if code is None or not (code < 0 or 128 < code < 160):
        return []
    failure = FailureRecord(
        signal=-code if code < 0 else code - 128,
        log_lines=log.split("\n")[-80:],
        facts={"oom_kills": oom_kills or 0},
    )
    finding = explained(failure)
    return lines(finding) if finding else []
