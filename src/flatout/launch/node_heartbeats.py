"""Heartbeats between the nodes of a job, so that no node waits for a dead one.

A collective with an unreachable peer waits for its group's timeout (half an hour with gloo): no packet
reports that a link was cut or a machine lost its power. So each agent writes a heartbeat to the rendezvous's
store every few seconds. The agent that serves the store reads them all. It ends its own ranks if a node of
the round sends no heartbeat; the ranks of the other nodes lose their peers, and all agents begin a new round
or exit. An agent that cannot reach the rendezvous exits: it may wait inside a store operation, where torch
notices nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flatout.launch.nodes import Endpoint
from flatout.launch.rendezvous import ANSWER_S, RoundRendezvous, answer

LOST_S = 30.0  # without a heartbeat: six times the 5 s cut that a training must survive
DONE = "done"
KEY = "flatout/beat/"


class HeartbeatMonitor(threading.Thread):
    """A thread that writes heartbeats to ``store`` until `finish`.

    ``serving``: this node serves the store, and calls ``gone`` (once a round) for a node without heartbeats.
    Otherwise it calls ``cut_off`` when ``at`` has not answered for LOST_S.
    """

    def __init__(
        self,
        store: Any,
        rounds: RoundRendezvous,
        at: Endpoint,
        serving: bool,
        gone: Callable[[str], None],
        cut_off: Callable[[], None],
    ) -> None:
        super().__init__(name="flatout-beats", daemon=True)
        self._store, self.rounds, self._at, self._serving = store, rounds, at, serving
        self._gone, self._cut_off = gone, cut_off
        self._over = threading.Event()
        self._observed: dict[
            str, tuple[str, float]
        ] = {}  # per node: its last heartbeat, and the time since it changed
        self._info: set[tuple[int, str]] = set()

    def run(self) -> None:
        number, silent_s = 0, 0.0
        while not self._over.is_set():
            number += 1
            observed = "yes"
            if self._serving:
                self._listen()
            else:
                observed = self._beat(number)
                silent_s = 0.0 if observed == "yes" else silent_s + ANSWER_S
                if silent_s >= LOST_S:
                    return self._cut_off()
            if observed != "silence":  # that answer has already taken ANSWER_S
                self._over.wait(ANSWER_S)
        return None

    def _beat(self, number: int) -> str:
        observed = answer(
            self._at, ANSWER_S
        )  # on a new connection: an open one notices a cut only after 15 minutes
        if observed == "yes":
            try:
                self._store.set(f"{KEY}{self.rounds.name}", str(number))
            except RuntimeError:  # torch's DistError: the connection is broken
                return "no"
        return observed

    def _listen(self) -> None:
        for name in self.rounds.others:
            beat = self._last(name)
            before, since_s = self._observed.get(name, (beat, -ANSWER_S))
            self._observed[name] = beat, (since_s + ANSWER_S if beat == before and beat != DONE else 0.0)
            if self._observed[name][1] >= LOST_S and (self.rounds.number, name) not in self._info:
                self._info.add((self.rounds.number, name))
                self._gone(name)

    def _last(self, name: str) -> str:
        key = f"{KEY}{name}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    @property
    def ended_round(self) -> bool:
        """Whether the current round, or the one that just ended, has lost a node."""
        return any(number == self.rounds.number for number, _ in self._info)

    def finish(self) -> None:
        """Report that all ranks of this node are done.

        The serving node first waits for the others: they use its store."""
        if self._serving:
            while any(
                self._last(name) != DONE and self._observed.get(name, ("", 0.0))[1] < LOST_S
                for name in self.rounds.others
            ):
                self._over.wait(0.2)
        self._over.set()
        if not self._serving:
            try:
                self._store.set(f"{KEY}{self.rounds.name}", DONE)
            except RuntimeError:
                pass
