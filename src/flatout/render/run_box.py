"""The box at the end of a run: at most eight lines of plain ASCII, because any terminal or log may show it."""

import textwrap
from collections.abc import Mapping, Sequence

from flatout.render.formatting import duration, figure, one_line, shell, size
from flatout.schema.run_summary import RunSummary

WIDTH = 78
INSIDE = WIDTH - 4
MOST_LINES = 6  # inside


def box(record: RunSummary, where: str, failed: Mapping[str, str] = {}) -> str:
    """Return the figures of a run, what limited it, the next command, and where its record is.

    ``failed``: trackers that did not take the figures, with the reason.
    """
    last = [f"record: {one_line(where, 140)}"]
    if len(failed) == 1:
        (why,) = failed.values()
        last.append(one_line(f"not exported: {why}", 2 * INSIDE - 4))
    elif failed:
        last.append(f"not exported: {', '.join(failed)}; see their .log files beside the record")
    end = _wrapped(last)
    lines = [*_wrapped(_figures(record))[: MOST_LINES - len(end)], *end]
    edge = f"+-- flatout run {'-' * (WIDTH - 17)}+"
    return "\n".join([edge, *(f"| {line:<{INSIDE}} |" for line in lines), f"+{'-' * (WIDTH - 2)}+"])


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, INSIDE, subsequent_indent="  ")]


def _figures(record: RunSummary) -> list[str]:
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
    return found
