"""Write a profile as a TensorBoard log: step times, memory over a step, phases, what-ifs.

Requires the package tensorboard, but not torch.
"""

from collections.abc import Iterator
from pathlib import Path

from flatout.schema.profile import ProfileRecord


def write_log(profile: ProfileRecord, folder: Path) -> None:
    """Write one event file into ``folder``.

    Raises ImportError without tensorboard, and OSError if the folder cannot be written."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(folder))
    try:
        for step, tag, value in _scalars(profile):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.add_event(Event(step=step, summary=summary))
    finally:
        writer.close()


def _scalars(profile: ProfileRecord) -> Iterator[tuple[int, str, float]]:
    """Yield step, tag and value of each point. For memory, step is microseconds since the step began."""
    for step, ms in enumerate(profile.step_ms_list):
        yield step, "step_ms", ms
    for name, phase in profile.phases.items():
        yield 0, f"phases/{name}_ms", phase.median_ms
    for what_if in profile.what_ifs:
        if what_if.ratio is not None:
            yield 0, f"what_ifs/{what_if.name}", what_if.ratio.median
    for point in profile.memory.timeline if profile.memory is not None else ():
        for kind, amount in point.kinds.items():
            yield round(1000 * point.ms), f"memory/{kind}_bytes", amount
    for step, leaked in enumerate(profile.tensor_growth.series if profile.tensor_growth is not None else ()):
        yield step, "memory/after_each_step_bytes", leaked
