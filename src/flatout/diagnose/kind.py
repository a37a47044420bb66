"""A kind of failure: a matcher with a documentation page.

A kind is one function that takes a FailureRecord and returns a Diagnosis or None. Its docstring is the kind's
page, in the format of a rule's page: What / Why it happens / How to fix it / Sources. A matcher checks the
type of the exception and the fixed beginning of its message, with named groups for the variable parts.
Exceptions raised by the user's own ``raise`` never match.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.diagnose.rule import Rule
from flatout.schema.failure import ExceptionRecord, FailureRecord, TensorSeen
from flatout.schema.findings import Finding, Severity, SourceLocation
from flatout.schema.records import Record

SECTIONS = ("What", "Why it happens", "How to fix it", "Sources")
RUNTIME = ("RuntimeError",)
DIST = ("DistError", "DistNetworkError", "DistStoreError", "DistBackendError", "RuntimeError", "ValueError")
CASE = re.DOTALL
SHORT = r"[.!:]?\s*\Z"  # after the fixed beginning of a message, typed without its figures


@dataclass
class Diagnosis:
    """What a kind answers for a failure.

    ``said`` is the cause in one sentence, ``fix`` holds code or commands, ``evidence`` further lines.
    ``place`` replaces the user's line.
    """

    said: str
    fix: str
    evidence: list[str] = field(default_factory=list)
    place: SourceLocation | None = None
    levers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailureKind:
    """A known failure. ``reports`` marks kinds that only report the failure of another process.

    A kind with ``judged`` is no failure: it takes a record of this type, and never matches a failure.
    """

    code: str
    name: str
    judge: Callable[[Any], Diagnosis | None]
    reports: bool = False
    judged: type[Record] | None = None
    severity: Severity = Severity.FATAL

    # A kind and a rule share the format of their pages.
    sections = SECTIONS
    title = Rule.title
    section = Rule.section

    @property
    def page(self) -> str:
        return inspect.getdoc(self.judge) or ""

    def match(self, failure: FailureRecord) -> Diagnosis | None:
        return self.judge(failure) if self.judged is None else None

    def explain(self, failure: FailureRecord) -> Finding | None:
        """The finding for a failure, or None.

        Raises any exception of the matcher: that is a bug in flatout.
        """
        own = failure.own
        return self.finding(self.match(failure), own.place() if own else None)

    def finding(self, answer: Diagnosis | None, place: SourceLocation | None = None) -> Finding | None:
        """The finding for an answer; ``place`` is that of the user's line, if the answer has no other."""
        if answer is None:
            return None
        return Finding(
            self.code,
            self.name,
            self.severity,
            answer.said,
            answer.place or place,
            [line for line in answer.evidence if line],
            answer.fix,
            list(answer.levers),
        )


def kind(
    code: str,
    name: str,
    reports: bool = False,
    judged: type[Record] | None = None,
    severity: Severity = Severity.FATAL,
) -> Callable[[Callable[[Any], Diagnosis | None]], FailureKind]:
    return lambda judge: FailureKind(code, name, judge, reports, judged, severity)


LONGEST_LINE = 1000  # of the searched lines: a regular expression may need quadratic time


@dataclass
class MessageMatch:
    """An exception that matches a family, with the groups of its message. A missing group is empty."""

    thrown: ExceptionRecord
    parts: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.parts.get(name) or ""

    def number(self, name: str) -> int:
        return int(self[name]) if self[name].lstrip("-").isdigit() else 0


def match_message(failure: FailureRecord, types: Sequence[str], *families: str) -> MessageMatch | None:
    """The first exception in the chain with a known type and message.

    Its type is one of ``types`` or unknown, and its message begins like one of ``families``.
    """
    for thrown in failure.chain:
        if thrown.raised_by_user or (thrown.names and not set(types) & set(thrown.names)):
            continue
        for family in families:
            found = re.match(f"{LEAD}(?:{family})", thrown.message, CASE)
            if found is not None:
                return MessageMatch(
                    thrown, {name: value.strip() for name, value in found.groupdict().items() if value}
                )
    return None


# Prefixes of workers, replicas and the compiler before an error that they pass on.
LEAD = (
    r"(?:\s*|Caught \w+ in (?:DataLoader worker process \d+|replica \d+ on device \d+|pin memory thread for device \w+)\.\s*"
    r"|(?:Dynamo failed to run FX node with fake tensors:|RuntimeError when making fake tensor call|Failed running call_\w+).{0,2000}?"
    r"got \w+\(['\"]{1,2})"
)


def search_log(failure: FailureRecord, *families: str) -> re.Match[str] | None:
    """The first matching line of the log near the failure, or of its messages."""
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
    """The name of the layer that was running, ``model.fc1 (Linear)``, or an empty string."""
    module = failure.module
    return (
        f"`{module.path}` ({module.kind})"
        if module and module.path
        else f"the {module.kind}"
        if module
        else ""
    )


def describe_tensors(tensors: Iterable[TensorSeen], limit: int = 4) -> list[str]:
    """Tensors of the failing line, one per line."""
    return list(dict.fromkeys(tensor.sentence() for tensor in tensors))[:limit]


def on_own_line(failure: FailureRecord) -> list[TensorSeen]:
    """Tensors in the user's failing frame that its line names."""
    own = failure.own
    if own is None:
        return []
    words = set(re.findall(r"\w+", own.text))
    return [tensor for tensor in own.tensors if tensor.name.partition("[")[0] in words]


def sizes(failure: FailureRecord) -> list[str]:
    """The tensors of the user's failing line, or those of the frames below it if the line names none."""
    return describe_tensors(on_own_line(failure) or failure.tensors)


def shape(text: str) -> str:
    """Converts ``torch.Size([8, 1])`` and ``[8, 1]`` to ``8x1``."""
    numbers = re.findall(r"-?\d+", text)
    return "x".join(numbers) if numbers else "a scalar"
