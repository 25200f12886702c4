"""Which device drives which worker of which replica, and what messages and all-reduces then find.

Three arrangements of W replicas of D workers on nodes, devices counted node by node:

* pipeline-inside: a replica's workers side by side; messages stay inside a node as far as they can, gradients
  are summed between nodes (WPipe, section 4.2.2, case A).
* replicas-inside: the replicas of one worker side by side: the reverse (WPipe's case B).
* copies-inside: all copies of a stage side by side, both directions and all replicas (MixPipe, Figure 5 b):

      D=4, W=2, two servers of 4     server 0: P0 P0 P3 P3     server 1: P1 P1 P2 P2

Invariant: every device drives one worker of one replica. Which arrangement is best is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.ir import SkipLink
from counterflow.schedule.placement import Placement

from .cluster import Cluster, Collective, all_reduce


class Arrangement(StrEnum):
    """What stands side by side on a node."""

    PIPELINE_INSIDE = "pipeline-inside"
    REPLICAS_INSIDE = "replicas-inside"
    COPIES_INSIDE = "copies-inside"


def devices(placement: Placement, replicas: int, arrangement: Arrangement) -> tuple[tuple[int, ...], ...]:
    """``devices[replica][worker]``: the device, counted from 0 node by node.

    >>> from counterflow.schedule.placement import bidirectional
    >>> devices(bidirectional(4), 2, Arrangement.COPIES_INSIDE)
    ((0, 4, 6, 2), (1, 5, 7, 3))
    """
    return tuple(map(tuple, _devices(placement, replicas, arrangement).tolist()))


def mesh(
    placement: Placement, replicas: int, arrangement: Arrangement, positions: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``mesh[replica][worker][position]``: the device; positions of tensor parallelism are side by side.

    >>> from counterflow.schedule.placement import bidirectional
    >>> mesh(bidirectional(2), 1, Arrangement.PIPELINE_INSIDE, 2)
    (((0, 1), (2, 3)),)
    """
    beside = range(positions)
    return tuple(
        tuple(tuple(positions * place + other for other in beside) for place in replica)
        for replica in devices(placement, replicas, arrangement)
    )


def _devices(placement: Placement, replicas: int, arrangement: Arrangement) -> NDArray[np.int64]:
    workers = placement.workers
    if arrangement is Arrangement.PIPELINE_INSIDE:
        return np.arange(replicas * workers).reshape(replicas, workers)
    place = np.arange(workers)
    if arrangement is Arrangement.COPIES_INSIDE:
        place[[worker for group in _sharing(placement) for worker in group]] = np.arange(workers)
    return place * replicas + np.arange(replicas)[:, np.newaxis]


def _sharing(placement: Placement) -> list[list[int]]:
    """The workers in groups that hold copies of the same stages, by their first worker."""
    group: dict[int, list[int]] = {w: [w] for w in range(placement.workers)}
    for stage in range(placement.stages):
        holders = [worker for _, worker in placement.copies(stage)]
        for other in holders[1:]:
            first, second = group[holders[0]], group[other]
            if first is not second:
                first += second
                group.update((worker, first) for worker in second)
    found = {id(members): sorted(members) for members in group.values()}
    return sorted(found.values())


@dataclass(frozen=True, slots=True)
class Network:
    """What a schedule's messages and gradient syncs find, in the worst of the replicas.

    Attributes:
        latency_seconds: α of a message, ``[sender][receiver]``; 0 where no message is sent.
        seconds_per_byte: β in the same form.
        ways: by which way out of its worker each message goes, likewise; None: each link is a way of its own.
        allreduce: of each stage.
        crossed: of each stage, the nodes whose one way out its all-reduce shares with others; empty if none.
        copies: how many copies of each stage are summed.
    """

    latency_seconds: tuple[tuple[float, ...], ...]
    seconds_per_byte: tuple[tuple[float, ...], ...]
    ways: tuple[tuple[int, ...], ...] | None
    allreduce: tuple[Collective, ...]
    crossed: tuple[tuple[int, ...], ...]
    copies: int


def network(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    skips: Sequence[SkipLink] = (),
) -> Network:
    """The links of one arrangement.

    Replicas and pipes run in step: with ``shared_adapter``, messages between the same stages that several of
    them send out of a node at one time share its way out. What a worker sends to several others on other
    nodes leaves it one after another. All-reduces share a node's way out with those under way at that time.
    Messages and all-reduces do not share; nor do messages of different stages on different workers.

    Args:
        cluster: with ``placement.workers * replicas`` devices or more.
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: which devices they are on.
        skips: what goes from stages to others than the next.
    """
    node = _devices(placement, replicas, arrangement) // cluster.devices
    workers = placement.workers
    latency, per_byte = np.zeros((workers, workers)), np.zeros((workers, workers))
    ways = np.tile(np.arange(workers), (workers, 1))
    for alike in _messages(placement, skips):
        crossing = [node[node[:, sender] != node[:, receiver], sender] for sender, receiver in alike]
        leaving = np.concatenate(crossing)
        share = int(np.bincount(leaving).max()) if len(leaving) and cluster.shared_adapter else 1
        for (sender, receiver), crossed in zip(alike, crossing, strict=True):
            link = cluster.between if len(crossed) else cluster.inside
            latency[sender, receiver] = link.latency_seconds
            each = link.seconds_per_byte * (share if len(crossed) else 1)
            per_byte[sender, receiver] = max(per_byte[sender, receiver], each)
            if len(crossed):
                ways[sender, receiver] = sender
    several = any(np.count_nonzero(row == sender) > 2 for sender, row in enumerate(ways))
    sums, crossed_nodes = [], []
    for stage in range(placement.stages):
        on = node[:, sorted({w for _, w in placement.copies(stage)})].ravel()
        nodes, counts = np.unique(on, return_counts=True)
        sums.append(all_reduce(cluster, counts.tolist()))
        crossed_nodes.append(tuple(nodes.tolist()) if sums[-1].crossing_seconds_per_byte else ())
    # Only a way that several all-reduces take is shared.
    taken = Counter(way for crossed in crossed_nodes for way in crossed)
    return Network(
        tuple(map(tuple, latency.tolist())),
        tuple(map(tuple, per_byte.tolist())),
        tuple(map(tuple, ways.tolist())) if several else None,
        tuple(sums),
        tuple(tuple(way for way in crossed if taken[way] > 1) for crossed in crossed_nodes),
        placement.pipes * replicas,
    )


def sum_over(
    cluster: Cluster, placement: Placement, replicas: int, arrangement: Arrangement, stages: Sequence[int]
) -> Collective:
    """The all-reduce among all who hold one of some stages."""
    node = _devices(placement, replicas, arrangement) // cluster.devices
    members = sorted({w for stage in stages for _, w in placement.copies(stage)})
    _, counts = np.unique(node[:, members].ravel(), return_counts=True)
    return all_reduce(cluster, counts.tolist())


def _messages(placement: Placement, skips: Sequence[SkipLink]) -> Iterator[list[tuple[int, int]]]:
    """The (sender, receiver) pairs of messages, forwards and backwards; those of all pipes that are between
    the same stages, and so are sent at one time, together.
    """
    pairs = [(stage, stage + 1) for stage in range(placement.stages - 1)]
    pairs += [(skip.source, skip.target) for skip in skips]
    for source, target in pairs:
        there = [(pipe[source], pipe[target]) for pipe in placement.pipes_stages]
        there = [(one, other) for one, other in there if one != other]
        if there:
            yield there
            yield [(other, one) for one, other in there]
