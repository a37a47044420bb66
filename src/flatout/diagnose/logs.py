"""Reduces a log of any size to its end and every stretch that may hold a failure."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import IO

TAIL_LINES = 4000
STRETCH_LINES = 250  # from the first line of a failure
BEFORE_LINES = 40
MOST_STRETCHES = 24  # the first ones, which hold the cause
LONGEST_LINE = 1 << 14
MOST_CHARACTERS = 1 << 20  # at the end

BEGINS = re.compile(
    r"Traceback \(most recent call last\)|Watchdog caught collective|Assertion `|Killed process \d+|Bus error|Segmentation fault|Root Cause"
)


NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
NAMED_VALUE = re.compile(
    # The whole word by a lookahead, as it never gives characters back: a log may hold anything.
    rf"\b(?=(?P<name>\w+))(?P=name)['\"]?\s*(?:[:=]\s*)?(?:tensor\()?(?P<value>{NUMBER})\b",
    re.IGNORECASE,
)
NO_LOSS = re.compile(r"best|min|lowest|scale", re.IGNORECASE)  # a best loss begins as infinity


def losses(line: str) -> Iterator[tuple[str, float]]:
    """Names and values of the losses that a line of a log shows."""
    for found in NAMED_VALUE.finditer(line[:1000]):
        name = found["name"]
        if "loss" in name.lower() and not NO_LOSS.search(name):
            yield name, float(found["value"])


def gather(stream: IO[str]) -> str:
    """Relevant lines of a stream, in order, in bounded memory. An empty line marks omitted lines."""
    tail: deque[tuple[int, str]] = deque()
    before: deque[tuple[int, str]] = deque(maxlen=BEFORE_LINES)
    kept: dict[int, str] = {}
    left, stretches, number, finite = 0, 0, 0, True
    size = 0
    while line := stream.readline(LONGEST_LINE):
        rest = line
        while rest and not rest.endswith("\n"):  # skips the rest of an overlong line
            rest = stream.readline(LONGEST_LINE)
        number += 1
        line = line.rstrip("\n")
        if not left and stretches < MOST_STRETCHES and BEGINS.search(line):
            left, stretches = STRETCH_LINES, stretches + 1
            kept.update(before)
        if left:
            kept[number] = line
            left -= 1
        elif finite and not all(
            math.isfinite(loss) for _, loss in losses(line)
        ):  # the first of perhaps thousands
            kept.update(before)
            kept[number] = line
            finite = False
        before.append((number, line))
        tail.append((number, line))
        size += len(line)
        while size > MOST_CHARACTERS or len(tail) == TAIL_LINES:
            size -= len(tail.popleft()[1])
    kept.update(tail)
    found, last = [], 0
    for at in sorted(kept):
        if at != last + 1:
            found.append("")
        found.append(kept[at])
        last = at
    return "\n".join(found)
