"""Nodes that are slower or quicker than others, from what each worker took for the same layers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from counterflow.planning import NodeKind

_NOTICED = 0.1
"""Nodes whose times are nearer than this to the profile's are as the profile says."""


def kinds_by_speed(seconds: Sequence[Sequence[float]], nodes: int) -> tuple[NodeKind, ...]:
    """Kinds of nodes, in the nodes' order; none where all are about as quick.

    Args:
        seconds: of the same work, by measurement and rank; the profile has their median over ranks.
        nodes: on how many nodes the ranks are, as many on each.

    >>> [(kind.name, kind.nodes, kind.slowness) for kind in kinds_by_speed([(1.0, 1.0, 1.0, 1.6)], 4)]
    [('nodes 0-2', 3, 1.0), ('node 3', 1, 1.6)]
    >>> kinds_by_speed([(1.0, 1.05)], 2)
    ()
    """
    if nodes < 2 or not all(seconds):
        return ()
    each = len(seconds[0]) // nodes
    ratios = [
        [took / statistics.median(row) if statistics.median(row) else 1.0 for took in row] for row in seconds
    ]
    found = []
    for node in range(nodes):
        ratio = statistics.median(value for row in ratios for value in row[node * each : (node + 1) * each])
        found.append(1.0 if abs(ratio - 1) <= _NOTICED else round(ratio, 2))
    if len({*found}) < 2:
        return ()
    kinds, first = [], 0
    for slowness, run in groupby(found):
        count = len(list(run))
        name = f"nodes {first}-{first + count - 1}" if count > 1 else f"node {first}"
        kinds.append(NodeKind(name, count, slowness=slowness))
        first += count
    return tuple(kinds)
