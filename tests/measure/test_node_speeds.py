"""Nodes that differ in speed, from literal times."""

from __future__ import annotations

import pytest

from counterflow.measure.cluster_costs import kinds_by_speed


@pytest.mark.parametrize(
    ("seconds", "nodes", "kinds"),
    [
        ([(1.0, 2.0)], 1, []),  # of one node
        ([(1.0, 1.1)], 2, []),
        ([(1.0, 2.0)], 2, [("node 0", 1, 0.67), ("node 1", 1, 1.33)]),  # the profile has 1.5
        ([(2.0, 2.0, 1.0, 1.0, 1.0, 1.0)], 3, [("node 0", 1, 2.0), ("nodes 1-2", 2, 1.0)]),
        ([(1.0, 1.0, 2.0), (4.0, 4.0, 9.0), (3.0, 3.0, 6.0)], 3, [("nodes 0-1", 2, 1.0), ("node 2", 1, 2.0)]),
        ([()], 2, []),
    ],
)
def test_nodes_that_differ_are_told_apart(
    seconds: list[tuple[float, ...]], nodes: int, kinds: list[tuple[str, int, float]]
) -> None:
    found = kinds_by_speed(seconds, nodes)
    assert [(kind.name, kind.nodes, kind.slowness) for kind in found] == kinds
