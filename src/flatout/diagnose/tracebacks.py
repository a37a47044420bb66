"""Reads a pasted error or a log: interleaved tracebacks of ranks, chained or from workers, or no traceback.

Each line is assigned to the process that wrote it (torch's ``[rank3]:``, torchrun's ``[default3]:``, mpirun's
and srun's labels). Each process is read separately. Every chain of exceptions becomes one FailureRecord, in
the order of the text.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flatout.job.sanitize import sanitize
from flatout.schema.failure import ExceptionRecord, FailureRecord, FrameRecord

MOST_LINES = 20_000
LONGEST_LINE = 8_000
MESSAGE_LINES = 120
AROUND_LINES = 80
MOST_FAILURES = 64

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
LABEL = re.compile(
    r"^\s*(?:\[rank(?P<rank>\d+)\]:?|\[default(?P<local>\d+)\]:|\[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:|(?P<srun>\d+): "
    r"(?=\s*(?:Traceback|File \"|\S+Error\b)))[ ]?"
)
HEADER = re.compile(r"^(?P<before>.*?)Traceback \(most recent call last\):\s*$")
FRAME = re.compile(
    r'^(?P<indent>\s*)File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?$'
)
RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:\.<locals>\.\w+)*)(?::(?: (?P<message>.*))?)?$")
CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
LOGGED = re.compile(
    r"^(?:\[?\d{4}-\d\d-\d\d[T ]|\[?[EWIF]\d{3,4} \d\d:|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b|\$ |srun: |slurmstepd: |Epoch\b)"
)
ENDS_LIKE_AN_ERROR = re.compile(
    r"(?:Error|Exception|Warning|Interrupt|Exit|Unsupported|Hit|Iteration|Failure|Failed|Expired|Timeout|Empty|Full)$"
)
BASES = {
    "OutOfMemoryError": ("RuntimeError",),
    "AcceleratorError": ("RuntimeError",),
    "DistError": ("RuntimeError",),
    "DistBackendError": ("DistError", "RuntimeError"),
    "DistNetworkError": ("DistError", "RuntimeError"),
    "DistStoreError": ("DistError", "RuntimeError"),
    "UnpicklingError": ("PickleError",),
    "PicklingError": ("PickleError",),
    "TorchRuntimeError": ("TorchDynamoException", "RuntimeError"),
    "BackendCompilerFailed": ("TorchDynamoException", "RuntimeError"),
    "Unsupported": ("TorchDynamoException", "RuntimeError"),
    "InternalTorchDynamoError": ("TorchDynamoException", "RuntimeError"),
    "UserError": ("Unsupported", "TorchDynamoException", "RuntimeError"),
    "FailOnRecompileLimitHit": ("TorchDynamoException", "RuntimeError"),
    "RecompileLimitExceeded": ("Unsupported", "TorchDynamoException", "RuntimeError"),
    "InductorError": ("BackendCompilerFailed", "TorchDynamoException", "RuntimeError"),
    "LoweringException": ("RuntimeError",),
}
FOREIGN = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d(?:\.\d+)?[/\\]|[/\\]Lib[/\\]|[/\\]torch[/\\](?:nn|utils|_dynamo|_inductor|autograd|distributed"
    r"|optim|cuda|multiprocessing|_functorch|fx|amp)[/\\]|[/\\]flatout[/\\](?:agent|checkpoint|cli|data|distributed|guard|levers|trial)[/\\]|^<frozen "
)


@dataclass
class ProcessOutput:
    """The lines of one process."""

    rank: int | None
    lines: list[str] = field(default_factory=list)


def clean(text: str) -> str:
    """Text of another program without terminal control sequences."""
    return sanitize(ESCAPES.sub("", text))


def read(text: str) -> list[FailureRecord]:
    """Every failure in a text. A text without a traceback gives one record of its end. Never raises."""
    lines = [
        clean(line.rpartition("\r")[2] or line.strip("\r"))[:LONGEST_LINE]
        for line in text.split("\n")[-MOST_LINES:]
    ]
    failures = [failure for voice in _voices(lines) for failure in _failures(voice)]
    if not failures:
        return [_without_traceback([line for line in lines if line.strip()])]
    return failures[:MOST_FAILURES]


def _voices(lines: Iterable[str]) -> list[ProcessOutput]:
    found: dict[int | None, ProcessOutput] = {}
    for line in lines:
        label = LABEL.match(line)
        rank = None
        if label is not None:
            rank = int(next(number for number in label.groups() if number is not None)[:9])
            line = line[label.end() :]
        found.setdefault(rank, ProcessOutput(rank)).lines.append(line)
    return list(found.values())


def _failures(voice: ProcessOutput) -> list[FailureRecord]:
    lines, at, found = voice.lines, 0, []
    chain: list[ExceptionRecord] = []
    link, begun = "", 0
    while at < len(lines):
        header = HEADER.match(lines[at])
        if header is None:
            at += 1
            continue
        if not chain:
            begun = at
        at, thrown = _traceback(lines, at)
        if thrown is None:
            continue
        chain.append(thrown)
        link, following = _link(lines, at)
        if link and following < len(lines):
            thrown.link, at = link, following
            continue
        found.append(_record(voice, chain, begun, at))
        chain = []
    if chain:
        found.append(_record(voice, chain, begun, at))
    return found


def _record(voice: ProcessOutput, chain: list[ExceptionRecord], begun: int, ended: int) -> FailureRecord:
    around = [
        line
        for line in voice.lines[max(0, begun - AROUND_LINES) : begun]
        + voice.lines[ended : ended + AROUND_LINES]
        if line.strip()
    ]
    return FailureRecord(chain, around, rank=voice.rank)


def unfolded(thrown: ExceptionRecord) -> list[ExceptionRecord]:
    """Splits an exception whose message contains another process's traceback; that exception comes first."""
    header = re.search(r"^.*Traceback \(most recent call last\):[ \t]*$", thrown.message, re.MULTILINE)
    if header is None:
        return [thrown]
    lines, found, at = thrown.message[header.start() :].split("\n"), [], 0
    while at < len(lines):
        if HEADER.match(lines[at]) is None:
            at += 1
            continue
        at, inner = _traceback(lines, at)
        if inner is not None:
            inner.link, following = _link(lines, at)
            found.append(inner)
            at = max(at, following if inner.link else at)
    if not found:
        return [thrown]
    found[-1].link = "carried"
    return [*found, thrown]


