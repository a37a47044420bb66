"""The contests of a search on other machines, at once: each node holds one at a time, and what is compared never leaves its node.

Only nodes that are like the machine of the search take part. A contest whose node is lost is given to another one, once; then it ends in a sentence, and
the search goes on with what it has.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.launch.command import Command
from flatout.launch.ray_nodes import THREADS, NodeLost, RayNodes
from flatout.measure.clock import seconds
from flatout.plan.errors import FlatoutError, UsageError
from flatout.plan.facts import Facts
from flatout.tune.session import differences, key_of

MODULE = "flatout.cli.contest"
LOOK_S = 120.0  # for a node to say what machine it is, Ray's worker included
PATIENCE_S = 120.0  # beyond what a contest was to take
TRIES = 2
POLL_S = 0.5
TORN = "the node that measured it was lost"


@dataclass(frozen=True)
class Held:
    """A contest that was held on ``host``, or could not be (``answer`` is None then, and ``why`` a sentence)."""

    number: int
    answer: dict[str, Any] | None
    host: str
    why: str = ""


class Elsewhere:
    """``left_out`` has a sentence for each node that takes no part."""

    def __init__(self, nodes: RayNodes, command: Command, facts: Facts) -> None:
        """Raises UsageError where no node is like this machine."""
        self._nodes = nodes
        self._environment = {THREADS: os.environ[THREADS]} if THREADS in os.environ else {}
        self.ready = list(nodes.names)
        self.left_out: list[str] = []
        key, typed = key_of(command, facts), list(command.typed)
        for held in self.held([{"kind": "look", "typed": typed}] * len(self.ready), LOOK_S, each_node=True):
            strange = [held.why] if held.answer is None else differences(held.answer["key"], key)
            if strange:
                self._leave_out(held.host, "; ".join(strange))
        if not self.ready:
            raise UsageError(f"no node of the cluster is like this machine, where the plain program is observed: {'; '.join(self.left_out) or 'it has none'}. "
                             "Start the search on one of the nodes, or leave --ray away.")

    @property
    def hosts(self) -> list[str]:
        return [self._nodes.names[node] for node in self.ready]

    def held(self, orders: Sequence[dict[str, Any]], longest_s: float, each_node: bool = False) -> Iterator[Held]:
        """Hold them, one on each node at a time; as each ends, how. ``each_node``: the n-th on the n-th node, and nowhere else."""
        waiting = deque((number, TRIES) for number in range(len(orders)))
        running: dict[Any, tuple[int, int, str, float]] = {}
        free = list(self.ready)
        while waiting or running:
            while waiting and free:
                (number, tries), node = waiting.popleft(), free.pop(0)
                begun = self._nodes.begin(node, MODULE, json.dumps(orders[number]), self._environment)
                running[begun] = number, tries - 1, node, seconds() + longest_s
            if not running:
                yield from (Held(number, None, "", "no node is left to measure it") for number, _ in waiting)
                return
            ended = self._nodes.ended(list(running), POLL_S)
            late = [begun for begun, (*_, until_s) in running.items() if begun not in ended and seconds() > until_s]
            for begun in (*ended, *late):
                number, tries, node, _ = running.pop(begun)
                host = self._nodes.names[node]
                try:
                    if begun in late:
                        self._nodes.give_up(begun)
                        raise NodeLost(f"it was not heard of within {longest_s:.0f} s")
                    yield Held(number, json.loads(self._nodes.answer(begun)), host)
                except FlatoutError as error:
                    yield Held(number, None, host, str(error).rstrip("."))
                except NodeLost as lost:
                    there = begun not in late and self._nodes.still_there(node)
                    if not there:
                        self._leave_out(host, f"lost: {lost}")
                    if tries and not each_node:
                        waiting.append((number, tries))
                    else:
                        yield Held(number, None, host, f"{TORN} ({lost})")
                    if not there:
                        continue
                free.append(node)

    def _leave_out(self, host: str, why: str) -> None:
        self.left_out.append(f"{host}: {why}")
        self.ready = [node for node in self.ready if self._nodes.names[node] != host]

    def close(self) -> None:
        self._nodes.close()


def on_ray(address: str, command: Command, facts: Facts) -> Elsewhere:
    """Raises UsageError where there is no Ray, no cluster at this address, or no node like this machine."""
    return Elsewhere(RayNodes(address), command, facts)
