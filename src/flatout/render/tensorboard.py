"""Write a profile as a TensorBoard log: step times, memory over a step, phases, what-ifs, operators.

Requires the package tensorboard, but not torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.render.formatting import figure, milliseconds, one_line
from flatout.schema.profile import ProfileRecord

OPERATIONS = 40


def write_log(profile: ProfileRecord, folder: Path) -> None:
    """Write one event file into ``folder``.

    Raises ImportError without tensorboard, and OSError if the folder cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(folder))
    try:
        for step, summary in (
            *_scalars(profile),
            *((0, _text(tag, words)) for tag, words in _texts(profile)),
        ):
            writer.add_event(Event(step=step, summary=summary))
    finally:
        writer.close()


def _scalars(profile: ProfileRecord) -> Iterator[tuple[int, Any]]:
    """Yield (step, summary) for each point. For memory, step is microseconds since the step began."""
    for step, ms in enumerate(profile.step_ms_list):
        yield step, _scalar("step_ms", ms)
    for name, phase in profile.phases.items():
        yield 0, _scalar(f"phases/{name}_ms", phase.median_ms)
    for what_if in profile.what_ifs:
        if what_if.ratio is not None:
            yield 0, _scalar(f"what_ifs/{what_if.name}", what_if.ratio.median)
    for point in profile.memory.timeline if profile.memory is not None else ():
        for kind, size in point.kinds.items():
            yield round(1000 * point.ms), _scalar(f"memory/{kind}_bytes", size)
    for step, after in enumerate(profile.leak.series if profile.leak is not None else ()):
        yield step, _scalar("memory/after_each_step_bytes", after)


def _texts(profile: ProfileRecord) -> Iterator[tuple[str, str]]:
    if profile.bound:
        yield "bound", f"{profile.bound}: {profile.bound_why}"
    if profile.operations:
        rows = [
            (
                o.name,
                figure(100 * o.share),
                figure(o.calls),
                milliseconds(o.host_ms),
                o.place.sentence() if o.place else "",
            )
            for o in profile.operations[:OPERATIONS]
        ]
        yield "operators", _table(("operator", "% of time", "calls", "host", "line"), rows)
    if profile.synchronisations:
        yield (
            "synchronisations",
            _table(
                ("synchronisation", "calls", "cost", "line"),
                [
                    (c.kind, figure(c.calls), milliseconds(c.ms), c.place.sentence() if c.place else "")
                    for c in profile.synchronisations
                ],
            ),
        )
    if profile.findings:
        yield "findings", "\n".join(f"* **{f.rule}** {one_line(f.said)}" for f in profile.findings)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(one_line(cell).replace("|", "/") for cell in line) + " |" for line in lines
    )


def _scalar(tag: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])


def _text(tag: str, words: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[words.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=kind, tensor=tensor)])
