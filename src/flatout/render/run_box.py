"""The box at the end of a run: at most eight lines of plain ASCII, because any terminal or log may show it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from flatout.render.formatting import duration, figure, one_line, shell, size
from flatout.schema.run_summary import RunSummary

WIDTH = 78
MOST_LINES = 6  # inside


def box(record: RunSummary, path: str, logs: Sequence[str] = ()) -> str:
    """Return the figures of a run, what limited it, and the next command. ``logs``: messages of trackers."""
    inside = WIDTH - 4
    lines = [
        each
        for line in _lines(record, path, logs)
        for each in textwrap.wrap(line, inside, subsequent_indent="  ")
    ]
    edge = f"+-- flatout run {'-' * (WIDTH - 17)}+"
    return "\n".join(
        [edge, *(f"| {line:<{inside}} |" for line in lines[:MOST_LINES]), f"+{'-' * (WIDTH - 2)}+"]
    )


def _lines(record: RunSummary, path: str, logs: Sequence[str]) -> list[str]:
    ranks = f" (rank {record.rank} of {record.world_size})" if record.world_size > 1 else ""
    speed = [f"{figure(record.steps_per_s)} steps/s"]
    speed += [f"{figure(record.samples_per_s)} samples/s"] if record.samples_per_s else []
    used = [f"waited for data {record.data_wait:.0%}", f"{record.cores_used:.1f} of {record.cores} cores"]
    used += [f"GPU busy {record.gpu_busy:.0%}"] if record.gpu_busy is not None else []
    used.append(f"peak memory {size(record.peak_memory_bytes)}")
    found = [
        f"{record.steps:,} steps in {duration(record.seconds)}{ranks}: {', '.join(speed)}",
        ", ".join(used),
        f"limited by: {record.limited_by}",
    ]
    if record.next_command:
        found.append(f"next: flatout {record.next_command} {one_line(shell(record.command), 120)}")
    found += [f"record: {one_line(path, 140)}"] if path else []
    return [
        *found,
        *([f"messages of trackers: {', '.join(one_line(log, 70) for log in logs)}"] if logs else []),
    ]
