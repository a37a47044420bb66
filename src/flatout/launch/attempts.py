"""What the starts of a program that is watched over have brought, and whether one more makes sense. Pure: moments come from whoever looks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.launch.failure import LOST_ANOTHER, exit_code, signal_name

REPORTS = {"ChildFailedError", "SignalException"}
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (?P<rank>\d+).*?exitcode +: (?P<code>-?\d+)", re.DOTALL)
FRUITLESS = 3  # restarts that bring nothing further
ALLOCATORS = ("out of memory", "can't allocate memory", "cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")


@dataclass
class Attempt:
    """One start of the program. Moments in seconds; ``base``: steps that the save had from which it went on. ``kept``: steps of its newest save."""

    number: int
    began: float
    imported: float | None = None
    stepped: float | None = None
    saved: float | None = None
    ended: float | None = None
    steps: int = 0
    saves: int = 0
    base: int = 0
    kept: int = 0

    @property
    def reached(self) -> int:
        return self.base + self.steps

    def kept_s(self, well: bool) -> float:
        """Time that brought steps which were kept: from where it began to train to its newest save, or to its end where all is done."""
        until = self.ended if well else self.saved
        return max(0.0, until - self.stepped) if until is not None and self.stepped is not None else 0.0


@dataclass
class Incident:
    """One line of `incidents.jsonl`; times in seconds. ``detect_s``: from the last sign of life to the finding; ``stop_s``: until nothing of the program ran;
    ``start_s``: from there to its torch being imported again; ``load_s``: from there to its first step. None: it did not come to that."""

    at: str
    attempt: int
    kind: str
    what: str
    place: str
    pid: int | None
    rank: int | None
    step: int
    kept: int
    exit_code: int | None
    detect_s: float
    stop_s: float | None = None
    start_s: float | None = None
    load_s: float | None = None
    followed_by: str = ""
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


@dataclass
class Course:
    """All starts so far."""

    attempts: list[Attempt] = field(default_factory=list)
    fruitless: int = 0
    farthest: int = -1  # steps reached by a start that knows of no save
    kept: int = 0
    _failures: list[tuple[str, str]] = field(default_factory=list)

    def note(self, attempt: Attempt) -> None:
        """An attempt has failed: count whether it brought anything further."""
        further = attempt.kept > self.kept if any(each.saves for each in self.attempts) else attempt.reached > self.farthest
        first = len(self.attempts) == 1
        self.fruitless = 0 if further or first else self.fruitless + 1
        self.kept, self.farthest = max(self.kept, attempt.kept), max(self.farthest, attempt.reached)

    def again(self, kind: str, place: str) -> bool:
        """Whether the last failure was the same, at the same place."""
        same = bool(place and self._failures) and self._failures[-1] == (kind, place)
        self._failures.append((kind, place))
        return same

    def why_not_again(self, ending: Ending, attempt: Attempt, restarts: int) -> str:
        """Why the program is not started again; "" where it is. A sentence without its stop."""
        made = attempt.number - 1
        trained = any(each.steps for each in self.attempts)
        if ending.kind == "exit" and not trained:
            return "it failed before its first step, and would again"
        if ending.kind == "unheard":
            return "nobody reads what it prints any more, and it would fail again as soon as it prints"
        if ending.kind == "memory" and not attempt.saves:
            return f"the next start would run out of memory at the same place. {ending.advice}"
        if made >= restarts:
            return f"that was restart {made} of {restarts} (--restarts)" if restarts else "no restarts are allowed (--restarts 0)"
        if self.fruitless >= FRUITLESS:
            return (f"{self.fruitless} restarts in a row have brought it no step further than {max(self.kept, self.farthest)}. "
                    "`flatout explain` reads a traceback; mend that, then start again: it goes on from its newest save")
        return ""

    def goodput(self, now: float, well: bool) -> float:
        """Share of the time that brought steps which were kept."""
        if not self.attempts:
            return 0.0
        last = self.attempts[-1]
        good = sum(each.kept_s(well and each is last) for each in self.attempts)
        return good / max(now - self.attempts[0].began, 1e-9)


@dataclass(frozen=True)
class Ending:
    """How a start ended. ``kind``: "well", "hung", "signal", "exit", "unheard", "memory", "nan" or "asked"; ``code`` as a shell says it; ``what`` is a sentence
    without its stop; ``place``: where in the program."""

    kind: str
    code: int
    what: str
    place: str = ""
    advice: str = ""


def ending_of(code: int, title: str, failures: Sequence[Mapping[str, Any]], killed_by_kernel: bool | None, step: int) -> Ending:
    """Of a program that was not ended by us. ``killed_by_kernel``: whether the counter of its control group says so, None where nobody knows."""
    told = failures[0] if failures else {}
    said, kinds = str(told.get("said", "")), told.get("kinds", [])
    place = _place(told)
    after = f"after step {step}" if step else "before its first step"
    if killed_by_kernel:
        return Ending("memory", exit_code(code), f"the kernel ended {'a process of ' if code >= 0 else ''}{title} {after}, because memory had run out", place,
                      "A smaller batch, fewer loader workers or a higher limit help: `flatout memory COMMAND...` foretells what a step takes")
    if code < 0:
        unknown = "; it may have been out of memory, which cannot be read here" if code == -9 and killed_by_kernel is None else ""
        return Ending("signal", exit_code(code), f"{title} was ended by {signal_name(-code)} {after}{unknown}", place)
    if "OutOfMemoryError" in kinds or "MemoryError" in kinds or any(word in said for word in ALLOCATORS):
        first = said.splitlines()[0][:160] if said else "no words"
        return Ending("memory", code, f"{title} ran out of memory {after} ({first})", place,
                      "`flatout tune --memory-limit 8GB COMMAND...` finds a plan that takes less, and `flatout.Loop` does such a step again in smaller parts")
    lost = _lost_rank(failures)
    if lost:
        return Ending("exit", code, f"{title} failed {after}: {lost}", place)
    if kinds:
        first = said.splitlines()[0][:160] if said else ""
        if kinds[0] == "BrokenPipeError":
            return Ending("unheard", code, f"{title} failed {after}: its output was closed", place)
        return Ending("exit", code, f"{title} failed {after} with {kinds[0]}{f': {first}' if first else ''}", place)
    return Ending("exit", code, f"{title} ended with exit code {code} {after}", place)


def _lost_rank(failures: Sequence[Mapping[str, Any]]) -> str:
    """Where no process of the program told of a failure of its own, but torchrun tells which one it missed."""
    if any(str(told.get("kinds", [""])[0]) not in REPORTS and not LOST_ANOTHER.search(str(told.get("said", ""))) for told in failures):
        return ""
    root = next((found for told in failures if (found := ROOT_CAUSE.search(str(told.get("said", ""))))), None)
    if root is None:
        return ""
    code = int(root["code"])
    return f"rank {root['rank']} was the first to end, {f'by {signal_name(-code)}' if code < 0 else f'with exit code {code}'}"


def _place(told: Mapping[str, Any]) -> str:
    places = [(str(file), line) for file, line in told.get("places", [])]
    own = [(file, line) for file, line in places if "-packages/" not in file and "/flatout/" not in file and "/lib/python" not in file]
    file, line = (own or places or [("", 0)])[-1]
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}, line {line}" if file else ""


def failures_in(folder: str) -> list[dict[str, Any]]:
    """What processes told of the exceptions that ended them: causes first, then what has only lost another process, then launchers that report of others; of
    each kind the oldest first."""
    found = []
    for path in sorted(Path(folder).glob("failed.*"), key=lambda each: each.stat().st_mtime_ns):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(told, dict):
            found.append(told)
    return sorted(found, key=lambda told: (bool(REPORTS & set(map(str, told.get("kinds", [])))), LOST_ANOTHER.search(str(told.get("said", ""))) is not None))


def kills_for_memory() -> int | None:
    """How often the kernel has ended a process of our control group because memory had run out; None where that cannot be read."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    candidates = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            candidates += [f"/sys/fs/cgroup{path}/memory.events", f"/sys/fs/cgroup/unified{path}/memory.events", "/sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [f"/sys/fs/cgroup/memory{path}/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control"]
    for candidate in candidates:
        try:
            for line in Path(candidate).read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return None
