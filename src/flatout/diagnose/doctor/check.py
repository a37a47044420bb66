"""A check of a machine: a function of a machine snapshot, with a documentation page and its inputs.

The docstring is the page: the first line says what must hold, then come the sections "Why it matters" and
"How to fix it". If the snapshot lacks an input of the check, the result is *not checked* and the check does not
run: missing data never counts as fine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flatout.diagnose.rule import section
from flatout.schema.machine_snapshot import CheckResult, MachineSnapshot, Verdict

SECTIONS = ("Why it matters", "How to fix it")


@dataclass(frozen=True)
class CheckOutcome:
    verdict: Verdict
    seen: str
    fix: str = ""
    evidence: tuple[str, ...] = ()


def ok(seen: str) -> CheckOutcome:
    return CheckOutcome(Verdict.OK, seen)


def not_seen(seen: str, fix: str = "") -> CheckOutcome:
    return CheckOutcome(Verdict.NOT_CHECKED, seen, fix)


def note(seen: str, fix: str = "", evidence: Sequence[str] = ()) -> CheckOutcome:
    return CheckOutcome(Verdict.NOTE, seen, fix, tuple(evidence))


def warning(seen: str, fix: str, evidence: Sequence[str] = ()) -> CheckOutcome:
    return CheckOutcome(Verdict.WARNING, seen, fix, tuple(evidence))


def problem(seen: str, fix: str, evidence: Sequence[str] = ()) -> CheckOutcome:
    return CheckOutcome(Verdict.PROBLEM, seen, fix, tuple(evidence))


@dataclass(frozen=True)
class MachineCheck:
    """A check of a machine. ``needs`` lists inputs: ``file /proc/meminfo``, ``disk /dev/shm`` or a field."""

    code: str
    name: str
    theme: str
    page: str
    ask: Callable[[MachineSnapshot], CheckOutcome]
    needs: tuple[str, ...] = ()
    gpu: bool = False  # runs only if there is a GPU

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    def section(self, name: str) -> str:
        return section(self.page, name)

    def answer(self, snapshot: MachineSnapshot) -> CheckResult:
        missing = [need for need in self.needs if not has(snapshot, need)]
        outcome = not_seen(f"{_listed(missing)} could not be read") if missing else self.ask(snapshot)
        fix = outcome.fix.replace("sudo ", "") if snapshot.python.get("root") is True else outcome.fix
        wrong = outcome.verdict not in (Verdict.OK, Verdict.NOT_CHECKED)
        why = " ".join(self.section("Why it matters").split()) if wrong else ""
        return CheckResult(
            self.code,
            self.name,
            self.theme,
            outcome.verdict.value,
            outcome.seen,
            why,
            fix,
            list(outcome.evidence),
        )


def machine_check(
    code: str, theme: str, needs: Iterable[str] = (), gpu: bool = False
) -> Callable[[Callable[[MachineSnapshot], CheckOutcome]], MachineCheck]:
    """Turns a function into a check with the function's name."""

    def make(ask: Callable[[MachineSnapshot], CheckOutcome]) -> MachineCheck:
        return MachineCheck(code, ask.__name__, theme, inspected(ask.__doc__), ask, tuple(needs), gpu)

    return make


def inspected(page: str | None) -> str:
    """A docstring without its indent."""
    return inspect.cleandoc(page or "")


def has(snapshot: MachineSnapshot, need: str) -> bool:
    """Whether the snapshot holds an input."""
    kind, _, rest = need.partition(" ")
    if kind == "file":
        return snapshot.files.get(rest) is not None
    if kind == "folder":
        return snapshot.folders.get(rest) is not None
    if kind == "run":
        return rest in snapshot.runs
    if kind == "disk":
        return rest in snapshot.disks
    if kind == "torch":
        return isinstance(snapshot.torch.get(rest), dict)
    if kind == "python":
        return snapshot.python.get(rest) is not None
    return getattr(snapshot, need) not in (None, "")  # an empty environment is valid


def _listed(needs: Sequence[str]) -> str:
    words = {
        "run": "the output of {}",
        "torch": "torch's {} information",
        "folder": "the folder {}",
        "disk": "the disk of {}",
        "python": "Python's {}",
    }
    kinds = (need.partition(" ") for need in needs)
    return " and ".join(
        words.get(kind, "{}").format(rest) if rest else kind.replace("_", " ") for kind, _, rest in kinds
    )


def version(text: object) -> tuple[int, ...] | None:
    """``(2, 14, 1)`` for "2.14.1+cu130"; None if the text does not begin with a number."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", text if isinstance(text, str) else "")
    return tuple(int(part) for part in match[1].split(".")) if match else None


def dotted(numbers: Sequence[int]) -> str:
    return ".".join(str(number) for number in numbers)
