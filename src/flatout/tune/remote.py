"""Runs the comparisons of a search on a Ray cluster: one at a time per node, each on one node.

A node gets an order, JSON in and out, and has nothing else to do meanwhile:

    describe    describe this machine                                  {"key"}
    measure     start these programs together and interleave them      {"results": that of each}

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
from flatout.tune.comparison import ProgramRequest, ProgramResult, measure_together
from flatout.tune.interleaver import Interleaver
from flatout.tune.plan_files import differences, plan_key

THREADS = "OMP_NUM_THREADS"  # Ray sets it in its workers if it is unset
DESCRIBE_S = 120.0  # for a node to describe its machine, including the start of Ray's worker
TIMEOUT_S = 120.0  # beyond the planned duration of a comparison
MAX_TRIES = 2
POLL_S = 0.5
TIMER_FIELDS = (
    "tick_ms",
    "unit",
    "prefetched_ticks",
    "longest_ticks",
)  # of an interleaver, sent with an order


@dataclass(frozen=True)
class RemoteResult:
    """A comparison on ``host``; if it could not run, ``answer`` is None and ``why`` is the reason."""

    number: int
    answer: dict[str, Any] | None
    host: str
    why: str = ""

    @property
    def results(self) -> list[ProgramResult]:
        return [ProgramResult.from_json(data) for data in (self.answer or {}).get("results", ())]


@dataclass(frozen=True)
class _Task:
    """An order under way on a node. ``tries`` are left if the node is lost."""

    number: int
    tries: int
    node: str
    until_s: float


class RemoteNodes:
    """The nodes of a cluster that measure; ``excluded`` has a sentence for each other node."""

    def __init__(self, address: str, command: Command, facts: Facts) -> None:
        """Check every node.

        Raises UsageError without Ray, without a cluster there, or if no node is like this machine."""
        self._ray = connect(address)
        self._tasks: dict[Any, _Task] = {}
        self._threads = os.environ.get(THREADS)
        hosts: dict[str, str] = {}
        for node in self._alive_nodes():
            host = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            same_host = sum(other.startswith(host) for other in hosts.values())
            hosts[node["NodeID"]] = f"{host}, node {same_host + 1}" if same_host else host
        self._hosts, self.nodes = hosts, list(hosts)
        self.excluded: list[str] = []
        key, typed = plan_key(command, facts), list(command.typed)
        orders = [{"kind": "describe", "typed": typed}] * len(self.nodes)
        for reply in self.run_orders(orders, DESCRIBE_S, each_node=True):
            differing = [reply.why] if reply.answer is None else differences(reply.answer["key"], key)
            if differing:
                self._leave_out(reply.host, "; ".join(differing))
        if not self.nodes:
            raise UsageError(
                f"no node of the cluster matches this machine, which runs the plain program: {'; '.join(self.excluded) or 'there are no nodes'}. "
                "Start the search on one of the nodes, or remove --ray."
            )

    @property
    def hosts(self) -> list[str]:
        return [self._hosts[node] for node in self.nodes]

    def _alive_nodes(self) -> list[dict[str, Any]]:
        return sorted(
            (node for node in self._ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
        )

    def run_orders(
        self, orders: Sequence[dict[str, Any]], longest_s: float, each_node: bool = False
    ) -> Iterator[RemoteResult]:
        """Run the orders, one on each node at a time, and yield each result.

        ``each_node``: only the n-th node runs the n-th.
        """
        waiting = deque((number, MAX_TRIES) for number in range(len(orders)))
        free = list(self.nodes)
        while waiting or self._tasks:
            while waiting and free:
                (number, tries), node = waiting.popleft(), free.pop(0)
                task = self._begin(node, json.dumps(orders[number]))
                self._tasks[task] = _Task(number, tries - 1, node, seconds() + longest_s)
            if not self._tasks:
                for number, _ in waiting:
                    yield RemoteResult(number, None, "", "no node is left to measure it")
                return
            ended = self._ray.wait(list(self._tasks), num_returns=1, timeout=POLL_S)[0]
            unended = [(task, running) for task, running in self._tasks.items() if task not in ended]
            overdue = [task for task, running in unended if seconds() > running.until_s]
            for task in (*ended, *overdue):
                running = self._tasks.pop(task)
                host, lost = self._hosts[running.node], ""
                try:
                    if task in overdue:
                        self._ray.cancel(task, force=True)
                        lost = f"no answer within {longest_s:.0f} s"
                    else:
                        yield RemoteResult(running.number, json.loads(self._ray.get(task)), host)
                except FlatoutError as error:
                    why = first_line(getattr(error, "cause", error))  # Ray's error has the class of its cause
                    yield RemoteResult(running.number, None, host, why.rstrip("."))
                except self._ray.exceptions.RayError as error:
                    lost = first_line(error)[:200]
                if lost:
                    alive = [node["NodeID"] for node in self._alive_nodes()]
                    if running.tries and not each_node:
                        waiting.append((running.number, running.tries))
                    else:
                        why = f"the node that measured it was lost ({lost})"
                        yield RemoteResult(running.number, None, host, why)
                    if task in overdue or running.node not in alive:
                        self._leave_out(host, f"lost: {lost}")
                        continue
                free.append(running.node)

    def _begin(self, node: str, order: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources: dict[str, float] = next(
            (entry["Resources"] for entry in self._alive_nodes() if entry["NodeID"] == node), {}
        )
        task = self._ray.remote(
            num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), max_retries=0
        )(carry_out)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return task.options(scheduling_strategy=strategy).remote(order, os.getcwd(), self._threads)

    def _leave_out(self, host: str, why: str) -> None:
        self.excluded.append(f"{host}: {why}")
        self.nodes = [node for node in self.nodes if self._hosts[node] != host]

    def close(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks.clear()


def carry_out(text: str, folder: str, threads: str | None) -> str:
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
    if order["kind"] == "describe":
        return json.dumps({"key": plan_key(command, facts)})
    with temporary_folder("remote") as job:
        interleaver = Interleaver(command, JobFolder(job).make(), facts)
        vars(interleaver).update(order["timer"])
        requests = [ProgramRequest.from_json(request) for request in order["requests"]]
        ratio = order["max_startup_ratio"]
        max_ratio = math.inf if ratio is None else ratio
        try:
            until_s = seconds() + order["seconds"]
            results = measure_together(
                interleaver, requests, until_s, order["timeout_s"], max_startup_ratio=max_ratio
            )
            return json.dumps({"results": [result.to_json() for result in results]})
        finally:
            interleaver.close()
