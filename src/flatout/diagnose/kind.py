"""A kind of failure: a row of a table, or a function, with a documentation page.

A row (`pattern_kind`) holds patterns of the message and templates of the cause and of the fix. A kind that needs more
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
RUNTIME_ERROR = ("RuntimeError",)
DISTRIBUTED_ERRORS = (
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistBackendError",
    "RuntimeError",
    "ValueError",
)
MESSAGE_END = r"[.!:]?\s*\Z"  # of a message typed without its figures


@dataclass
class Diagnosis:
    """What a kind answers for a failure.

    ``message`` is the cause in one sentence, ``fix`` holds code or commands, ``evidence`` further lines.
    ``place`` replaces the user's line."""

    message: str
    fix: str
    evidence: list[str] = field(default_factory=list)
    place: SourceLocation | None = None
    levers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailureKind:
    """A known failure. A ``secondary`` one only reports the failure of another process."""

    code: str
    name: str
    match: Callable[[FailureRecord], Diagnosis | None]
    secondary: bool = False
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

        Raises any exception of the matcher: that is a bug in flatout."""
        diagnosis = self.match(failure)
        if diagnosis is None:
            return None
        frame = failure.user_frame
        return Finding(
            self.code,
            self.name,
            self.severity,
            diagnosis.message,
            diagnosis.place or (frame.place() if frame else None),
            [line for line in diagnosis.evidence if line],
            diagnosis.fix,
            list(diagnosis.levers),
        )


def kind(
    code: str, name: str, secondary: bool = False, severity: Severity = Severity.FATAL
) -> Callable[[Callable[[FailureRecord], Diagnosis | None]], FailureKind]:
    return lambda match: FailureKind(code, name, match, secondary, severity)


class Form:
    """One form of a failure: patterns of its message, and the templates that `fill` fills."""

    def __init__(self, cause: str, fix: str, *patterns: str) -> None:
        self.cause, self.fix, self.patterns = cause, fix, patterns


def pattern_kind(
    code: str,
    name: str,
    page: str,
    *forms: Form,
    types: Sequence[str] = RUNTIME_ERROR,
    show_tensors: bool = False,
    secondary: bool = False,
    when: Callable[[FailureRecord, MessageMatch], bool] | None = None,
    values: Callable[[FailureRecord, MessageMatch], dict[str, str]] | None = None,
) -> FailureKind:
    """A kind as a row: the first form whose pattern matches gives the cause and the fix.

    ``page`` is the title, why it happens, and the sources. Templates use the groups of the pattern, and the
    values of `_values` and ``values``. ``show_tensors`` adds the line's tensors as evidence. ``when`` is a
    further condition."""

    def diagnose(failure: FailureRecord) -> Diagnosis | None:
        match = match_message(failure, *(text for form in forms for text in form.patterns), types=types)
        if match is None or (when is not None and not when(failure, match)):
            return None
        form = next(form for form in forms if match.pattern in form.patterns)
        texts = {**_values(failure), **match.groups, **(values(failure, match) if values else {})}
        evidence = tensor_lines(failure) if show_tensors else []
        return Diagnosis(fill(form.cause, texts), fill(form.fix, texts), evidence)

    title, *text = inspect.cleandoc(page).split("\n")
    sources = [line for line in text if line.startswith("https://")]
    why = [line for line in text if line.strip() and line not in sources]
    fixes = dict.fromkeys(line for form in forms for line in fill(form.fix, {}).split("\n"))
    lines = [title, ""]
    for heading, part in (("Why it happens", why), ("Fix", fixes), ("Sources", sources)):
        lines += [f"{heading}:", *(f"    {line}" for line in part)]
    diagnose.__doc__ = "\n".join(lines)
    return FailureKind(code, name, diagnose, secondary)


PLACEHOLDER = re.compile(r"\{(\w+)(?:\|([^}]*))?\}")
OPTIONAL_PART = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, str]) -> str:
    """``{name|default}`` becomes the value or the default; ``[[...]]`` is left out if a value in it is empty."""

    def optional(match: re.Match[str]) -> str:
        return match[1] if all(values.get(name) for name, _ in PLACEHOLDER.findall(match[1])) else ""

    return PLACEHOLDER.sub(
        lambda match: values.get(match[1]) or match[2] or "", OPTIONAL_PART.sub(optional, template)
    )


def _values(failure: FailureRecord) -> dict[str, str]:
    """What every template may use: the layer, the first tensor of the line, the batch, facts of the process."""
    tensor = next(iter(tensors_on_line(failure)), None)
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
    names = [tensor.name for tensor in tensors_on_line(failure) or failure.tensors if condition(tensor)]
    return {"tensor": next((name for name in names if name.isidentifier()), "")}


MAX_SEARCHED_CHARACTERS = 1000  # of a line: a regular expression may need quadratic time


@dataclass
class MessageMatch:
    """An exception that matches a pattern, with the groups of its message. A missing group is empty."""

    error: ExceptionRecord
    groups: dict[str, str]
    pattern: str

    def __getitem__(self, name: str) -> str:
        return self.groups.get(name) or ""

    def number(self, name: str) -> int:
        return int(self[name]) if self[name].lstrip("-").isdigit() else 0


def match_message(
    failure: FailureRecord, *patterns: str, types: Sequence[str] = RUNTIME_ERROR
) -> MessageMatch | None:
    """The first exception in the chain with a known type and message.

    Its type is one of ``types`` or unknown, and its message begins like one of ``patterns``."""
    for error in failure.chain:
        if error.raised_by_user or (error.class_names and not set(types) & set(error.class_names)):
            continue
        for pattern in patterns:
            match = re.match(f"{PREFIXES}(?:{pattern})", error.message, re.DOTALL)
            if match is not None:
                groups = {name: value.strip() for name, value in match.groupdict().items() if value}
                return MessageMatch(error, groups, pattern)
    return None


# Prefixes of workers, replicas and the compiler before an error that they pass on.
PREFIXES = (
    r"(?:\s*|Caught \w+ in (?:DataLoader worker process \d+|replica \d+ on device \d+|pin memory thread for device \w+)\.\s*"
    r"|(?:Dynamo failed to run FX node with fake tensors:|RuntimeError when making fake tensor call|Failed running call_\w+).{0,2000}?"
    r"got \w+\(['\"]{1,2})"
)


def search_log(failure: FailureRecord, *patterns: str) -> re.Match[str] | None:
    """The first matching line of the log near the failure, or of its messages."""
    for line in _all_lines(failure):
        for pattern in patterns:
            match = re.search(pattern, line[:MAX_SEARCHED_CHARACTERS])
            if match is not None:
                return match
    return None


def _all_lines(failure: FailureRecord) -> Iterable[str]:
    yield from failure.log_lines
    for error in failure.chain:
        if not error.raised_by_user:
            yield from error.message.split("\n")


def layer(failure: FailureRecord) -> str:
    """The name of the layer that was running, ``model.fc1 (Linear)``, or an empty string."""
    module = failure.module
    if module is None:
        return ""
    return f"`{module.path}` ({module.kind})" if module.path else f"the {module.kind}"


def describe_tensors(tensors: Iterable[TensorRecord], limit: int = 4) -> list[str]:
    """Tensors of the failing line, one per line."""
    return list(dict.fromkeys(tensor.sentence() for tensor in tensors))[:limit]


def tensors_on_line(failure: FailureRecord) -> list[TensorRecord]:
    """Tensors in the user's failing frame that its line names."""
    if failure.user_frame is None:
        return []
    words = set(re.findall(r"\w+", failure.user_frame.text))
    return [tensor for tensor in failure.user_frame.tensors if tensor.name.partition("[")[0] in words]


def tensor_lines(failure: FailureRecord) -> list[str]:
    """The tensors of the user's failing line, or those of the frames below it if the line names none."""
    return describe_tensors(tensors_on_line(failure) or failure.tensors)


def frame_matches(failure: FailureRecord, pattern: str) -> bool:
    """Whether ``file:function`` of a frame matches."""
    return any(
        re.search(pattern, f"{frame.file}:{frame.function}".replace("\\", "/"))
        for error in failure.chain
        for frame in error.frames
    )


def shape(text: str) -> str:
    """Converts ``torch.Size([8, 1])`` and ``[8, 1]`` to ``8x1``."""
    numbers = re.findall(r"-?\d+", text)
    return "x".join(numbers) if numbers else "a scalar"
