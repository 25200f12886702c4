"""Placement of workers and replicas on devices, and the costs of messages and all-reduces that follow.

Three arrangements of W replicas of D workers on nodes, devices counted node by node, in the cluster's order
of nodes or another (``node_orders.py``):

* pipeline-inside: a replica's workers are adjacent; messages stay inside a node as far as possible, gradients
are summed between nodes (WPipe, section 4.2.2, case A). * replicas-inside: the replicas of one worker are
adjacent: the reverse (WPipe's case B). * copies-inside: all copies of a stage are adjacent, both directions
and all replicas (MixPipe, Figure 5 b):

      D=4, W=2, two servers of 4     server 0: P0 P0 P3 P3     server 1: P1 P1 P2 P2

Invariant: every device drives one worker of one replica. Which arrangement is best is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from counterflow.schedule.ir import SkipLink
from counterflow.schedule.placement import Placement
from counterflow.simulation.shared_cores import SharedCores

from ..inputs.cluster import Broadcasts, Cluster, Collective, Link, Node, all_reduce, broadcasts, slowest
from ..search.node_orders import Ints, Runs, devices_in_row, node_of_devices


class Arrangement(StrEnum):
    """The workers that are adjacent on a node."""

    PIPELINE_INSIDE = "pipeline-inside"
    REPLICAS_INSIDE = "replicas-inside"
    COPIES_INSIDE = "copies-inside"


def devices(
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    cluster: Cluster | None = None,
    nodes: Runs = (),
) -> tuple[tuple[int, ...], ...]:
    """``devices[replica][worker]``: the device, counted from 0 node by node in the cluster's order.

    Args:
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: the workers that are adjacent.
        cluster: the cluster; required with ``nodes``.
        nodes: the order of the nodes.

    >>> from counterflow.schedule.placement import bidirectional
    >>> devices(bidirectional(4), 2, Arrangement.COPIES_INSIDE)
    ((0, 4, 6, 2), (1, 5, 7, 3))
    """
    return tuple(map(tuple, _devices(placement, replicas, arrangement, cluster, nodes).tolist()))


def _devices(
    placement: Placement, replicas: int, arrangement: Arrangement, cluster: Cluster | None, nodes: Runs
) -> Ints:
    row = _places(placement, replicas, arrangement)
    return devices_in_row(cluster, nodes)[row] if cluster is not None and nodes else row


def mesh(
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    positions: int,
    *,
    cluster: Cluster | None = None,
    nodes: Runs = (),
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``mesh[replica][worker][position]``: the device; positions of a worker are adjacent.

    Args:
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: the workers that are adjacent.
        positions: P; ``cluster`` has one place for each P devices.
        cluster: the cluster; required with ``nodes``.
        nodes: the order of the nodes.

    >>> from counterflow.schedule.placement import bidirectional
    >>> mesh(bidirectional(2), 1, Arrangement.PIPELINE_INSIDE, 2)
    (((0, 1), (2, 3)),)
    """
    offsets = range(positions)
    return tuple(
        tuple(tuple(positions * place + offset for offset in offsets) for place in replica)
        for replica in devices(placement, replicas, arrangement, cluster, nodes)
    )


def _nodes(
    cluster: Cluster, placement: Placement, replicas: int, arrangement: Arrangement, nodes: Runs
) -> Ints:
    """``[replica][worker]``: the node, counted from 0 in the cluster's order."""
    places = _places(placement, replicas, arrangement)
    if not cluster.kinds:
        return places // cluster.devices
    return node_of_devices(cluster)[devices_in_row(cluster, nodes)][places]


def _places(placement: Placement, replicas: int, arrangement: Arrangement) -> Ints:
    """``[replica][worker]``: the place in the row of devices."""
    workers = placement.workers
    if arrangement is Arrangement.PIPELINE_INSIDE:
        return np.arange(replicas * workers).reshape(replicas, workers)
    place = np.arange(workers)
    if arrangement is Arrangement.COPIES_INSIDE:
        place[[worker for group in _workers_by_stages(placement) for worker in group]] = np.arange(workers)
    return place * replicas + np.arange(replicas)[:, np.newaxis]


def _workers_by_stages(placement: Placement) -> list[list[int]]:
    group: dict[int, list[int]] = {w: [w] for w in range(placement.workers)}
    for stage in range(placement.stages):
        holders = [worker for _, worker in placement.copies(stage)]
        for holder in holders[1:]:
            first, second = group[holders[0]], group[holder]
            if first is not second:
                first += second
                group.update((worker, first) for worker in second)
    groups = {id(members): sorted(members) for members in group.values()}
    return sorted(groups.values())


