"""Cost of collectives from the latency and bandwidth of links. Pure; standard library only.

The formulas are those of NCCL's choice of an algorithm (src/graph/tuning.cc) and of the Hockney model: a hop
costs its latency, a byte the inverse of the bandwidth. With n devices in m nodes of k each, and S bytes:

    ring          2 (n - 1) hops, 2 (n - 1) / n S bytes over the narrowest place: the link of a device, or all
                  cards of a node together
    tree          2 (k - 1 + log2 m) hops, 2 S bytes at 0.9 of the bandwidth; only with several nodes
    hierarchical  reduce-scatter in the node, all-reduce of each k-th of S between nodes, all-gather in a node
    reduce-scatter, all-gather: half a ring

With any algorithm, a device sends 2 (n - 1) / n S bytes for an all-reduce, and half of that for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flatout.schema.scale import Link

TREE_SHARE = 0.9  # of the bandwidth: "busBw*.9" in NCCL's src/graph/tuning.cc, commit 01afd20


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of one collective.

    ``latency_ms`` is the part that bandwidth does not affect. ``link`` is the link with the limiting
    bandwidth. ``busy_ms`` is the computation lost to it, at most ``ms``.
    """

    ms: float = 0.0
    latency_ms: float = 0.0
    wire_bytes: float = 0.0
    algorithm: str = "nothing"
    link: str = ""
    busy_ms: float = 0.0

    @property
    def contention(self) -> float:
        return min(1.0, self.busy_ms / self.ms) if self.ms > 0 else 0.0

    def plus(self, other: CollectiveCost) -> CollectiveCost:
        limiting = self if self.ms - self.latency_ms >= other.ms - other.latency_ms else other
        algorithms = list(
            dict.fromkeys(
                name for cost in (self, other) if cost.ms > 0 for name in cost.algorithm.split(", ")
            )
        )
        return CollectiveCost(
            self.ms + other.ms,
            self.latency_ms + other.latency_ms,
            self.wire_bytes + other.wire_bytes,
            ", ".join(algorithms) or "nothing",
            limiting.link,
            self.busy_ms + other.busy_ms,
        )

    def times(self, factor: float) -> CollectiveCost:
        return replace(
            self,
            ms=self.ms * factor,
            latency_ms=self.latency_ms * factor,
            wire_bytes=self.wire_bytes * factor,
            busy_ms=self.busy_ms * factor,
        )


@dataclass(frozen=True)
class Fabric:
    """The links inside a node and between nodes. Without the former each device is a node."""

    inter_node: Link
    intra_node: Link | None = None
    devices_per_node: int = 1

    def shape(self, devices: int) -> tuple[int, int]:
        """Return devices per node, and nodes."""
        if self.inter_node.is_intra_node:  # one machine, however many devices
            return devices, 1
        per_node = min(self.devices_per_node if self.intra_node is not None else 1, devices)
        return per_node, math.ceil(devices / per_node)

    @property
    def device_link(self) -> Link:
        """The first link of a device."""
        return self.inter_node if self.intra_node is None else self.intra_node

    def node_bytes_per_s(self, per_node: int) -> float:
        """The bandwidth of all cards of a node together."""
        return self.inter_node.bandwidth_bytes_per_s * (self.inter_node.nics_per_node or per_node)

    def in_node(self) -> Fabric:
        """The fabric restricted to one node."""
        return Fabric(replace(self.device_link, is_intra_node=True))

    def across(self, per_node: int) -> Fabric:
        """The fabric between devices at the same position of each node.

        All other positions communicate at the same time.
        """
        return Fabric(
            replace(
                self.inter_node,
                bandwidth_bytes_per_s=self.node_bytes_per_s(per_node) / per_node,
                nics_per_node=0,
            )
        )


def all_reduce(fabric: Fabric, devices: int, size_bytes: float) -> CollectiveCost:
    """The cost of the fastest of ring, tree and hierarchical, as NCCL chooses."""
    if devices < 2:
        return CollectiveCost()
    per_node, nodes = fabric.shape(devices)
    costs = [_ring(fabric, devices, size_bytes, rounds=2, algorithm="ring")]
    if nodes > 1:
        costs.append(_tree(fabric, devices, size_bytes))
    if nodes > 1 and per_node > 1 and nodes * per_node == devices:
        costs.append(hierarchical(fabric, devices, size_bytes))
    return min(costs, key=lambda cost: cost.ms)


