"""Reads a pasted error or a log: interleaved tracebacks of ranks, chained or from workers, or no traceback.

Each line is assigned to the process that wrote it (torch's ``[rank3]:``, torchrun's ``[default3]:``, mpirun's
and srun's labels). Each process is read separately. Every chain of exceptions becomes one FailureRecord, in
the order of the text.
"""

import builtins
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flatout.job.sanitize import sanitize
from flatout.schema.failure import ExceptionRecord, FailureRecord, FrameRecord

MAX_LINES = 20_000
MAX_LINE_CHARACTERS = 8_000
MAX_MESSAGE_LINES = 120
AROUND_LINES = 80
MAX_FAILURES = 64

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
RANK_LABEL = re.compile(
    r"^\s*(?:\[rank(?P<rank>\d+)\]:?|\[default(?P<local>\d+)\]:|\[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:|(?P<srun>\d+): "
    r"(?=\s*(?:Traceback|File \"|\S+Error\b)))[ ]?"
)
HEADER = re.compile(r"^(?P<before>.*?)Traceback \(most recent call last\):\s*$")
FRAME = re.compile(
    r'^(?P<indent>\s*)File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?$'
)
EXCEPTION_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:\.<locals>\.\w+)*)(?::(?: (?P<message>.*))?)?$")
CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
LOG_LINE = re.compile(
    r"^(?:\[?\d{4}-\d\d-\d\d[T ]|\[?[EWIF]\d{3,4} \d\d:|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b|\$ |srun: |slurmstepd: |Epoch\b)"
)
ERROR_NAME = re.compile(
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
LIBRARY_PATH = re.compile(
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


def read_failures(text: str) -> list[FailureRecord]:
    """Every failure in a text. A text without a traceback gives one record of its end. Never raises."""
    lines = [
        clean(line.rpartition("\r")[2] or line.strip("\r"))[:MAX_LINE_CHARACTERS]
        for line in text.split("\n")[-MAX_LINES:]
    ]
    failures = [failure for output in _outputs(lines) for failure in _failures(output)]
    if not failures:
        return [_without_traceback([line for line in lines if line.strip()])]
    return failures[:MAX_FAILURES]


def _outputs(lines: Iterable[str]) -> list[ProcessOutput]:
    outputs: dict[int | None, ProcessOutput] = {}
    for line in lines:
        label = RANK_LABEL.match(line)
        rank = None
        if label is not None:
            rank = int(next(number for number in label.groups() if number is not None)[:9])
            line = line[label.end() :]
        outputs.setdefault(rank, ProcessOutput(rank)).lines.append(line)
    return list(outputs.values())


def _failures(output: ProcessOutput) -> list[FailureRecord]:
    chain: list[ExceptionRecord] = []
    start, failures = 0, []
    for first, end, error in _errors(output.lines):
        if not chain:
            start = first
        chain.append(error)
        if not error.link:
            failures.append(_record(output, chain, start, end))
            chain = []
    if chain:
        failures.append(_record(output, chain, start, len(output.lines)))
    return failures


def _errors(lines: list[str]) -> Iterator[tuple[int, int, ExceptionRecord]]:
    """Each exception with its first line and the line after it, linked to the next one."""
    i = 0
    while i < len(lines):
        first = i
        if HEADER.match(lines[i]) is None:
            i += 1
            continue
        i, error = _read_traceback(lines, i)
        if error is not None:
            link, following = _next_link(lines, i)
            if link and following < len(lines):
                error.link, i = link, following
            yield first, i, error


def _record(output: ProcessOutput, chain: list[ExceptionRecord], start: int, end: int) -> FailureRecord:
    around = output.lines[max(0, start - AROUND_LINES) : start] + output.lines[end : end + AROUND_LINES]
    return FailureRecord(chain, [line for line in around if line.strip()], rank=output.rank)


def split_nested(error: ExceptionRecord) -> list[ExceptionRecord]:
    """Splits an exception whose message contains another process's traceback; that exception comes first."""
    header = re.search(r"^.*Traceback \(most recent call last\):[ \t]*$", error.message, re.MULTILINE)
    if header is None:
        return [error]
    errors = [nested for _, _, nested in _errors(error.message[header.start() :].split("\n"))]
    if not errors:
        return [error]
    errors[-1].link = "carried"
    return [*errors, error]


def _read_traceback(lines: list[str], i: int) -> tuple[int, ExceptionRecord | None]:
    """The traceback whose header is at ``i``, and the line after it."""
    header = HEADER.match(lines[i])
    assert header is not None
    unlabelled = _prefix_remover(header["before"], lines, i)
    i += 1
    frames: list[FrameRecord] = []
    while i < len(lines):
        line = unlabelled(lines[i])
        frame = FRAME.match(line)
        if frame is not None:
            file, function = frame["file"], frame["function"] or ""
            frames.append(FrameRecord(file, int(frame["line"]), function, "", is_user_file(file)))
        elif line.startswith((" ", "\t")) or not line.strip():
            text = line.strip()
            is_source = set(text) - set("^~ ") and not text.startswith("[Previous line")
            if frames and is_source and not frames[-1].text:
                frames[-1].text = text
        else:
            break
        i += 1
    if i >= len(lines):
        return i, None
    raised = EXCEPTION_LINE.match(unlabelled(lines[i]))
    if raised is None:
        return i, None
    message = [raised["message"] or ""]
    i += 1
    blank = 0
    has_nested = False
    while i < len(lines) and len(message) < MAX_MESSAGE_LINES:
        line = unlabelled(lines[i])
        blank = 0 if line.strip() else blank + 1
        inner = HEADER.match(line)
        last = next((line for line in reversed(message) if line.strip()), "")
        is_process = len(message) > 1 and last.startswith("-- Process ") and "terminated" in last
        if inner is not None and (inner["before"].startswith("Original ") or is_process):
            has_nested = True
        elif (
            blank > 1
            or inner is not None
            or line.strip() in (CAUSE, CONTEXT)
            or LOG_LINE.match(line)
            or (has_nested and not line.strip())
        ):
            break
        message.append(line)
        i += 1
    kind = raised["type"]
    return i, ExceptionRecord(kind, type_names(kind), "\n".join(message).strip("\n"), [], frames)


def _prefix_remover(before: str, lines: list[str], i: int) -> Callable[[str], str]:
    """A function that removes a label (a time, a container's name) that the lines below the header repeat."""
    if not before.strip() or before.startswith("Original "):
        width = len(before) if not before.strip() else 0
        return lambda line: line[width:] if not line[:width].strip() else line
    pattern = re.compile(
        "".join(r"\d+" if part.isdigit() else re.escape(part) for part in re.split(r"(\d+)", before))
    )
    following = lines[i + 1] if i + 1 < len(lines) else ""
    label = pattern.match(following)
    if label is None or FRAME.match(following[label.end() :]) is None:
        return lambda line: line
    return lambda line: line[label.end() :] if (label := pattern.match(line)) else line


def _next_link(lines: list[str], i: int) -> tuple[str, int]:
    """How the next traceback is linked to this one, and the line where it begins."""
    while i < len(lines) and not lines[i].strip():
        i += 1
    words = lines[i].strip() if i < len(lines) else ""
    link = "cause" if words.endswith(CAUSE) else "context" if words.endswith(CONTEXT) else ""
    return link, i + 1 if link else i


def type_names(kind: str) -> list[str]:
    """A type's own name and the known names of its bases."""
    short = kind.rpartition(".")[2]
    builtin = getattr(builtins, short, None)
    if isinstance(builtin, type) and issubclass(builtin, BaseException):
        return [base.__name__ for base in builtin.__mro__[:-2]]
    return [short, *BASES.get(short, ())]


def is_user_file(file: str) -> bool:
    return LIBRARY_PATH.search(file) is None and not file.startswith("<")


def _without_traceback(lines: list[str]) -> FailureRecord:
    """The record of a text without a traceback: an error's last line, a message, or the end of a log."""
    for i, line in enumerate(lines):
        raised = EXCEPTION_LINE.match(line.strip())
        if (
            raised is not None
            and (raised["message"] is not None or line.rstrip().endswith(":"))
            and (raised["type"].startswith("torch.") or ERROR_NAME.search(raised["type"]))
        ):
            message = "\n".join([raised["message"] or "", *lines[i + 1 : i + MAX_MESSAGE_LINES]])
            around = lines[max(0, i - AROUND_LINES) : i] + lines[i + 1 : i + AROUND_LINES]
            return FailureRecord(
                [ExceptionRecord(raised["type"], type_names(raised["type"]), message)], around
            )
    whole = "\n".join(lines[-MAX_MESSAGE_LINES:])
    return FailureRecord([ExceptionRecord("", [], whole)] if whole else [], lines[-AROUND_LINES:])
