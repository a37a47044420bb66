"""The progress of each start of a supervised program, how it ended, and the decision whether to restart it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.launch.failure import LOST_ANOTHER, exit_code, signal_name

LAUNCHER_ERRORS = {"ChildFailedError", "SignalException"}
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (?P<rank>\d+).*?exitcode +: (?P<code>-?\d+)", re.DOTALL)
MAX_FRUITLESS = 3  # restarts without progress
MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


@dataclass
class Attempt:
    """One start of the program.

    ``resumed_step`` is the step of the checkpoint that it resumed from; ``checkpoint_step`` is the step of its newest
    checkpoint."""

    number: int
    steps: int = 0
    checkpoint_count: int = 0
    resumed_step: int = 0
    checkpoint_step: int = 0

    @property
    def reached(self) -> int:
        return self.resumed_step + self.steps


@dataclass(frozen=True)
class Incident:
    """One line of `incidents.jsonl`."""

    time: str
    attempt: int
    kind: str
    message: str
    place: str
    step: int
    checkpoint_step: int
    exit_code: int | None


@dataclass
class RestartHistory:
    """All starts of the program so far."""

    attempts: list[Attempt] = field(default_factory=list)
    fruitless_restarts: int = 0
    max_reached: int = -1  # steps reached, for programs without known checkpoints
    checkpoint_step: int = 0
    _failures: list[tuple[str, str]] = field(default_factory=list)

    def record_attempt(self, attempt: Attempt) -> None:
        """Record a failed attempt, and whether it made progress."""
        progressed = attempt.reached > self.max_reached
        if any(earlier.checkpoint_count for earlier in self.attempts):
            progressed = attempt.checkpoint_step > self.checkpoint_step
        first = len(self.attempts) == 1
        self.fruitless_restarts = 0 if progressed or first else self.fruitless_restarts + 1
        self.checkpoint_step = max(self.checkpoint_step, attempt.checkpoint_step)
        self.max_reached = max(self.max_reached, attempt.reached)

    def is_repeated(self, kind: str, place: str) -> bool:
        """Record a failure, and return whether the last one was of the same kind at the same place."""
        same = bool(place and self._failures) and self._failures[-1] == (kind, place)
        self._failures.append((kind, place))
        return same

    def why_not_restarted(self, outcome: AttemptOutcome, attempt: Attempt, restarts: int) -> str:
        """Why the program is not restarted, without a full stop; "" if it is restarted."""
        restart_number = attempt.number - 1
        trained = any(earlier.steps for earlier in self.attempts)
        if outcome.kind == "exit" and not trained:
            return "it failed before its first step and would fail again"
        if outcome.kind == "output closed":
            return "its output is closed, so it would fail again as soon as it prints"
        if outcome.kind == "memory" and not attempt.checkpoint_count:
            return f"the next start would run out of memory at the same place. {outcome.advice}"
        if restart_number >= restarts:
            if not restarts:
                return "no restarts are allowed (--restarts 0)"
            return f"that was restart {restart_number} of {restarts} (--restarts)"
        if self.fruitless_restarts >= MAX_FRUITLESS:
            return (
                f"{self.fruitless_restarts} restarts in a row made no progress beyond step {max(self.checkpoint_step, self.max_reached)}. "
                "`flatout explain` explains a traceback; fix the error and start again: the program resumes from its newest checkpoint"
            )
        return ""


@dataclass(frozen=True)
class AttemptOutcome:
    """How a start ended.

    ``kind`` is "finished", "hung", "signal", "exit", "output closed", "memory", "nan" or "stop requested"; ``code`` is the exit
    code as in a shell; ``message`` is a sentence without its full stop; ``place`` is the location in the
    program."""

    kind: str
    code: int
    message: str
    place: str = ""
    advice: str = ""


def outcome_of(
    code: int, title: str, failures: Sequence[Mapping[str, Any]], killed_by_kernel: bool | None, step: int
) -> AttemptOutcome:
    """The ending of a program that flatout did not end.

    ``killed_by_kernel`` is whether the counter of its control group shows an OOM kill; None if unknown."""
    failure = failures[0] if failures else {}
    error_message, kinds = str(failure.get("message", "")), failure.get("kinds", [])
    place, first_line = _place(failure), next(iter(error_message.splitlines()), "")[:160]
    after = f"after step {step}" if step else "before its first step"
    if killed_by_kernel:
        return AttemptOutcome(
            "memory",
            exit_code(code),
            f"the kernel ended {'a process of ' if code >= 0 else ''}{title} {after}, because memory ran out",
            place,
            "Use a smaller batch, fewer loader workers or a higher limit; `flatout memory COMMAND...` predicts the memory of a step",
        )
    if code < 0:
        unknown = ""
        if code == -9 and killed_by_kernel is None:
            unknown = "; it may have run out of memory, which cannot be read here"
        return AttemptOutcome(
            "signal", exit_code(code), f"{title} was killed by {signal_name(-code)} {after}{unknown}", place
        )
    if {"OutOfMemoryError", "MemoryError"} & set(kinds) or any(
        word in error_message for word in MEMORY_MESSAGES
    ):
        return AttemptOutcome(
            "memory",
            code,
            f"{title} ran out of memory {after} ({first_line or 'no message'})",
            place,
            "`flatout tune --memory-limit 8GB COMMAND...` finds a plan that needs less, and `flatout.Loop` repeats such a step in smaller parts",
        )
    lost = _lost_rank(failures)
    if lost:
        return AttemptOutcome("exit", code, f"{title} failed {after}: {lost}", place)
    if not kinds:
        return AttemptOutcome("exit", code, f"{title} ended with exit code {code} {after}", place)
    if kinds[0] == "BrokenPipeError":
        return AttemptOutcome("output closed", code, f"{title} failed {after}: its output was closed", place)
    error = f"{kinds[0]}: {first_line}".removesuffix(": ")
    return AttemptOutcome("exit", code, f"{title} failed {after} with {error}", place)


def _lost_rank(failures: Sequence[Mapping[str, Any]]) -> str:
    messages = [str(failure.get("message", "")) for failure in failures]
    for failure, message in zip(failures, messages, strict=True):
        if str(failure.get("kinds", [""])[0]) not in LAUNCHER_ERRORS and not LOST_ANOTHER.search(message):
            return ""
    root = next(filter(None, map(ROOT_CAUSE.search, messages)), None)
    if root is None:
        return ""
    code = int(root["code"])
    return f"rank {root['rank']} was the first to fail, {f'by {signal_name(-code)}' if code < 0 else f'with exit code {code}'}"


def _place(failure: Mapping[str, Any]) -> str:
    places = [(str(file), line) for file, line in failure.get("places", [])]
    libraries = ("-packages/", "/flatout/", "/lib/python")
    user_frames = [place for place in places if not any(name in place[0] for name in libraries)]
    if not places:
        return ""
    file, line = (user_frames or places)[-1]
    return f"{file.removeprefix(os.getcwd() + os.sep)}, line {line}"


def failures_in(folder: str) -> list[dict[str, Any]]:
    """The exception reports that the processes wrote.

    Causes come first, then processes that only lost another one, then launchers that report others. Within
    each group the oldest comes first."""
    failures = []
    for path in sorted(Path(folder).glob("failed.*"), key=lambda path: path.stat().st_mtime_ns):
        try:
            failure = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(failure, dict):
            failures.append(failure)
    return sorted(
        failures,
        key=lambda failure: (
            bool(LAUNCHER_ERRORS & set(map(str, failure.get("kinds", [])))),
            LOST_ANOTHER.search(str(failure.get("message", ""))) is not None,
        ),
    )


def oom_kills() -> int | None:
    """How many processes of this control group the kernel killed for lack of memory; None if unknown."""
    root, files = Path("/sys/fs/cgroup"), []
    try:
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files += [root / path[1:] / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                group = root / "memory"
                files += [group / path[1:] / "memory.oom_control", group / "memory.oom_control"]
        for file in filter(Path.is_file, files):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
