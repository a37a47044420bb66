"""What runs beside the steps: loader workers, and the device's computing, copies and communication.

Phases follow one another, so their shares add up. The work here overlaps with them and with itself. It gets
a bar of its own each, on the scale of the step, below the phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from flatout.render.formatting import drawable, milliseconds, several
from flatout.render.svg import chart, element, percent, title
from flatout.render.terminal import pairs, text
from flatout.schema.profile import ProfileRecord

ROW = 40  # pixels


@dataclass(frozen=True)
class ParallelWork:
    """Work beside the steps. ``ms`` is the mean time a step in which it runs."""

    name: str
    ms: float
    said: str

    @property
    def sentence(self) -> str:
        return f"{self.name}: {milliseconds(self.ms)} a step" + (f"; {self.said}" if self.said else "")


def parallel_work(profile: ProfileRecord) -> list[ParallelWork]:
    """What runs beside the steps; empty if there are neither workers nor a device with its own time."""
    found = []
    for loader in profile.loaders:
        if loader.workers and loader.fetch_ms and drawable(loader.fetch_ms):
            each = loader.fetch_ms / loader.workers
            hidden = max(0.0, each - loader.wait_ms)
            said = f"a batch takes {milliseconds(loader.fetch_ms)}; {milliseconds(loader.wait_ms)} waited for, {milliseconds(hidden)} hidden"
            found.append(ParallelWork(several(loader.workers, "loader worker"), each, said))
    device = {kind: ms for kind, ms in profile.device_ms.items() if ms > 0 and drawable(ms)}
    together = _overlap_ms(profile, sum(device.values()))
    for kind, ms in device.items():
        said = f"{milliseconds(together)} on the device overlap" if together and kind == "computing" else ""
        found.append(ParallelWork(f"device, {kind}", ms, said))
    return found


def parallel_table(profile: ProfileRecord) -> RenderableType | None:
    """Return a row for each of them, for the terminal."""
    rows = [
        (work.name, text(work.sentence.removeprefix(f"{work.name}: "))) for work in parallel_work(profile)
    ]
    return (
        Group(Text("beside the step, overlapping with its phases", style="dim"), pairs(rows))
        if rows
        else None
    )


def parallel_chart(profile: ProfileRecord) -> Markup | None:
    """Return a bar for each of them, on the scale of the mean step. None if nothing runs beside the steps."""
    step, work = profile.mean_step_ms, parallel_work(profile)
    if not step or not work:
        return None
    shapes = [shape for row, each in enumerate(work) for shape in _bar(each, step, ROW * row)]
    return chart("Beside the step: " + ". ".join(each.sentence for each in work), ROW * len(work), shapes)


def _bar(work: ParallelWork, step_ms: float, top: int) -> Iterator[Markup]:
    width = min(1.0, work.ms / step_ms)
    yield element("text", work.sentence, x=0, y=top + 13, class_="label")
    tip = title(f"{work.sentence}, {work.ms / step_ms:.0%} of the step")
    yield element("rect", x="0%", y=top + 19, width="100%", height=14, class_="parallel-step")
    yield element("rect", tip, x="0%", y=top + 19, width=percent(width), height=14, class_="parallel-work")


def _overlap_ms(profile: ProfileRecord, total_ms: float) -> float:
    """How much of the device's work runs at the same time as other work of the device."""
    if profile.idle_ms is None or not profile.step_ms:
        return 0.0
    return max(0.0, total_ms - (profile.step_ms - profile.idle_ms))
