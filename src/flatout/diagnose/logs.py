"""Reduces a log of any size to its end and every stretch that may hold a failure."""

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import IO

TAIL_LINES = 4000
STRETCH_LINES = 250  # from the first line of a failure
BEFORE_LINES = 40
MAX_STRETCHES = 24  # the first ones, which hold the cause
MAX_LINE_CHARACTERS = 1 << 14
MAX_TAIL_CHARACTERS = 1 << 20

FAILURE_START = re.compile(
    r"Traceback \(most recent call last\)|Watchdog caught collective|Assertion `|Killed process \d+|Bus error|Segmentation fault|Root Cause"
)


NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
NAMED_VALUE = re.compile(
    # The whole word by a lookahead, as it never gives characters back: a log may hold anything.
    rf"\b(?=(?P<name>\w+))(?P=name)['\"]?\s*(?:[:=]\s*)?(?:tensor\()?(?P<value>{NUMBER})\b",
    re.IGNORECASE,
)
NOT_A_LOSS = re.compile(r"best|min|lowest|scale", re.IGNORECASE)  # a best loss begins as infinity


def losses(line: str) -> Iterator[tuple[str, float]]:
    """Names and values of the losses that a line of a log shows."""
    for match in NAMED_VALUE.finditer(line[:1000]):
        name = match["name"]
        if "loss" in name.lower() and not NOT_A_LOSS.search(name):
            yield name, float(match["value"])


def condense(stream: IO[str]) -> str:
    """Relevant lines of a stream, in order, in bounded memory. An empty line marks omitted lines."""
    tail: deque[tuple[int, str]] = deque()
    before: deque[tuple[int, str]] = deque(maxlen=BEFORE_LINES)
    relevant: dict[int, str] = {}
    remaining, stretches, number, all_finite = 0, 0, 0, True
    size = 0
    while line := stream.readline(MAX_LINE_CHARACTERS):
        rest = line
        while rest and not rest.endswith("\n"):  # skips the rest of an overlong line
            rest = stream.readline(MAX_LINE_CHARACTERS)
        number += 1
        line = line.rstrip("\n")
        if not remaining and stretches < MAX_STRETCHES and FAILURE_START.search(line):
            remaining, stretches = STRETCH_LINES, stretches + 1
            relevant.update(before)
        if remaining:
            relevant[number] = line
            remaining -= 1
        elif all_finite and any(not math.isfinite(loss) for _, loss in losses(line)):
            # the first of thousands
            relevant.update(before)
            relevant[number] = line
            all_finite = False
        before.append((number, line))
        tail.append((number, line))
        size += len(line)
        while size > MAX_TAIL_CHARACTERS or len(tail) == TAIL_LINES:
            size -= len(tail.popleft()[1])
    relevant.update(tail)
    lines, last = [], 0
    for number in sorted(relevant):
        if number != last + 1:
            lines.append("")
        lines.append(relevant[number])
        last = number
    return "\n".join(lines)
