"""Orders of the nodes of a cluster whose nodes differ, in which an arrangement counts devices.

A slow node may be best at a pipeline's beginning, middle or end, or one in each replica may be best. So the
kinds of nodes are tried in several orders, and each order in three ways, here for two kinds with two nodes
each:

    grouped     a a b b
    in turns    a b a b      replicas side by side have nodes of both kinds
    mirrored    a b b a      the two ends of a pipeline are alike, which suits two directions

Invariant: an order contains every node once. Nodes of one kind stay in the cluster's order. Not all orders
are tried; for more than two kinds only four orders of the kinds are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..inputs.cluster import Cluster, NodeKind

Ints = NDArray[np.int64]

Runs = tuple[tuple[str, int], ...]
"""Names of kinds and numbers of nodes, in order; empty: the cluster's order."""


def in_words(runs: Runs) -> str:
    """The order of nodes, for people.

    >>> in_words((("fast", 2), ("slow", 1)))
    '2 fast, 1 slow'
    """
    return ", ".join(f"{count} {name}" for name, count in runs)


def node_orders(cluster: Cluster) -> tuple[Runs, ...]:
    """The orders of its nodes that are tried; the first is the cluster's own, which is empty.

    >>> from counterflow.planning import Link, NodeKind
    >>> kinds = NodeKind("a", 2), NodeKind("b", 2, slowness=2.0)
    >>> two = Cluster("two kinds", 4, 1, 1e9, Link(0, 0), Link(0, 0), kinds=kinds)
    >>> [in_words(runs) for runs in node_orders(two)[1:]]
    ['1 a, 1 b, 1 a, 1 b', '1 a, 2 b, 1 a', '2 b, 2 a', '1 b, 1 a, 1 b, 1 a', '1 b, 2 a, 1 b']
    """
    if len({cluster.node(kind) for kind in cluster.kinds}) < 2:
        return ((),)
    orders: dict[Runs, None] = {}
    for kinds in _kind_orders(cluster):
        for names in (_grouped(kinds), _in_turns(kinds), _mirrored(kinds)):
            orders[tuple((name, len(list(run))) for name, run in groupby(names))] = None
    cluster_order = tuple((kind.name, kind.nodes) for kind in cluster.kinds)
    return ((), *(runs for runs in orders if runs != cluster_order))


def _kind_orders(cluster: Cluster) -> Iterator[tuple[NodeKind, ...]]:
    kinds = cluster.kinds
    yield kinds
    yield kinds[::-1]
    if len(kinds) > 2:
        by_speed = tuple(sorted(kinds, key=lambda kind: kind.slowness))
        yield by_speed
        yield by_speed[::-1]


def _grouped(kinds: Iterable[NodeKind]) -> list[str]:
    return [kind.name for kind in kinds for _ in range(kind.nodes)]


def _in_turns(kinds: tuple[NodeKind, ...]) -> list[str]:
    at = [((i + 0.5) / kind.nodes, k) for k, kind in enumerate(kinds) for i in range(kind.nodes)]
    return [kinds[k].name for _, k in sorted(at)]


def _mirrored(kinds: tuple[NodeKind, ...]) -> list[str]:
    first = [kind.name for kind in kinds for _ in range((kind.nodes + 1) // 2)]
    return first + [kind.name for kind in reversed(kinds) for _ in range(kind.nodes // 2)]


def node_of_devices(cluster: Cluster) -> Ints:
    """Node of each device, counted from 0."""
    counts = [node.devices for node, many in cluster.kinds_of_nodes() for _ in range(many)]
    return np.repeat(np.arange(len(counts)), counts)


def devices_in_row(cluster: Cluster, runs: Runs) -> Ints:
    """The devices, node by node, in an order of the nodes."""
    node = node_of_devices(cluster)
    if not runs:
        return np.arange(len(node))
    begin, devices = 0, {}
    for kind in cluster.kinds:
        devices[kind.name] = iter(range(begin, begin + kind.nodes))
        begin += kind.nodes
    row = [next(devices[name]) for name, count in runs for _ in range(count)]
    first = np.searchsorted(node, np.arange(cluster.nodes + 1))
    return np.concatenate([np.arange(first[n], first[n + 1]) for n in row])
