"""The supervisor process of `flatout run --supervise`: the parent of the program.

It imports very little, because it stays in memory as long as the program runs. It is not a command:
`flatout run` replaces itself with it, so that the job keeps its process ID.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.job.folder import read_json
from flatout.job.sanitize import harmless
from flatout.job.streams import open_closed_streams
from flatout.job.temporary import remove
from flatout.launch.incidents import IncidentLog
from flatout.launch.launcher_signals import exit_by_signal
from flatout.launch.supervisor import SupervisionLimits, Supervisor, SupervisorClocks
from flatout.measure.clock import seconds, today
from flatout.schema.errors import FlatoutError


def main(words: Sequence[str] | None = None) -> int:
    """Supervise a command. Arguments: RESTARTS GRACE HANG_AFTER INCIDENTS TITLE COMMAND...

    HANG_AFTER may be "-"; TITLE is the command for messages."""
    open_closed_streams()
    restarts, grace, hang_after, incidents, title, *command = sys.argv[1:] if words is None else words
    terms = SupervisionLimits(int(restarts), float(grace), None if hang_after == "-" else float(hang_after))
    job = own_job()
    try:
        supervisor = Supervisor(
            title,
            command,
            os.environ,
            terms,
            SupervisorClocks(seconds, today),
            IncidentLog(Path(incidents), say),
            say,
        )
        code = supervisor.run()
    except FlatoutError as error:
        say(str(error))
        return error.exit_code
    finally:
        if job is not None:
            remove(job.parent)
    if supervisor.ended_by is not None:
        exit_by_signal(supervisor.ended_by)
    return code


def own_job() -> Path | None:
    """Return the job created for this run, which ends with it; not that of an enclosing `flatout run`."""
    path = os.environ.get("FLATOUT_JOB")
    info = read_json(Path(path)) if path else None
    return Path(path) if path and isinstance(info, dict) and info.get("pid") == os.getpid() else None


def say(sentence: str) -> None:
    """Write to standard error, which may already be closed."""
    try:
        sys.stderr.write(f"flatout: {harmless(sentence)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    raise SystemExit(main())
