"""Runs the comparisons of a search on a Ray cluster: one at a time per node, each on one node.

A node gets an order, JSON in and out, and has nothing else to do meanwhile:

    look        describe this machine                                  {"key"}
    together    start these programs together and interleave them      {"seen": the result of each}

Only nodes like the machine of the search take part. If a node is lost, its comparison moves to another node
once. After that it ends with a reason, and the search continues with its other results.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.job.folder import JobFolder
from flatout.job.temporary import temporary_folder
from flatout.launch.command import Command, parse_command
from flatout.launch.ray_cluster import connect
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.errors import FlatoutError, UsageError, first_line
from flatout.schema.facts import Facts
from flatout.tune.comparison import ProgramRequest, measure_together
from flatout.tune.interleaver import Interleaver
from flatout.tune.plan_files import differences, key_of

THREADS = "OMP_NUM_THREADS"  # Ray sets it in its workers if it is unset
LOOK_S = 120.0  # for a node to describe its machine, including the start of Ray's worker
TIMEOUT_S = 120.0  # beyond the planned duration of a comparison
TRIES = 2
POLL_S = 0.5


@dataclass(frozen=True)
class RemoteResult:
    """A comparison on ``host``; if it could not run, ``answer`` is None and ``why`` is the reason."""

    number: int
    answer: dict[str, Any] | None
    host: str
    why: str = ""


@dataclass(frozen=True)
class _Task:
    """An order under way on a node. ``tries`` are left if the node is lost."""

    number: int
    tries: int
    node: str
    until_s: float


class RemoteNodes:
    """The nodes of a cluster that measure; ``left_out`` has a sentence for each node that is not used."""

    def __init__(self, address: str, command: Command, facts: Facts) -> None:
        """Check every node.

        Raises UsageError without Ray, without a cluster there, or if no node is like this machine."""
        self._ray = connect(address)
        self._tasks: dict[Any, _Task] = {}
        self._threads = os.environ.get(THREADS)
        hosts: dict[str, str] = {}
        for node in self._living():
            host = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            same = sum(other.startswith(host) for other in hosts.values())
            hosts[node["NodeID"]] = f"{host}, node {same + 1}" if same else host
        self._hosts, self.ready = hosts, list(hosts)
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
        return [self._hosts[node] for node in self.ready]

    def _living(self) -> list[dict[str, Any]]:
        return sorted(
            (node for node in self._ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
        )

    def held(
        self, orders: Sequence[dict[str, Any]], longest_s: float, each_node: bool = False
    ) -> Iterator[RemoteResult]:
        """Run the orders, one on each node at a time, and yield each result.

        ``each_node``: only the n-th node runs the n-th.
        """
        waiting = deque((number, TRIES) for number in range(len(orders)))
        free = list(self.ready)
        while waiting or self._tasks:
            while waiting and free:
                (number, tries), node = waiting.popleft(), free.pop(0)
                task = self._begin(node, json.dumps(orders[number]))
                self._tasks[task] = _Task(number, tries - 1, node, seconds() + longest_s)
            if not self._tasks:
                yield from (
                    RemoteResult(number, None, "", "no node is left to measure it") for number, _ in waiting
                )
                return
            ended = self._ray.wait(list(self._tasks), num_returns=1, timeout=POLL_S)[0]
            late = [task for task, at in self._tasks.items() if task not in ended and seconds() > at.until_s]
            for task in (*ended, *late):
                at = self._tasks.pop(task)
                host, lost = self._hosts[at.node], ""
                try:
                    if task in late:
                        self._ray.cancel(task, force=True)
                        lost = f"no answer within {longest_s:.0f} s"
                    else:
                        yield RemoteResult(at.number, json.loads(self._ray.get(task)), host)
                except FlatoutError as error:
                    why = first_line(getattr(error, "cause", error))  # Ray's error has the class of its cause
                    yield RemoteResult(at.number, None, host, why.rstrip("."))
                except self._ray.exceptions.RayError as error:
                    lost = first_line(error)[:200]
                if lost:
                    there = task not in late and any(node["NodeID"] == at.node for node in self._living())
                    if at.tries and not each_node:
                        waiting.append((at.number, at.tries))
                    else:
                        yield RemoteResult(
                            at.number, None, host, f"the node that measured it was lost ({lost})"
                        )
                    if not there:
                        self._leave_out(host, f"lost: {lost}")
                        continue
                free.append(at.node)

    def _begin(self, node: str, order: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        has: dict[str, float] = next(
            (entry["Resources"] for entry in self._living() if entry["NodeID"] == node), {}
        )
        whole = {"num_cpus": has.get("CPU", 0), "num_gpus": has.get("GPU", 0), "max_retries": 0}
        task = self._ray.remote(**whole)(hold).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        return task.remote(order, os.getcwd(), self._threads)

    def _leave_out(self, host: str, why: str) -> None:
        self.left_out.append(f"{host}: {why}")
        self.ready = [node for node in self.ready if self._hosts[node] != host]

    def close(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks.clear()


def hold(text: str, folder: str, threads: str | None) -> str:
    """Carry out an order in a Ray worker. Raises FlatoutError if the program or its script is not on this node."""
    os.environ.pop(THREADS, None)
    os.environ.update({THREADS: threads} if threads is not None else {})
    try:
        os.chdir(folder)
    except OSError:
        raise UsageError(
            f"the folder {folder} is not on this node. Put the program on a file system that all nodes share."
        ) from None
    order = json.loads(text)
    command, facts = parse_command(order["typed"]), look()
    if order["kind"] == "look":
        return json.dumps({"key": key_of(command, facts)})
    with temporary_folder("remote") as job:
        interleaver = Interleaver(command, JobFolder(job).make(), facts)
        interleaver.tick_ms, interleaver.unit = order["tick_ms"], order["unit"]
        interleaver.prefetched_ticks = order["prefetched_ticks"]
        interleaver.longest_ticks = order["longest_ticks"]
        asked = [ProgramRequest.from_json(one) for one in order["asked"]]
        share = math.inf if order["share"] is None else order["share"]
        try:
            seen = measure_together(
                interleaver, asked, seconds() + order["seconds"], order["timeout_s"], share=share
            )
            return json.dumps({"seen": [result.to_json() for result in seen]})
        finally:
            interleaver.close()