def _traceback(lines: list[str], at: int) -> tuple[int, ExceptionRecord | None]:
    """The traceback whose header is at ``at``, and the line after it."""
    header = HEADER.match(lines[at])
    assert header is not None
    strip = _prefix(header["before"], lines, at)
    at += 1
    frames: list[FrameRecord] = []
    while at < len(lines):
        line = strip(lines[at])
        frame = FRAME.match(line)
        if frame is not None:
            frames.append(
                FrameRecord(
                    frame["file"], int(frame["line"]), frame["function"] or "", "", is_mine(frame["file"])
                )
            )
        elif line.startswith((" ", "\t")) or not line.strip():
            text = line.strip()
            if (
                frames
                and text
                and not frames[-1].text
                and not set(text) <= set("^~ ")
                and not text.startswith("[Previous line")
            ):
                frames[-1].text = text
        else:
            break
        at += 1
    if at >= len(lines):
        return at, None
    raised = RAISED.match(strip(lines[at]))
    if raised is None:
        return at, None
    message = [raised["message"] or ""]
    at += 1
    blank = 0
    carries = False
    while at < len(lines) and len(message) < MESSAGE_LINES:
        line = strip(lines[at])
        blank = 0 if line.strip() else blank + 1
        inner = HEADER.match(line)
        if inner is not None and (
            inner["before"].startswith("Original ")
            or (message[-2:-1] and re.match(r"-- Process \d+ terminated", _last(message)))
        ):
            carries = True
        elif (
            blank > 1
            or inner is not None
            or line.strip() in (CAUSE, CONTEXT)
            or LOGGED.match(line)
            or (carries and not line.strip())
        ):
            break
        message.append(line)
        at += 1
    kind = raised["type"]
    return at, ExceptionRecord(kind, names_of(kind), "\n".join(message).strip("\n"), [], frames)


def _last(message: list[str]) -> str:
    return next((line for line in reversed(message) if line.strip()), "")


def _prefix(before: str, lines: list[str], at: int) -> Callable[[str], str]:
    """A function that removes a label (a time, a container's name) that the lines below the header repeat."""
    if not before.strip() or before.startswith("Original "):
        width = len(before) if not before.strip() else 0
        return lambda line: line[width:] if not line[:width].strip() else line
    pattern = re.compile(
        "".join(r"\d+" if part.isdigit() else re.escape(part) for part in re.split(r"(\d+)", before))
    )
    following = lines[at + 1] if at + 1 < len(lines) else ""
    label = pattern.match(following)
    if label is None or FRAME.match(following[label.end() :]) is None:
        return lambda line: line
    return lambda line: line[label.end() :] if (label := pattern.match(line)) else line


def _link(lines: list[str], at: int) -> tuple[str, int]:
    """How the next traceback is linked to this one, and the line where it begins."""
    while at < len(lines) and not lines[at].strip():
        at += 1
    words = lines[at].strip() if at < len(lines) else ""
    link = "cause" if words.endswith(CAUSE) else "context" if words.endswith(CONTEXT) else ""
    return link, at + 1 if link else at


def names_of(kind: str) -> list[str]:
    """A type's own name and the known names of its bases."""
    short = kind.rpartition(".")[2]
    known = getattr(builtins, short, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return [one.__name__ for one in known.__mro__[:-2]]
    return [short, *BASES.get(short, ())]


def is_mine(file: str) -> bool:
    return FOREIGN.search(file) is None and not file.startswith("<")


def _without_traceback(lines: list[str]) -> FailureRecord:
    """The record of a text without a traceback: an error's last line, a message, or the end of a log."""
    for at, line in enumerate(lines):
        raised = RAISED.match(line.strip())
        if (
            raised is not None
            and (raised["message"] is not None or line.rstrip().endswith(":"))
            and (raised["type"].startswith("torch.") or ENDS_LIKE_AN_ERROR.search(raised["type"]))
        ):
            message = "\n".join([raised["message"] or "", *lines[at + 1 : at + MESSAGE_LINES]])
            around = lines[max(0, at - AROUND_LINES) : at] + lines[at + 1 : at + AROUND_LINES]
            return FailureRecord([ExceptionRecord(raised["type"], names_of(raised["type"]), message)], around)
    whole = "\n".join(lines[-MESSAGE_LINES:])
    return FailureRecord([ExceptionRecord("", [], whole)] if whole else [], lines[-AROUND_LINES:])
