"""Two queues that wait for each other: the computation of a device, and the communication of its links.

Pure; standard library only. Each queue runs its tasks one after another. A task starts once the given number
of tasks of the other queue have ended. While the links communicate, computation runs at ``1 - contention`` of
its speed. A contention of 1 means that the device itself moves the bytes, 0 that other hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    ms: float
    after: int = 0  # number of tasks of the other queue that must have ended
    contention: float = 0.0  # only for tasks of the links


class Queue:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.ended = 0
        self.left_ms = self.tasks[0].ms if self.tasks else 0.0

    @property
    def done(self) -> bool:
        return self.ended == len(self.tasks)

    def ready(self, other: Queue) -> bool:
        return not self.done and other.ended >= self.tasks[self.ended].after

    def advance(self, ms: float) -> None:
        """Advance the current task by ``ms``, at most what is left of it. Then the next task starts."""
        self.left_ms -= ms
        if self.left_ms <= 0:
            self.ended += 1
            self.left_ms = 0.0 if self.done else self.tasks[self.ended].ms


def finish_ms(compute: Sequence[Task], wire: Sequence[Task]) -> float:
    """Return the time at which both queues have ended. Raises ValueError if they deadlock."""
    device, link = Queue(compute), Queue(wire)
    now_ms = 0.0
    while not (device.done and link.done):
        computing, communicating = device.ready(link), link.ready(device)
        if not computing and not communicating:
            raise ValueError("the two queues wait for each other")
        speed = 1.0 - link.tasks[link.ended].contention if communicating else 1.0
        if not communicating or (computing and device.left_ms <= link.left_ms * speed):
            elapsed_ms = device.left_ms / speed if device.left_ms else 0.0
            if communicating:
                link.left_ms = max(link.left_ms - elapsed_ms, 0.0)
            device.advance(device.left_ms)
        else:
            elapsed_ms = link.left_ms
            if computing:
                device.left_ms -= elapsed_ms * speed
            link.advance(link.left_ms)
        now_ms += elapsed_ms
    return now_ms
