"""Runs the comparisons of a search on remote machines: one at a time per node, each on one node.

Only nodes like the machine of the search take part. If a node is lost, its comparison moves to another node
once. After that it ends with a reason, and the search continues with its other results.
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
from flatout.schema.errors import FlatoutError, UsageError
from flatout.schema.facts import Facts
from flatout.tune.plan_files import differences, key_of

MODULE = "flatout.tune.remote_comparison"
LOOK_S = 120.0  # for a node to describe its machine, including the start of Ray's worker
TIMEOUT_S = 120.0  # beyond the planned duration of a comparison
TRIES = 2
POLL_S = 0.5
TORN = "the node that measured it was lost"


@dataclass(frozen=True)
class RemoteResult:
    """A comparison on ``host``; if it could not run, ``answer`` is None and ``why`` is the reason."""

    number: int
    answer: dict[str, Any] | None
    host: str
    why: str = ""


class RemoteNodes:
    """The remote nodes of a search; ``left_out`` has a sentence for each node that is not used."""

    def __init__(self, nodes: RayNodes, command: Command, facts: Facts) -> None:
        """Check every node. Raises UsageError if no node is like this machine."""
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
            raise UsageError(
                f"no node of the cluster matches this machine, which runs the plain program: {'; '.join(self.left_out) or 'there are no nodes'}. "
                "Start the search on one of the nodes, or remove --ray."
            )

    @property
    def hosts(self) -> list[str]:
        return [self._nodes.names[node] for node in self.ready]

    def held(
        self, orders: Sequence[dict[str, Any]], longest_s: float, each_node: bool = False
    ) -> Iterator[RemoteResult]:
        """Run the orders, one on each node at a time, and yield each result.

        ``each_node``: only the n-th node runs the n-th.
        """
        waiting = deque((number, TRIES) for number in range(len(orders)))
        running: dict[Any, tuple[int, int, str, float]] = {}
        free = list(self.ready)
        while waiting or running:
            while waiting and free:
                (number, tries), node = waiting.popleft(), free.pop(0)
                begun = self._nodes.begin(node, MODULE, json.dumps(orders[number]), self._environment)
                running[begun] = number, tries - 1, node, seconds() + longest_s
            if not running:
                yield from (
                    RemoteResult(number, None, "", "no node is left to measure it") for number, _ in waiting
                )
                return
            ended = self._nodes.ended(list(running), POLL_S)
            late = [
                begun
                for begun, (*_, until_s) in running.items()
                if begun not in ended and seconds() > until_s
            ]
            for begun in (*ended, *late):
                number, tries, node, _ = running.pop(begun)
                host = self._nodes.names[node]
                try:
                    if begun in late:
                        self._nodes.give_up(begun)
                        raise NodeLost(f"no answer within {longest_s:.0f} s")
                    yield RemoteResult(number, json.loads(self._nodes.answer(begun)), host)
                except FlatoutError as error:
                    yield RemoteResult(number, None, host, str(error).rstrip("."))
                except NodeLost as lost:
                    there = begun not in late and self._nodes.still_there(node)
                    if not there:
                        self._leave_out(host, f"lost: {lost}")
                    if tries and not each_node:
                        waiting.append((number, tries))
                    else:
                        yield RemoteResult(number, None, host, f"{TORN} ({lost})")
                    if not there:
                        continue
                free.append(node)

    def _leave_out(self, host: str, why: str) -> None:
        self.left_out.append(f"{host}: {why}")
        self.ready = [node for node in self.ready if self._nodes.names[node] != host]

    def close(self) -> None:
        self._nodes.close()


def on_ray(address: str, command: Command, facts: Facts) -> RemoteNodes:
    """Connect to the cluster.

    Raises UsageError without Ray, without a cluster there, or without a matching node.
    """
    return RemoteNodes(RayNodes(address), command, facts)
