"""What a kind of failure is: a frozen value with a page, which answers for the failures that it knows and for no others.

A kind is written as one function that looks at a FailureRecord and gives an Answer or None; its docstring is the kind's page, in the manner of
a rule's: What / Why it happens / How to mend it / Sources. A matcher goes by structure: the type of the exception and the invariant part of
the message's family, from its beginning, with named parts for what varies. What the user's own ``raise`` has made is nobody's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flatout.diagnose.rule import Rule
from flatout.plan.failure import FailureRecord, TensorSeen, Thrown
from flatout.plan.findings import Finding, Place, Severity

SECTIONS = ("What", "Why it happens", "How to mend it", "Sources")
RUNTIME = ("RuntimeError",)
DIST = ("DistError", "DistNetworkError", "DistStoreError", "DistBackendError", "RuntimeError", "ValueError")
CASE = re.DOTALL


@dataclass
class Answer:
    """``said`` is the cause in one sentence; ``mend`` is code or commands; ``evidence`` further lines. ``place`` replaces the user's line."""

    said: str
    mend: str
    evidence: list[str] = field(default_factory=list)
    place: Place | None = None
    levers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """``reports`` marks what only passes on the failure of another process."""

    code: str
    name: str
    match: Callable[[FailureRecord], Answer | None]
    reports: bool = False

    # What a page is made of is the same for a rule and for a kind.
    severity = Severity.FATAL
    sections = SECTIONS
    title = Rule.title
    section = Rule.section

    @property
    def page(self) -> str:
        return inspect.getdoc(self.match) or ""

    def explain(self, failure: FailureRecord) -> Finding | None:
        """Severity is always that the program ends. Raises whatever a matcher raises: that is a mistake of ours."""
        answer = self.match(failure)
        if answer is None:
            return None
        own = failure.own
        place = answer.place or (own.place() if own else None)
        return Finding(self.code, self.name, Severity.FATAL, answer.said, place, [line for line in answer.evidence if line], answer.mend, list(answer.levers))


def kind(code: str, name: str, reports: bool = False) -> Callable[[Callable[[FailureRecord], Answer | None]], Kind]:
    return lambda match: Kind(code, name, match, reports)


LONGEST_LINE = 1000  # of those that are searched: an expression may need the square of it


@dataclass
class Hit:
    """An exception that belongs to a family, with the parts of its message. A part that is not there is empty."""

    thrown: Thrown
    parts: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.parts.get(name) or ""

    def number(self, name: str) -> int:
        return int(self[name]) if self[name].lstrip("-").isdigit() else 0


def hit(failure: FailureRecord, types: Sequence[str], *families: str) -> Hit | None:
    """The first exception of the chain that is of one of ``types`` (or has lost its type on the way) and whose message begins as a family does."""
    for thrown in failure.chain:
        if thrown.raised_by_user or (thrown.names and not set(types) & set(thrown.names)):
            continue
        for family in families:
            found = re.match(f"{LEAD}(?:{family})", thrown.message, CASE)
            if found is not None:
                return Hit(thrown, {name: value.strip() for name, value in found.groupdict().items() if value})
    return None


# Layers that pass an error on put their own words before it: a worker, a replica, the compiler.
LEAD = (r"(?:\s*|Caught \w+ in (?:DataLoader worker process \d+|replica \d+ on device \d+|pin memory thread for device \w+)\.\s*"
        r"|(?:Dynamo failed to run FX node with fake tensors:|RuntimeError when making fake tensor call|Failed running call_\w+).{0,2000}?"
        r"got \w+\(['\"]{1,2})")


def near(failure: FailureRecord, *families: str) -> re.Match[str] | None:
    """A line of the log near the failure, or of its messages."""
    for line in _all_lines(failure):
        for family in families:
            found = re.search(family, line[:LONGEST_LINE])
            if found is not None:
                return found
    return None


def _all_lines(failure: FailureRecord) -> Iterable[str]:
    yield from failure.around
    for thrown in failure.chain:
        if not thrown.raised_by_user:
            yield from thrown.message.split("\n")


def layer(failure: FailureRecord) -> str:
    """The layer that was running, by its name: ``model.fc1 (Linear)``; or nothing."""
    module = failure.module
    return f"`{module.path}` ({module.kind})" if module and module.path else f"the {module.kind}" if module else ""


def seen(tensors: Iterable[TensorSeen], limit: int = 4) -> list[str]:
    """Tensors of the failing line, a line each."""
    return list(dict.fromkeys(tensor.sentence() for tensor in tensors))[:limit]


def on_own_line(failure: FailureRecord) -> list[TensorSeen]:
    """Tensors in the user's own failing frame that its line names."""
    own = failure.own
    if own is None:
        return []
    words = set(re.findall(r"\w+", own.text))
    return [tensor for tensor in own.tensors if tensor.name.partition("[")[0] in words]


def sizes(failure: FailureRecord) -> list[str]:
    """The tensors of the user's failing line, or those of the frames below it where the line names none."""
    return seen(on_own_line(failure) or failure.tensors)


def shape(text: str) -> str:
    """``torch.Size([8, 1])`` and ``[8, 1]`` as ``8x1``."""
    numbers = re.findall(r"-?\d+", text)
    return "x".join(numbers) if numbers else "a scalar"
