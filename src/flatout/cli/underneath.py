"""What stands under the traceback of a program that was run by flatout. Imported only when one dies."""

from __future__ import annotations

from flatout.capture.failing import look
from flatout.diagnose.explain import explain as explained
from flatout.diagnose.explain import lines
from flatout.plan.failure import FailureRecord


def explain(error: BaseException) -> list[str]:
    """The entry that the program's last words are asked of: lines, or none where the failure is unknown."""
    failure = look(error)
    finding = explained(failure)
    if finding is None:
        return []
    several = failure.rank is not None and (failure.world_size or 0) > 1
    return lines(finding, [failure.rank or 0] if several else [])


def of_death(code: int | None, log: str, oom_kills: int | None) -> list[str]:
    """For a program that a signal has ended, which could say nothing itself. ``oom_kills`` are those of the group of processes meanwhile."""
    if code is None or not (code < 0 or 128 < code < 160):
        return []
    failure = FailureRecord(signal=-code if code < 0 else code - 128, around=log.split("\n")[-80:], facts={"oom_kills": oom_kills or 0})
    finding = explained(failure)
    return lines(finding) if finding else []
