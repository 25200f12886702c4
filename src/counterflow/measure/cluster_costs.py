"""Costs of links and nodes, as the planner's cluster.

Invariant: what was not measured (a second node) is omitted, and each number states its origin.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from counterflow.planning.inputs.cluster import AllReduce, Cluster, Link, NodeKind

from .links import Travel
from .machine import cores, worker_bytes
from .survey import Survey

_NOTICED = 0.1
"""Share of the profile's times within which a node's times count as equal."""


def cluster_of(survey: Survey) -> Cluster:
    """The machines that were measured."""
    messages, sums = survey.inside
    far_messages, far_sums = survey.between
    on_cpu, several = survey.device == "cpu", survey.nodes > 1
    return Cluster(
        name=f"{platform.node() or 'this machine'}",
        nodes=survey.nodes,
        devices=survey.workers,
        memory_bytes=worker_bytes(survey.device, survey.workers),
        inside=fitted(messages),
        between=fitted(far_messages or messages),
        allreduce_inside=fitted(sums, begins=2) if sums else None,
        allreduce_between=fitted(far_sums, begins=2) if far_sums else None,
        shared_adapter=several,
        allreduce=AllReduce.RING if on_cpu else AllReduce.HIERARCHICAL,
        cores=cores() if on_cpu else None,
        kinds=kinds_by_speed([times.by_worker for times in survey.by_size], survey.nodes),
        sources={
            "memory_bytes": "as the machine reports it, divided by its workers, or their limit",
            "inside": _source("messages", messages) or "one worker: not used",
            "between": _source("messages", far_messages) or "one node: not used",
            "allreduce_inside": _source("all-reduces of 2 workers", sums),
            "allreduce_between": _source("all-reduces of 2 workers", far_sums),
            "shared_adapter": "assumed: the workers of a node have one way out" if several else "",
        },
    )


def _source(what: str, travels: Sequence[Travel]) -> str:
    if not travels:
        return ""
    return f"fitted to {what} of {travels[0].size_bytes:,} to {travels[-1].size_bytes:,} bytes"


def kinds_by_speed(seconds: Sequence[Sequence[float]], nodes: int) -> tuple[NodeKind, ...]:
    """Kinds of nodes, in the nodes' order; empty if all are about equally fast.

    Args:
        seconds: seconds of the same work, by measurement and rank; the profile contains their median over
            ranks.
        nodes: number of nodes, with equally many ranks on each.

    >>> [(kind.name, kind.nodes, kind.slowness) for kind in kinds_by_speed([(1.0, 1.0, 1.0, 1.6)], 4)]
    [('nodes 0-2', 3, 1.0), ('node 3', 1, 1.6)]
    >>> kinds_by_speed([(1.0, 1.05)], 2)
    ()
    """
    if nodes < 2 or not all(seconds):
        return ()
    ranks_per_node = len(seconds[0]) // nodes
    ratios = [
        [took / statistics.median(row) if statistics.median(row) else 1.0 for took in row] for row in seconds
    ]
    slownesses = []
    for node in range(nodes):
        ranks = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        ratio = statistics.median(value for row in ratios for value in row[ranks])
        slownesses.append(1.0 if abs(ratio - 1) <= _NOTICED else round(ratio, 2))
    if len({*slownesses}) < 2:
        return ()
    kinds, first = [], 0
    for slowness, run in groupby(slownesses):
        count = len(list(run))
        name = f"nodes {first}-{first + count - 1}" if count > 1 else f"node {first}"
        kinds.append(NodeKind(name, count, slowness=slowness))
        first += count
    return tuple(kinds)


def fitted(travels: Sequence[Travel], *, begins: int = 1) -> Link:
    """The link whose latency and seconds per byte fit the measurements best, in relative terms.

    Args:
        travels: sizes and seconds; empty: a link that costs nothing.
        begins: number of latencies in each: 2 in an all-reduce of two workers, which sends its bytes once.

    >>> link = fitted([Travel(0, 1.0), Travel(10, 2.0), Travel(20, 3.0)])
    >>> round(link.latency_seconds, 6), round(link.seconds_per_byte, 6)
    (1.0, 0.1)
    """
    if not travels:
        return Link(0.0, 0.0)
    rows = np.array([[1 / t.seconds, t.size_bytes / t.seconds] for t in travels])
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return Link(max(0.0, float(latency)) / begins, max(0.0, float(per_byte)))
