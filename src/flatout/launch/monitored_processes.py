"""The processes of a supervised program: their heartbeats, their stalls, and what a stalled process does.

A program hangs when all of its training processes stall for longer than their limits (`launch.stall_limits`).
Ranks wait for each other, so one rank that works clears the others. Before that, each process is asked three
times for its stack; processes that compile, import or compute without steps get more time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from flatout.job.heartbeat import (
    IMPORTED,
    LOADING,
    OPENING,
    PHASE,
    STEPS,
    TRAINING,
)
from flatout.launch.process_stacks import (
    IS_STOPPED,
    MEETS_RANKS,
    state_of,
)
from flatout.launch.process_table import ASK_AT, MonitoredProcess, ProcessEvent, ProcessTable, works_elsewhere
from flatout.launch.stall_limits import (
    AT_WORK,
    FLOORS_S,
    LOOK_S,
)

EARLY_S = 2 * LOOK_S  # a stall starts up to one poll before it is seen, and is judged at a poll
STOPPED = 0.8  # of the shortest stall that counts as a hang: a stopped process is continued then
AGAIN_S = 10.0  # until a process that compiles or computes without steps is inspected again


class ProgramProcesses(ProcessTable):
    """The processes of one start of the program, whose heartbeat pages are in ``folder``."""

    # -- what is known ---------------------------------------------------------------------------------------

    # -- looking ---------------------------------------------------------------------------------------------

    def look(self, now: float) -> list[ProcessEvent]:
        """Poll the processes, and return the events to handle. Call it every LOOK_S."""
        if now - self._looked > 8 * LOOK_S:  # the supervisor was stopped, or the machine slept
            self._pass_over(now, now - self._looked)
        self._looked = now
        self._find(now)
        observed = False
        for process in self.living:
            page = process.page
            if process.silence.observe(now, page.signs, page[STEPS], page[PHASE]):
                process.looks.clear()
                observed |= bool(page[STEPS])
        if observed:
            self._rounds = 0
        return [*self._stopped(now), *self._hung(now)]

    def held(self, now: float) -> None:
        """Record that everything was stopped for a while on purpose."""
        self._pass_over(now, now - self._looked)
        self._looked = now

    def _stopped(self, now: float) -> list[ProcessEvent]:
        found = []
        for process in self.living:
            state = state_of(process.pid)
            if state is None or state.letter in "ZX":
                self._gone.add(process.pid)
            elif state.letter != IS_STOPPED:
                process.stopped_at = None
            elif process.stopped_at is None:
                process.stopped_at = now
            elif now - process.stopped_at >= STOPPED * (self.floor_s or FLOORS_S[TRAINING]):
                silent_s, process.stopped_at = now - process.stopped_at, None
                os.kill(process.pid, signal.SIGCONT)
                for other in self.all.values():
                    other.silence.pass_over(max(0.0, now - other.silence.since))
                owner, number = self._owner_of(process.pid)
                title = (
                    f"loader worker {number} (process {process.pid}) of {owner.title}"
                    if owner is not None
                    else process.title
                )
                step = owner.page[STEPS] if owner is not None else process.page[STEPS]
                found.append(
                    ProcessEvent(
                        "stopped",
                        f"{title} was stopped (SIGSTOP) for {silent_s:.0f} s; it was continued",
                        process.pid,
                        process.page.rank,
                        step,
                        silent_s,
                    )
                )
        return found

    def _hung(self, now: float) -> list[ProcessEvent]:
        train = [process for process in self.living if process.page[STEPS]]
        group = train or [process for process in self.living if process.page[PHASE] >= IMPORTED]
        if not group:
            return []
        self._answers(now)
        for process in group:
            self._label(process, now)
        left_s = max(self._limit_s(process) - process.silence.lasts_s(now) for process in group)
        share = min(process.silence.lasts_s(now) / self._limit_s(process) for process in group)
        again = [
            process
            for process in group
            if process.silence.doing is not None and now - process.looks[-1].at >= AGAIN_S
        ]
        if self._rounds < len(ASK_AT) and share >= ASK_AT[self._rounds]:
            self._rounds += 1
            self._ask(
                [*group, *(each for process in group for each in self._workers_of(process).values())], now
            )
            return []
        if again:
            self._ask(again, now)
            return []
        if left_s > EARLY_S or self._rounds < len(ASK_AT):
            return []
        for process in group:
            if works_elsewhere(process):
                process.silence.doing = AT_WORK
                return []
        return [self._named(group, now)]

    # -- naming ----------------------------------------------------------------------------------------------

    def _named(self, group: Sequence[MonitoredProcess], now: float) -> ProcessEvent:
        guilty = _waited_for(group)
        for process in guilty:
            if process.page[PHASE] in (LOADING, OPENING) and (found := self._guilty_workers(process)):
                number, worker = found[0]
                more = f" (and {len(found) - 1} more workers)" if len(found) > 1 else ""
                return self._event(
                    process,
                    worker,
                    f"loader worker {number} (process {worker.pid}) of {process.title}{more} has returned no batch",
                    now,
                )
        first = guilty[0]
        others = len(group) - len(guilty)
        title = (
            " and ".join(process.title for process in guilty)
            if len(guilty) <= 4
            else f"{len(guilty)} processes, including {first.title},"
        )
        verb = "have" if len(guilty) > 1 else "has"
        waiting = f"; {others} other{'s wait' if others > 1 else ' waits'} for it" if others else ""
        what = (
            f"{title} {verb} finished no step"
            if first.page[STEPS]
            else f"{title} {verb} not reached a first step"
        )
        return self._event(first, first, what, now, waiting)


def _waited_for(group: Sequence[MonitoredProcess]) -> list[MonitoredProcess]:
    """Return the processes that the others wait for.

    Those are the stopped ones, else those furthest behind, else those not in a collective."""
    if len(group) == 1:
        return list(group)
    states = {process.pid: state_of(process.pid) for process in group}
    stopped = [
        process
        for process in group
        if (state := states[process.pid]) is not None and state.letter == IS_STOPPED
    ]
    if stopped:
        return stopped
    least = min(process.done for process in group)
    behind = [process for process in group if process.done == least]
    if len(behind) < len(group):
        return behind
    apart = [process for process in group if process.stack is None or not process.stack.passes(MEETS_RANKS)]
    return apart if 0 < len(apart) < len(group) else list(group)