@dataclass(frozen=True, slots=True)
class Network:
    """Costs of a schedule's messages and gradient syncs, in the worst of the replicas.

    Attributes:
        latency_seconds: α of a message, ``[sender][receiver]``; 0 if no message is sent.
        seconds_per_byte: β in the same form.
        ways: the way by which each message leaves its worker, in the same form; None: each link is a way of
            its own.
        allreduce: all-reduce of each stage.
        crossed: for each stage, the nodes whose single way out its all-reduce shares with others; empty if
            none.
        copies: number of copies of each stage that are summed, at all positions.
        broadcasts: broadcasts of each stage's weights from one holder to all others.
        slowness: factor by which each worker's ops are slower than in the profile, on the slowest of its
            devices over all replicas; empty if all devices are alike.
        usable_bytes: memory of each worker on the smallest of these devices, without the reserve; empty if
            all are alike.
    """

    latency_seconds: tuple[tuple[float, ...], ...]
    seconds_per_byte: tuple[tuple[float, ...], ...]
    ways: tuple[tuple[int, ...], ...] | None
    allreduce: tuple[Collective, ...]
    crossed: tuple[tuple[int, ...], ...]
    copies: int
    broadcasts: tuple[Broadcasts, ...] = ()
    slowness: tuple[float, ...] = ()
    usable_bytes: tuple[float, ...] = ()


def network(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    skips: Sequence[SkipLink] = (),
    *,
    nodes: Runs = (),
    summed: int = 1,
) -> Network:
    """The links of one arrangement and, if devices differ, the device of each worker.

    Replicas and pipes run in step: with ``shared_adapter``, messages between the same stages that several of
    them send out of a node at one time share its way out. Messages of a worker to several others on other
    nodes leave it one after another. All-reduces share a node's way out with those in flight at that time.
    Messages and all-reduces do not share; nor do messages of different stages on different workers.

    Args:
        cluster: a cluster with ``placement.workers * replicas`` devices or more.
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: which devices they are on.
        skips: the skip connections.
        nodes: the order of the nodes.
        summed: positions of each worker that sum gradients.
    """
    node = _nodes(cluster, placement, replicas, arrangement, nodes)
    table = _NodeTable(cluster)
    workers = placement.workers
    latency, per_byte = np.zeros((workers, workers)), np.zeros((workers, workers))
    ways = np.tile(np.arange(workers), (workers, 1))
    for simultaneous in _messages(placement, skips):
        crossing = [node[node[:, sender] != node[:, receiver], sender] for sender, receiver in simultaneous]
        leaving = np.concatenate(crossing)
        share = int(np.bincount(leaving).max()) if len(leaving) and cluster.shared_adapter else 1
        for (sender, receiver), crossed in zip(simultaneous, crossing, strict=True):
            link = table.link(node[:, sender], node[:, receiver])
            latency[sender, receiver] = link.latency_seconds
            seconds_per_byte = link.seconds_per_byte * (share if len(crossed) else 1)
            per_byte[sender, receiver] = max(per_byte[sender, receiver], seconds_per_byte)
            if len(crossed):
                ways[sender, receiver] = sender
    several = any(np.count_nonzero(row == sender) > 2 for sender, row in enumerate(ways))
    sums, sends, crossed_nodes = [], [], []
    for stage in range(placement.stages):
        on = node[:, sorted({w for _, w in placement.copies(stage)})].ravel()
        having, counts = np.unique(on, return_counts=True)
        node_counts = counts.tolist(), table.nodes(having)
        sums.append(all_reduce(cluster, *node_counts))
        sends.append(broadcasts(cluster, *node_counts))
        crossed_nodes.append(tuple(having.tolist()) if sums[-1].crossing_seconds_per_byte else ())
    # Only a way that several all-reduces use is shared.
    users = Counter(way for crossed in crossed_nodes for way in crossed)
    return Network(
        tuple(map(tuple, latency.tolist())),
        tuple(map(tuple, per_byte.tolist())),
        tuple(map(tuple, ways.tolist())) if several else None,
        tuple(sums),
        tuple(tuple(way for way in crossed if users[way] > 1) for crossed in crossed_nodes),
        placement.pipes * replicas * summed,
        tuple(sends),
        *table.workers(node),
    )


