"""Follows the live figures of a run, and passes them to one tracker, in a process of its own.

    python -m flatout.export.follow TRACKER[=TARGET] FOLDER PID COMMAND

The program writes a file for each rank into FOLDER and never waits for this process. A tracker that is slow
or down delays only what is sent here. It ends once every rank has ended, or when process PID is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from flatout.export.trackers import TRACKERS, Tracker
from flatout.measure.clock import seconds, sleep
from flatout.schema.run_summary import EXPORT_FAILED, LIVE_FIGURES, RunSummary

POLL_S = 0.5
GRACE_S = 3.0  # for the last lines, after the program is gone
CLOSE_TIMEOUT_S = 120.0  # for the tracker to take the rest and to close


class Follower:
    """Reads new lines of all ranks and passes them on."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self.folder, self.tracker = folder, tracker
        self.files: dict[int, TextIO] = {}
        self.partial_lines: dict[int, str] = {}
        self.ended: set[int] = set()
        self.failures = 0

    def forward_new_lines(self) -> int:
        """Pass on what is new; return the number of lines."""
        for path in self.folder.glob("rank*.jsonl"):
            rank = int(path.stem.removeprefix("rank"))
            if rank not in self.files:
                self.files[rank] = path.open(encoding="utf-8")
        count = 0
        for rank, file in self.files.items():
            text = self.partial_lines.pop(rank, "") + file.read()
            *lines, partial = text.split("\n")
            self.partial_lines[rank] = partial  # an incomplete line
            for line in lines:
                count += 1
                self._forward(rank, json.loads(line))
        return count

    def _forward(self, rank: int, data: dict[str, Any]) -> None:
        try:
            if "end" in data:
                self.ended.add(rank)
                self.tracker.finish(RunSummary.from_json(data["end"]))
            else:
                figures = {name: float(data[name]) for name in LIVE_FIGURES if data.get(name) is not None}
                self.tracker.log(rank, data["step"], figures)
        except Exception as error:  # the tracker's own; what comes later may arrive
            self.failures += 1
            if self.failures == 1:
                _report(
                    f"{type(self.tracker).__name__} did not take a figure ({type(error).__name__}: {error})"
                )

    def run(self, pid: int) -> None:
        threading.Thread(target=_exit_when_overdue, args=(pid,), daemon=True).start()
        ended_s: float | None = None
        while ended_s is None or seconds() < ended_s + GRACE_S:
            self.forward_new_lines()
            if self.files and self.ended >= self.files.keys():
                break
            if ended_s is None and not _is_running(pid):
                ended_s = seconds()
            sleep(POLL_S)
        self.forward_new_lines()
        try:
            self.tracker.close()
        except Exception as error:
            _report(f"{type(self.tracker).__name__} did not close ({type(error).__name__}: {error})")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exit_when_overdue(pid: int) -> None:
    while _is_running(pid):
        sleep(POLL_S)
    sleep(CLOSE_TIMEOUT_S)
    _report(f"the tracker did not answer within {CLOSE_TIMEOUT_S:.0f} s")
    os._exit(1)


def _report(sentence: str) -> None:
    sys.stderr.write(f"{EXPORT_FAILED}{sentence}; the training is not affected\n")
    sys.stderr.flush()


def main() -> None:
    name, _, target = sys.argv[1].partition("=")
    folder, pid, command = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        tracker = TRACKERS[name](target, folder, command)
    except Exception as error:
        _report(f"{name} cannot be started ({type(error).__name__}: {error})")
        return
    Follower(folder, tracker).run(pid)


if __name__ == "__main__":
    main()
