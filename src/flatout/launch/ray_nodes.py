"""Run one task at a time on each node of a Ray cluster, with the whole node to itself, for measurements.

A task is a flatout program that reads one text (JSON) and writes another; only text is sent. Uses only Ray's
public API.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.job.temporary import remove
from flatout.launch.ray_cluster import TAIL_BYTES, RayJob, Runner, connect
from flatout.schema.errors import FlatoutError

THREADS = "OMP_NUM_THREADS"  # Ray sets it in its workers if it is unset


class NodeLost(Exception):
    """A worker or its node exited before the task was done."""


class RayNodes:
    """The nodes of a cluster.

    ``names`` maps each node to its host, with a number if a host has several nodes."""

    def __init__(self, address: str) -> None:
        """Raises UsageError if there is no Ray or no cluster."""
        self._ray = connect(address)
        self._begun: list[Any] = []
        self.names: dict[str, str] = {}
        hosts: dict[str, int] = {}
        for node in self._alive():
            host = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            hosts[host] = hosts.get(host, 0) + 1
            self.names[node["NodeID"]] = host if hosts[host] == 1 else f"{host}, node {hosts[host]}"

    def _alive(self) -> list[dict[str, Any]]:
        return sorted(
            (node for node in self._ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
        )

    def still_there(self, node: str) -> bool:
        return any(each["NodeID"] == node for each in self._alive())

    def begin(self, node: str, module: str, text: str, environment: Mapping[str, str]) -> Any:
        """Start ``python -m module`` on a node, with a file for the text and one for the answer.

        Return a handle."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        has: Mapping[str, float] = next(
            (each["Resources"] for each in self._alive() if each["NodeID"] == node), {}
        )
        whole = {"num_cpus": has.get("CPU", 0), "num_gpus": has.get("GPU", 0), "max_retries": 0}
        task = self._ray.remote(**whole)(_on_this_node).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        begun = task.remote(("-m", module), os.getcwd(), dict(environment), text)
        self._begun.append(begun)
        return begun

    def ended(self, begun: Sequence[Any], within_s: float) -> list[Any]:
        """Return the tasks that have ended, waiting at most ``within_s``."""
        found: list[Any] = self._ray.wait(list(begun), num_returns=1, timeout=within_s)[0]
        return found

    def answer(self, begun: object) -> str:
        """Return the answer of a task. Raises NodeLost, or FlatoutError with the error of a failed task."""
        self._begun.remove(begun)
        try:
            code, text, said = self._ray.get(begun)
        except FlatoutError as error:
            raise getattr(error, "cause", error) from None
        except self._ray.exceptions.RayError as error:
            raise NodeLost((str(error).strip().splitlines() or [type(error).__name__])[0][:200]) from None
        if code or not text:
            raise FlatoutError((said.strip().splitlines() or [f"it exited with code {code}"])[-1][:300])
        return str(text)

    def give_up(self, begun: object) -> None:
        """Cancel a task."""
        if begun in self._begun:
            self._begun.remove(begun)
        self._ray.cancel(begun, force=True)

    def close(self) -> None:
        for begun in list(self._begun):
            self.give_up(begun)


def _on_this_node(
    argv: Sequence[str], folder: str, environment: Mapping[str, str], text: str
) -> tuple[int, str, str]:
    """Run a task in a Ray worker. Return its exit code, its answer and the end of its output."""
    os.environ.pop(THREADS, None)
    runner = Runner()
    try:
        order, answer = runner.home / "order.json", runner.home / "answer.json"
        order.write_text(text, encoding="utf-8")
        # -P: the current folder may contain a torch.py or click.py of the user.
        runner.start(RayJob((sys.executable, "-P", *argv, str(order), str(answer)), folder, environment), {})
        code = runner.wait()
        said = runner.output(0)[-TAIL_BYTES:].decode(errors="replace")
        return code, answer.read_text(encoding="utf-8") if answer.is_file() else "", said
    finally:
        remove(runner.home)
