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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.ir import SkipLink
from counterflow.schedule.placement import Placement

from .cluster import Cluster, Link


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
    workers = placement.workers
    if arrangement is Arrangement.PIPELINE_INSIDE:
        return tuple(tuple(range(r * workers, (r + 1) * workers)) for r in range(replicas))
    order = list(range(workers))
    if arrangement is Arrangement.COPIES_INSIDE:
        order = [worker for group in _sharing(placement) for worker in group]
    place = {worker: index for index, worker in enumerate(order)}
    return tuple(tuple(place[w] * replicas + r for w in range(workers)) for r in range(replicas))


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
        allreduce: the link of each stage's all-reduce.
        copies: how many copies of each stage are summed.
    """

    latency_seconds: tuple[tuple[float, ...], ...]
    seconds_per_byte: tuple[tuple[float, ...], ...]
    allreduce: tuple[Link, ...]
    copies: int


def network(
    cluster: Cluster,
    placement: Placement,
    replicas: int,
    arrangement: Arrangement,
    skips: Sequence[SkipLink] = (),
) -> Network:
    """The links of one arrangement.

    Replicas run in step: with ``shared_adapter``, messages that several of them send out of a node at one
    time share its way out. All-reduces of different stages are taken to meet there too.

    Args:
        cluster: with ``placement.workers * replicas`` devices or more.
        placement: which worker holds which stage.
        replicas: copies of the whole pipeline group.
        arrangement: which devices they are on.
        skips: what goes from stages to others than the next.
    """
    node = np.array(devices(placement, replicas, arrangement)) // cluster.devices
    workers = placement.workers
    latency, per_byte = np.zeros((workers, workers)), np.zeros((workers, workers))
    for sender, receiver in _messages(placement, skips):
        crossing = node[:, sender] != node[:, receiver]
        link = cluster.between if crossing.any() else cluster.inside
        share = int(np.bincount(node[crossing, sender]).max()) if crossing.any() else 1
        latency[sender, receiver] = link.latency_seconds
        per_byte[sender, receiver] = link.seconds_per_byte * (share if cluster.shared_adapter else 1)
    holders = [sorted({w for _, w in placement.copies(s)}) for s in range(placement.stages)]
    lowest, highest = node.min(axis=0), node.max(axis=0)
    spans = [bool(lowest[on].min() != highest[on].max()) for on in holders]
    sharing = _crossing_devices(node, holders, spans) if cluster.shared_adapter else 1
    return Network(
        tuple(map(tuple, latency.tolist())),
        tuple(map(tuple, per_byte.tolist())),
        tuple(_shared(cluster.allreduce_link(spans_nodes=s), sharing if s else 1) for s in spans),
        placement.pipes * replicas,
    )


def _messages(placement: Placement, skips: Sequence[SkipLink]) -> Iterator[tuple[int, int]]:
    """The (sender, receiver) pairs of a schedule's messages, forwards and backwards, each once."""
    seen = set()
    for pipe in placement.pipes_stages:
        for one, other in (*pairwise(pipe), *((pipe[skip.source], pipe[skip.target]) for skip in skips)):
            if one != other:
                seen |= {(one, other), (other, one)}
    yield from sorted(seen)


def _crossing_devices(node: NDArray[np.int64], holders: list[list[int]], spans: list[bool]) -> int:
    """The most devices of one node that take part in an all-reduce that spans nodes."""
    workers = sorted({w for stage, spanned in zip(holders, spans, strict=True) if spanned for w in stage})
    return int(np.bincount(node[:, workers].ravel()).max()) if workers else 1


def _shared(link: Link, by: int) -> Link:
    return Link(link.latency_seconds, link.seconds_per_byte * by) if by > 1 else link
