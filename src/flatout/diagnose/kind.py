"""A kind of failure: a row of a table, or a function, with a documentation page.

A row (`known`) holds patterns of the message and templates of the cause and of the fix. A kind that needs more
is a function (`kind`) that takes a FailureRecord and returns a Diagnosis or None; its docstring is the page.
Both check the type of the exception and the fixed beginning of its message, with named groups for the variable
parts. Exceptions raised by the user's own ``raise`` never match.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flatout.diagnose.rule import Rule
from flatout.schema.failure import ExceptionRecord, FailureRecord, TensorRecord
from flatout.schema.findings import Finding, Severity, SourceLocation

SECTIONS = ("Why it happens", "Fix", "How to fix it", "Sources")  # a row has Fix, a function the other
RUNTIME = ("RuntimeError",)
DIST = ("DistError", "DistNetworkError", "DistStoreError", "DistBackendError", "RuntimeError", "ValueError")
CASE = re.DOTALL
SHORT = r"[.!:]?\s*\Z"  # after the fixed beginning of a message, typed without its figures


@dataclass
class Diagnosis:
    """What a kind answers for a failure.

    ``message`` is the cause in one sentence, ``fix`` holds code or commands, ``evidence`` further lines.
    ``place`` replaces the user's line.
    """

    message: str
    fix: str
    evidence: list[str] = field(default_factory=list)
    place: SourceLocation | None = None
    levers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailureKind:
    """A known failure. ``reports`` marks kinds that only report the failure of another process."""

    code: str
    name: str
    match: Callable[[FailureRecord], Diagnosis | None]
    reports: bool = False
    severity: Severity = Severity.FATAL

    # A kind and a rule share the format of their pages.
    sections = SECTIONS
    title = Rule.title
    section = Rule.section

    @property
    def page(self) -> str:
        return inspect.getdoc(self.match) or ""

    def explain(self, failure: FailureRecord) -> Finding | None:
        """The finding for a failure, or None.

        Raises any exception of the matcher: that is a bug in flatout.
        """
        diagnosis = self.match(failure)
        if diagnosis is None:
            return None
        own = failure.user_frame
        return Finding(
            self.code,
            self.name,
            self.severity,
            diagnosis.message,
            diagnosis.place or (own.place() if own else None),
            [line for line in diagnosis.evidence if line],
            diagnosis.fix,
            list(diagnosis.levers),
        )


def kind(
    code: str,
    name: str,
    reports: bool = False,
    severity: Severity = Severity.FATAL,
) -> Callable[[Callable[[FailureRecord], Diagnosis | None]], FailureKind]:
    return lambda match: FailureKind(code, name, match, reports, severity)


@dataclass(frozen=True)
class Form:
    """One form of a failure: patterns of its message, and the templates that `fill` fills."""

    patterns: tuple[str, ...]
    cause: str
    fix: str


def form(cause: str, fix: str, *patterns: str) -> Form:
    return Form(patterns, cause, fix)


def known(
    code: str,
    name: str,
    page: str,
    *forms: Form,
    types: Sequence[str] = RUNTIME,
    tensors: bool = False,
    reports: bool = False,
    when: Callable[[FailureRecord, MessageMatch], bool] | None = None,
    values: Callable[[FailureRecord, MessageMatch], dict[str, str]] | None = None,
) -> FailureKind:
    """A kind as a row: the first form whose pattern matches gives the cause and the fix.

    ``page`` is the title, why it happens, and the sources. Templates use the groups of the pattern, the values
    of `_values`, and those of ``values``. ``tensors`` adds the tensors of the line as evidence. ``when`` is a
    further condition.
    """

    def diagnose(failure: FailureRecord) -> Diagnosis | None:
        match = match_message(failure, types, *(pattern for one in forms for pattern in one.patterns))
        if match is None or (when is not None and not when(failure, match)):
            return None
        one = next(one for one in forms if match.pattern in one.patterns)
        parts = {**_values(failure), **match.parts, **(values(failure, match) if values else {})}
        return Diagnosis(fill(one.cause, parts), fill(one.fix, parts), sizes(failure) if tensors else [])

    title, *text = inspect.cleandoc(page).split("\n")
    sources = [line for line in text if line.startswith("https://")]
    why = [line for line in text if line.strip() and line not in sources]
    fixes = dict.fromkeys(line for one in forms for line in fill(one.fix, {}).split("\n"))
    parts = {"Why it happens": why, "Fix": list(fixes), "Sources": sources}
    diagnose.__doc__ = "\n".join(
        [
            title,
            "",
            *(f"{heading}:\n" + "\n".join(f"    {line}" for line in part) for heading, part in parts.items()),
        ]
    )
    return FailureKind(code, name, diagnose, reports)


VALUE = re.compile(r"\{(\w+)(?:\|([^}]*))?\}")
OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, str]) -> str:
    """``{name|default}`` becomes the value or the default; ``[[...]]`` is left out if a value in it is empty."""

    def optional(match: re.Match[str]) -> str:
        return match[1] if all(values.get(name) for name, _ in VALUE.findall(match[1])) else ""

    return VALUE.sub(lambda match: values.get(match[1]) or match[2] or "", OPTIONAL.sub(optional, template))


def _values(failure: FailureRecord) -> dict[str, str]:
    """What every template may use: the layer, the first tensor of the line, the batch, facts of the process."""
    tensor = next(iter(on_own_line(failure)), None)
    return {
        "layer": layer(failure),
        "tensor": tensor.name if tensor else "",
        "shape": "x".join(map(str, tensor.shape)) if tensor else "",
        "line": failure.user_frame.text if failure.user_frame else "",
        "batch": str(failure.batch) if failure.batch else "",
        **{name: str(value) for name, value in failure.facts.items()},
    }


def tensor_name(failure: FailureRecord, condition: Callable[[TensorRecord], bool]) -> dict[str, str]:
    """The value ``tensor``: the first tensor of the line, or else of the frames below it, with a condition."""
    names = [tensor.name for tensor in on_own_line(failure) or failure.tensors if condition(tensor)]
    return {"tensor": next((name for name in names if name.isidentifier()), "")}


LONGEST_LINE = 1000  # of the searched lines: a regular expression may need quadratic time


@dataclass
class MessageMatch:
    """An exception that matches a family, with the groups of its message. A missing group is empty."""

    thrown: ExceptionRecord
    parts: dict[str, str]
    pattern: str

    def __getitem__(self, name: str) -> str:
        return self.parts.get(name) or ""

    def number(self, name: str) -> int:
        return int(self[name]) if self[name].lstrip("-").isdigit() else 0


def match_message(failure: FailureRecord, types: Sequence[str], *families: str) -> MessageMatch | None:
    """The first exception in the chain with a known type and message.

    Its type is one of ``types`` or unknown, and its message begins like one of ``families``.
    """
    for thrown in failure.chain:
        if thrown.raised_by_user or (thrown.class_names and not set(types) & set(thrown.class_names)):
            continue
        for family in families:
            match = re.match(f"{LEAD}(?:{family})", thrown.message, CASE)
            if match is not None:
                parts = {name: value.strip() for name, value in match.groupdict().items() if value}
                return MessageMatch(thrown, parts, family)
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
            match = re.search(family, line[:LONGEST_LINE])
            if match is not None:
                return match
    return None


def _all_lines(failure: FailureRecord) -> Iterable[str]:
    yield from failure.log_lines
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


def describe_tensors(tensors: Iterable[TensorRecord], limit: int = 4) -> list[str]:
    """Tensors of the failing line, one per line."""
    return list(dict.fromkeys(tensor.sentence() for tensor in tensors))[:limit]


def on_own_line(failure: FailureRecord) -> list[TensorRecord]:
    """Tensors in the user's failing frame that its line names."""
    own = failure.user_frame
    if own is None:
        return []
    words = set(re.findall(r"\w+", own.text))
    return [tensor for tensor in own.tensors if tensor.name.partition("[")[0] in words]


def sizes(failure: FailureRecord) -> list[str]:
    """The tensors of the user's failing line, or those of the frames below it if the line names none."""
    return describe_tensors(on_own_line(failure) or failure.tensors)


def runs_in(failure: FailureRecord, pattern: str) -> bool:
    """Whether ``file:function`` of a frame matches."""
    return any(
        re.search(pattern, f"{frame.file}:{frame.function}".replace("\\", "/"))
        for thrown in failure.chain
        for frame in thrown.frames
    )


def shape(text: str) -> str:
    """Converts ``torch.Size([8, 1])`` and ``[8, 1]`` to ``8x1``."""
    numbers = re.findall(r"-?\d+", text)
    return "x".join(numbers) if numbers else "a scalar"
