"""Crash report: when a script dies, an explanation follows its own traceback, which stays unchanged.

Of several ranks, only the first failing one is explained: the others mostly fail because of it. The
explanation comes from an entry ("module:function") named by FLATOUT_EXPLAIN, which is called with the
exception and returns lines. At the start of a script only this file is read.
"""

from __future__ import annotations

import atexit
import os
import sys

from flatout.agent.ledger import Ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from flatout.agent.failure_report import FailureReporter

CHILD_ERRORS = (
    "ChildFailedError",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)


class CrashReport:
    """Reports the exception that ends this process; one process per run reports, the first one always."""

    def __init__(self, entry: str, finder: object) -> None:
        self.entry, self.finder = entry, finder
        self.claim_path = os.environ.get(
            "FLATOUT_CRASH_REPORTS", os.devnull
        )  # created by the process that reports
        self.first_pid = os.environ.get("FLATOUT_FIRST", "")
        self.ledger = Ledger()
        self.hook_called = False
        self.reporter = _failure_reporter()
        self.unexplained: BaseException | None = None
        self.previous_hook = self.ledger.set(sys, "excepthook", self.excepthook)

    def excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.hook_called = True
        if "FLATOUT_HEARTBEAT" in os.environ:
            from flatout.agent import heartbeat

            heartbeat.failed(error)
        explains = self.reporter is None or self.reporter.report(error)
        self.previous_hook(kind, error, trace)
        if explains and self.reporter is None:
            self.explain(error)
        elif explains:
            # for the end: torch prints a rank's traceback after all hooks, and a launcher does not wait
            self.unexplained = error

    def at_exit(self) -> None:
        """At the end, explain the failure of a script whose own excepthook replaced this one."""
        if self.reporter is not None:
            self.reporter.report_exit()
        if self.unexplained is not None:
            self.explain(self.unexplained)
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # Test runners and debuggers set last_value for caught exceptions; the exception that ended the script
        # called the hook.
        if (
            not self.hook_called
            and error is not None
            and sys.excepthook != self.excepthook
            and (self.reporter is None or self.reporter.report(error))
        ):
            self.explain(error)
        if self._is_first():
            for remove, path in ((os.unlink, self.claim_path), (os.rmdir, os.path.dirname(self.claim_path))):
                try:
                    remove(path)
                except OSError:
                    pass  # not made, or the folder of a job, which has more files

    def explain(self, error: BaseException) -> None:
        """Print the explanation. Never raises, and never delays the exit."""
        if not isinstance(error, Exception):
            return  # KeyboardInterrupt, SystemExit and the like are no failures
        try:
            if os.path.exists(self.claim_path) and (
                not self._is_first()
                or type(error).__name__ in CHILD_ERRORS
                or str(error).startswith("DataLoader worker (pid")
            ):
                return
            lines = self._lines(error)
            if not lines:
                return
            from flatout.job.claims import claim

            if claim(self.claim_path) or self._is_first():
                from flatout.agent.bootstrap import notify

                for line in lines:
                    notify(line)
        except BaseException:
            return

    def _lines(self, error: BaseException) -> list[str]:
        import importlib

        if self.finder not in sys.meta_path:
            sys.meta_path.append(self.finder)  # type: ignore[arg-type]
        module, function = self.entry.split(":")
        for retries in (1, 0):
            try:
                lines: list[str] = getattr(importlib.import_module(module), function)(error)
                return lines
            except Exception:
                if not retries:
                    raise
        return []

    def _is_first(self) -> bool:
        return self.first_pid == str(os.getpid())


def _failure_reporter() -> FailureReporter | None:
    if "FLATOUT_LAUNCH" not in os.environ:
        return None
    from flatout.agent.failure_report import reporter_of_launch

    return reporter_of_launch()


def install(entry: str, finder: object) -> None:
    """Install the crash report at the start of a Python process of a run. ``finder`` finds flatout."""
    atexit.register(CrashReport(entry, finder).at_exit)
