"""The nodes of a job hear of each other, so that none waits for one that is gone.

A collective whose peer is cut off waits for its group's timeout (half an hour with gloo): no packet says that a link was cut or a machine lost its power.
Each agent therefore leaves a beat in the rendezvous's store every few seconds. The agent that serves it reads them all, and ends its own ranks where
a node of the round has fallen silent; the ranks of the others lose their peers, and all agents begin a new round or end. An agent that cannot
reach the rendezvous ends: it may wait inside a store operation, where torch hears of nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flatout.launch.nodes import Endpoint
from flatout.launch.rendezvous import ANSWER_S, Rounds, answer

LOST_S = 30.0  # of silence: six times the cut of five seconds that a training must survive
DONE = "done"
KEY = "flatout/beat/"


class Beats(threading.Thread):
    """Beats at ``store`` as ``name``, until `finish`.

    ``serving``: this node serves the store, and tells ``gone`` of a node (once a round) that has fallen silent.
    Else ``cut_off`` is called when ``at`` has not answered for LOST_S.
    """

    def __init__(self, store: Any, rounds: Rounds, at: Endpoint, serving: bool, gone: Callable[[str], None], cut_off: Callable[[], None]) -> None:
        super().__init__(name="flatout-beats", daemon=True)
        self._store, self.rounds, self._at, self._serving = store, rounds, at, serving
        self._gone, self._cut_off = gone, cut_off
        self._over = threading.Event()
        self._heard: dict[str, tuple[str, float]] = {}  # by node: its last beat, and for how long it has been that
        self._told: set[tuple[int, str]] = set()

    def run(self) -> None:
        number, silent_s = 0, 0.0
        while not self._over.is_set():
            number += 1
            heard = "yes"
            if self._serving:
                self._listen()
            else:
                heard = self._beat(number)
                silent_s = 0.0 if heard == "yes" else silent_s + ANSWER_S
                if silent_s >= LOST_S:
                    return self._cut_off()
            if heard != "silence":  # which has taken as long already
                self._over.wait(ANSWER_S)
        return None

    def _beat(self, number: int) -> str:
        heard = answer(self._at, ANSWER_S)  # asked of a connection of its own: one that is open hears of a cut after a quarter of an hour
        if heard == "yes":
            try:
                self._store.set(f"{KEY}{self.rounds.name}", str(number))
            except RuntimeError:  # torch's DistError: the connection is broken
                return "no"
        return heard

    def _listen(self) -> None:
        for name in self.rounds.others:
            beat = self._last(name)
            before, since_s = self._heard.get(name, (beat, -ANSWER_S))
            self._heard[name] = beat, (since_s + ANSWER_S if beat == before and beat != DONE else 0.0)
            if self._heard[name][1] >= LOST_S and (self.rounds.number, name) not in self._told:
                self._told.add((self.rounds.number, name))
                self._gone(name)

    def _last(self, name: str) -> str:
        key = f"{KEY}{name}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    @property
    def ended_round(self) -> bool:
        """Whether the round that runs, or has just ended, has lost a node."""
        return any(number == self.rounds.number for number, _ in self._told)

    def finish(self) -> None:
        """Say that this node is done with all its ranks; the one that serves waits for the others first, because its store is theirs, too."""
        if self._serving:
            while any(self._last(name) != DONE and self._heard.get(name, ("", 0.0))[1] < LOST_S for name in self.rounds.others):
                self._over.wait(0.2)
        self._over.set()
        if not self._serving:
            try:
                self._store.set(f"{KEY}{self.rounds.name}", DONE)
            except RuntimeError:
                pass
