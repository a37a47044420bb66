"""Start-up failure reports: a rank reports its failure to the launcher when the exception reaches the top.

The launch has a folder, named by FLATOUT_LAUNCH. The rank writes to an event FIFO in it, which the launcher
reads. Lines arrive in the order in which ranks write them, so no clock is needed. The rank stores its report,
`rank<k>.failed`, by atomic rename:

    failing <rank> <pid>           an exception has reached the top; the report is being written
    failing <rank> <pid> first     the same, from the first rank (the explained and the named rank must be the same)
    reported <rank> <pid>          the report is complete
    leaving <rank> <pid>           the script has ended, for any reason, and its objects are being destroyed

This file is read at the start of a script, so it imports nothing heavy.
"""

from __future__ import annotations

import os

EVENT_FIFO, CLAIM = "event_fifo", "claim"
FAILING, REPORTED, LEAVING, FIRST = "failing", "reported", "leaving", "first"
MAX_TRACEBACK_CHARS = 100_000  # of a traceback


class FailureReporter:
    """Reports of this process.

    It *is* the rank if the launcher is its parent; a rank may start processes of its own.
    """

    def __init__(self, launch_folder: str, rank: str, launcher_pid: str) -> None:
        self.launch_folder, self.rank = launch_folder, rank
        self.is_rank = launcher_pid == str(os.getppid())
        self._original_open = os.open  # before the files of this rank are kept apart from those of the others

    def report(self, error: BaseException) -> bool:
        """Report an exception that ends this process; return whether it is the first and may be explained."""
        try:
            if isinstance(error, KeyboardInterrupt):
                self._send(FAILING)
                # writing imports code that calls eval(); CPython then exits with 1, not by SIGINT
                # (run_eval_code_obj)
                return False
            from flatout.job.claims import claim

            first = self.is_rank and claim(os.path.join(self.launch_folder, CLAIM))
            self._send(FAILING, FIRST if first else "")
            self._write(error)
            self._send(REPORTED)
        except Exception:
            return False  # the launch is over, or its disk full: the exit time must do
        return first or not self.is_rank

    def report_exit(self) -> None:
        """Report that this process ends."""
        try:
            self._send(LEAVING)
        except OSError:
            pass

    def _send(self, event: str, detail: str = "") -> None:
        # never blocks: without a launcher it raises
        event_fifo = os.open(os.path.join(self.launch_folder, EVENT_FIFO), os.O_WRONLY | os.O_NONBLOCK)
        try:
            # less than PIPE_BUF: lines of ranks do not mix
            os.write(event_fifo, f"{event} {self.rank} {os.getpid()} {detail}\n".encode())
        finally:
            os.close(event_fifo)

    def _write(self, error: BaseException) -> None:
        import traceback
        from pathlib import Path

        from flatout.job.folder import write_json

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        report = {
            "rank": self.rank,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "traceback": text[-MAX_TRACEBACK_CHARS:],
        }
        path = Path(self.launch_folder, f"rank{self.rank}.failed")
        write_json(path, report)
        error_file = os.environ.get("FLATOUT_ERROR_FILE")
        if error_file and self.is_rank:
            self._tell_torchrun(error_file, error, text, int(path.stat().st_mtime))

    def _tell_torchrun(self, error_file: str, error: BaseException, text: str, timestamp: int) -> None:
        import json

        log = os.path.join(self.launch_folder, f"rank{self.rank}.log")
        log_hint = f"The output of this rank is in {log}\n" if os.path.exists(log) else ""
        message = {
            "message": f"{type(error).__name__}: {error}"[:MAX_TRACEBACK_CHARS],
            "extraInfo": {
                "py_callstack": text[-MAX_TRACEBACK_CHARS:] + log_hint,
                "timestamp": str(timestamp),
            },
        }
        handle = self._original_open(error_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.write(handle, json.dumps({"message": message}).encode())
        os.close(handle)


def reporter_of_launch() -> FailureReporter | None:
    """Return the reporter; None if no flatout launcher waits for reports."""
    launch_folder, rank = os.environ.get("FLATOUT_LAUNCH"), os.environ.get("FLATOUT_RANK", "")
    return (
        FailureReporter(launch_folder, rank, os.environ.get("FLATOUT_LAUNCHER", ""))
        if launch_folder and rank.isdigit()
        else None
    )
