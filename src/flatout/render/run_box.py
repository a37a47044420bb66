"""The box at the end of a run: at most eight lines of plain ASCII, because any terminal or log may show it."""

import textwrap
from collections.abc import Mapping, Sequence

from flatout.render.formatting import duration, one_line, plural, rounded, shell, size
from flatout.schema.run_request import CompileRecord, RunSummary

WIDTH = 78
TEXT_WIDTH = WIDTH - 4
MAX_LINES = 6  # inside


def box(record: RunSummary, record_path: str, failed_exports: Mapping[str, str] = {}) -> str:
    """Return the figures of a run, what limited it, the next command, and where its record is.

    ``failed``: trackers that did not take the figures, with the reason."""
    footer = [f"record: {one_line(record_path, 140)}"]
    if len(failed_exports) == 1:
        (why,) = failed_exports.values()
        footer.append(one_line(f"not exported: {why}", 2 * TEXT_WIDTH - 4))
    elif failed_exports:
        footer.append(f"not exported: {', '.join(failed_exports)}; see their .log files beside the record")
    footer_lines = _wrapped(footer)
    lines = [*_wrapped(_figures(record))[: MAX_LINES - len(footer_lines)], *footer_lines]
    edge = f"+-- flatout run {'-' * (WIDTH - 17)}+"
    return "\n".join([edge, *(f"| {line:<{TEXT_WIDTH}} |" for line in lines), f"+{'-' * (WIDTH - 2)}+"])


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, TEXT_WIDTH, subsequent_indent="  ")]


def _figures(record: RunSummary) -> list[str]:
    ranks = f" (rank {record.rank} of {record.world_size})" if record.world_size > 1 else ""
    speed = [f"{rounded(record.steps_per_s)} steps/s"]
    speed += [f"{rounded(record.samples_per_s)} samples/s"] if record.samples_per_s else []
    usage = [f"waited for data {record.data_wait:.0%}", f"{record.cores_used:.1f} of {record.cores} cores"]
    usage += [f"GPU busy {record.gpu_busy:.0%}"] if record.gpu_busy is not None else []
    usage.append(f"peak memory {size(record.peak_memory_bytes)}")
    lines = [
        f"{record.steps:,} steps in {duration(record.seconds)}{ranks}: {', '.join(speed)}",
        ", ".join(usage),
        f"limited by: {record.limited_by}",
        *(_compiled(record.compiled) if record.compiled is not None else ()),
    ]
    if record.next_command:
        lines.append(f"next: flatout {record.next_command} {one_line(shell(record.command), 120)}")
    return lines


def _compiled(record: CompileRecord) -> list[str]:
    """What compiling cost, what the cache saved, and the first reason why code was split or compiled again."""
    text = f"compiling took {duration(record.ms / 1000)}"
    if record.cached and record.saved_ms:
        source = (
            "compiled code"
            if not record.uncached
            else f"{record.cached} of {record.cached + record.uncached} compiled passes"
        )
        text = f"{source} came from the cache: {duration(record.ms / 1000)} instead of {duration((record.ms + record.saved_ms) / 1000)}"
    if not record.breaks and not record.recompiles:
        return [text]
    counts = f"{plural(record.breaks, 'graph break')}, {plural(record.recompiles, 'recompilation')}"
    return [text, one_line(f"{counts}, first: {record.reasons[0]}", 2 * TEXT_WIDTH - 4)]
