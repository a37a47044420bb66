"""A check of a machine: a function of a machine snapshot, with a documentation page and its inputs.

The docstring is the page: the first line says what must hold, then come the sections "Why it matters" and
"How to mend it". If the snapshot lacks an input of the check, the result is *not seen* and the check does not
run: missing data never counts as fine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.rule import section
from flatout.plan.sight import Check, Sight, Verdict

SECTIONS = ("Why it matters", "How to mend it")


@dataclass(frozen=True)
class Answer:
    verdict: Verdict
    seen: str
    mend: str = ""
    evidence: tuple[str, ...] = ()


def ok(seen: str) -> Answer:
    return Answer(Verdict.OK, seen)


def unseen(seen: str, mend: str = "") -> Answer:
    return Answer(Verdict.UNSEEN, seen, mend)


def note(seen: str, mend: str = "", evidence: Sequence[str] = ()) -> Answer:
    return Answer(Verdict.NOTE, seen, mend, tuple(evidence))


def warning(seen: str, mend: str, evidence: Sequence[str] = ()) -> Answer:
    return Answer(Verdict.WARNING, seen, mend, tuple(evidence))


def problem(seen: str, mend: str, evidence: Sequence[str] = ()) -> Answer:
    return Answer(Verdict.PROBLEM, seen, mend, tuple(evidence))


@dataclass(frozen=True)
class Question:
    """A check of a machine. ``needs`` lists inputs: ``file /proc/meminfo``, ``disk /dev/shm`` or a field."""

    code: str
    name: str
    theme: str
    page: str
    ask: Callable[[Sight], Answer]
    needs: tuple[str, ...] = ()
    gpu: bool = False  # runs only if there is a GPU

    @property
    def title(self) -> str:
        return self.page.strip().splitlines()[0].rstrip(".")

    def section(self, name: str) -> str:
        return section(self.page, name)

    def answer(self, sight: Sight) -> Check:
        missing = [need for need in self.needs if not has(sight, need)]
        found = unseen(f"{_listed(missing)} could not be read") if missing else self.ask(sight)
        mend = found.mend.replace("sudo ", "") if sight.python.get("root") is True else found.mend
        wrong = found.verdict not in (Verdict.OK, Verdict.UNSEEN)
        why = " ".join(self.section("Why it matters").split()) if wrong else ""
        return Check(self.code, self.name, self.theme, found.verdict.value, found.seen, why, mend, list(found.evidence))


def question(code: str, theme: str, needs: Iterable[str] = (), gpu: bool = False) -> Callable[[Callable[[Sight], Answer]], Question]:
    """Turns a function into a check with the function's name."""
    def make(ask: Callable[[Sight], Answer]) -> Question:
        return Question(code, ask.__name__, theme, inspected(ask.__doc__), ask, tuple(needs), gpu)

    return make


def inspected(page: str | None) -> str:
    """A docstring without its indent."""
    return inspect.cleandoc(page or "")


def has(sight: Sight, need: str) -> bool:
    """Whether the snapshot holds an input."""
    kind, _, rest = need.partition(" ")
    if kind == "file":
        return sight.files.get(rest) is not None
    if kind == "folder":
        return sight.folders.get(rest) is not None
    if kind == "run":
        return rest in sight.runs
    if kind == "disk":
        return rest in sight.disks
    if kind == "torch":
        return isinstance(sight.torch.get(rest), dict)
    if kind == "python":
        return sight.python.get(rest) is not None
    return getattr(sight, need) not in (None, "")  # an empty environment is valid


def _listed(needs: Sequence[str]) -> str:
    words = {"run": "the output of {}", "torch": "torch's {} information", "folder": "the folder {}", "disk": "the disk of {}", "python": "Python's {}"}
    kinds = (need.partition(" ") for need in needs)
    return " and ".join(words.get(kind, "{}").format(rest) if rest else kind.replace("_", " ") for kind, _, rest in kinds)


def version(text: Any) -> tuple[int, ...] | None:
    """``(2, 14, 1)`` for "2.14.1+cu130"; None if the text does not begin with a number."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", text if isinstance(text, str) else "")
    return tuple(int(part) for part in found[1].split(".")) if found else None


def dotted(numbers: Sequence[int]) -> str:
    return ".".join(str(number) for number in numbers)


def size(count_bytes: float) -> str:
    """``63.9 GiB`` · ``64 MiB``"""
    amount, unit = count_bytes / 2**20, "MiB"
    if amount >= 1024:
        amount, unit = amount / 1024, "GiB"
    return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {unit}"