def reduce_scatter(fabric: Fabric, devices: int, size_bytes: float) -> CollectiveCost:
    """The cost of a reduce-scatter.

    ``size_bytes`` is the whole tensor, of which each device keeps its part.
    """
    return _ring(fabric, devices, size_bytes, rounds=1, algorithm="reduce-scatter")


def all_gather(fabric: Fabric, devices: int, size_bytes: float) -> CollectiveCost:
    """The cost of an all-gather. ``size_bytes`` is the whole tensor."""
    return _ring(fabric, devices, size_bytes, rounds=1, algorithm="all-gather")


def hierarchical(fabric: Fabric, devices: int, size_bytes: float) -> CollectiveCost:
    """The cost of an all-reduce in three steps. All nodes have the same number of devices."""
    per_node, nodes = fabric.shape(devices)
    first = reduce_scatter(fabric.in_node(), per_node, size_bytes)
    middle = _ring(fabric.across(per_node), nodes, size_bytes / per_node, rounds=2, algorithm="ring")
    last = all_gather(fabric.in_node(), per_node, size_bytes)
    return replace(first.plus(middle).plus(last), algorithm="hierarchical")


def _bottleneck(fabric: Fabric, devices: int) -> tuple[float, Link]:
    """The bandwidth in bytes per second of a ring through all devices, and its limiting link."""
    per_node, nodes = fabric.shape(devices)
    if nodes == 1:
        return fabric.device_link.bandwidth_bytes_per_s, fabric.device_link
    node_bandwidth = fabric.node_bytes_per_s(per_node)
    if per_node > 1 and fabric.device_link.bandwidth_bytes_per_s < node_bandwidth:
        return fabric.device_link.bandwidth_bytes_per_s, fabric.device_link
    return node_bandwidth, fabric.inter_node


def _ring(fabric: Fabric, devices: int, size_bytes: float, rounds: int, algorithm: str) -> CollectiveCost:
    if devices < 2:
        return CollectiveCost()
    per_node, nodes = fabric.shape(devices)
    inter_hops = rounds * (nodes - 1) if per_node > 1 else rounds * (devices - 1)
    intra_hops = rounds * (devices - 1) - inter_hops
    hops_us = inter_hops * fabric.inter_node.latency_us + intra_hops * fabric.device_link.latency_us
    wire_bytes = rounds * (devices - 1) / devices * size_bytes
    return _cost(fabric, devices, hops_us, wire_bytes, wire_bytes, algorithm)


def _tree(fabric: Fabric, devices: int, size_bytes: float) -> CollectiveCost:
    per_node, nodes = fabric.shape(devices)
    inter_us = math.ceil(math.log2(nodes)) * fabric.inter_node.latency_us
    hops_us = 2 * ((per_node - 1) * fabric.device_link.latency_us + inter_us)
    wire_bytes = 2 * (devices - 1) / devices * size_bytes
    return _cost(fabric, devices, hops_us, wire_bytes, 2 * size_bytes / TREE_SHARE, "tree")


def _cost(
    fabric: Fabric, devices: int, hops_us: float, wire_bytes: float, bottleneck_bytes: float, algorithm: str
) -> CollectiveCost:
    per_node, nodes = fabric.shape(devices)
    start_us = fabric.inter_node.start_us if nodes > 1 else fabric.device_link.start_us
    latency_ms = (start_us + hops_us) / 1e3
    bandwidth, link = _bottleneck(fabric, devices)
    bytes_ms = 1e3 * bottleneck_bytes / bandwidth
    # A byte occupies its device as long as the nearest link needs for it, even if later links are slower.
    nearest = fabric.inter_node if per_node == 1 else fabric.device_link
    busy_ms = nearest.contention * min(bytes_ms, 1e3 * wire_bytes / nearest.bandwidth_bytes_per_s)
    return CollectiveCost(latency_ms + bytes_ms, latency_ms, wire_bytes, algorithm, link.name, busy_ms)