def sum_over(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    stages: Sequence[int],
    *,
    nodes: Runs = (),
) -> Collective:
    """The all-reduce among all holders of one of some stages."""
    node = _nodes(cluster, placement, replicas, arrangement, nodes)
    members = sorted({w for stage in stages for _, w in placement.copies(stage)})
    having, counts = np.unique(node[:, members].ravel(), return_counts=True)
    return all_reduce(cluster, counts.tolist(), _NodeTable(cluster).nodes(having))


def shared_cores(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    positions: int,
    *,
    nodes: Runs = (),
) -> SharedCores:
    """The nodes of the workers, and their processor cores.

    Args:
        cluster: a cluster whose devices are workers on cores.
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: which devices they are on.
        positions: devices of each worker, which are on its node.
        nodes: the order of the nodes.
    """
    node = _nodes(cluster, placement, replicas, arrangement, nodes)
    cores = [kind.cores or 0 for kind, count in cluster.kinds_of_nodes() for _ in range(count)]
    threads = np.zeros((placement.workers, len(cores)), dtype=np.int64)
    for replica in node:
        threads[np.arange(placement.workers), replica] += positions
    return SharedCores(tuple(node[0].tolist()), tuple(cores), tuple(map(tuple, threads.tolist())))


@dataclass(frozen=True, slots=True)
class Holding:
    """Ranks that hold the same stages, on all replicas.

    Attributes:
        ranks: the ranks, ascending.
        nodes: nodes that contain any of them.
        sends: cost of broadcasts among them.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    sends: Broadcasts


def holding(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    workers: Sequence[int],
    *,
    nodes: Runs = (),
) -> Holding:
    """The nodes of some workers of each replica, and the cost of broadcasts among all of them."""
    place = placement, replicas, arrangement
    ranks = np.sort(_devices(*place, cluster, nodes)[:, list(workers)].ravel())
    node = _nodes(cluster, *place, nodes)[:, list(workers)].ravel()
    having, counts = np.unique(node, return_counts=True)
    sends = broadcasts(cluster, counts.tolist(), _NodeTable(cluster).nodes(having))
    return Holding(tuple(ranks.tolist()), tuple(having.tolist()), sends)


class _NodeTable:
    def __init__(self, cluster: Cluster) -> None:
        self._kinds = [node for node, _ in cluster.kinds_of_nodes()]
        self._equal = not cluster.kinds
        self._kind = np.repeat(np.arange(len(self._kinds)), [many for _, many in cluster.kinds_of_nodes()])

    def nodes(self, numbers: Ints) -> list[Node]:
        """The distinct nodes among these numbers."""
        if self._equal:
            return self._kinds
        return [self._kinds[kind] for kind in np.unique(self._kind[numbers])]

    def link(self, sender: Ints, receiver: Ints) -> Link:
        """The slowest link of a message, by replica; if a message of some replica leaves its node, only among
        those.
        """
        away = sender != receiver
        if not away.any():
            return slowest(node.inside for node in self.nodes(sender))
        return slowest(node.between for node in self.nodes(np.concatenate((sender[away], receiver[away]))))

    def workers(self, node: Ints) -> tuple[Any, ...]:
        """Slowness and usable bytes of each worker; ``node`` is the node of each worker by replica."""
        if self._equal:
            return (), ()
        kind = self._kind[node]
        slowness = np.array([node_kind.slowness for node_kind in self._kinds])[kind].max(axis=0)
        usable = np.array([node_kind.usable_bytes for node_kind in self._kinds])[kind].min(axis=0)
        return tuple(slowness.tolist()), tuple(usable.tolist())


def _messages(placement: Placement, skips: Sequence[SkipLink]) -> Iterator[list[tuple[int, int]]]:
    """The (sender, receiver) pairs of messages, forwards and backwards; those of all pipes between the same
    stages, which are sent at the same time, together.
    """
    pairs = [(stage, stage + 1) for stage in range(placement.stages - 1)]
    pairs += [(skip.source, skip.target) for skip in skips]
    for source, target in pairs:
        messages = [(pipe[source], pipe[target]) for pipe in placement.pipes_stages]
        messages = [(sender, receiver) for sender, receiver in messages if sender != receiver]
        if messages:
            yield messages
            yield [(receiver, sender) for sender, receiver in messages]
