"""Pieces of a stage's autograd graph whose backward is split: at which layers they begin.

The engine and the planner of memory follow the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable

NODES_A_PIECE = 24
"""Minimum number of nodes in a piece of a graph: entering autograd costs as much as visiting this many."""


class PieceRule:
    """Decides layer by layer, from a stage's input on, whether a piece begins.

    Args:
        separates: True if the first piece has a gradient of the stage's input; otherwise its whole backward
            waits, and it is as short as possible.
    """

    def __init__(self, *, separates: bool) -> None:
        self._separates = separates
        self._size = 0

    def may_begin(self, beneath: int) -> bool:
        """True if a piece may begin where this many nodes are beneath, down to the stage's input."""
        return not self._separates or beneath >= self._size + NODES_A_PIECE

    def begin(self, beneath: int) -> None:
        """Begin a piece there."""
        self._separates, self._size = True, beneath


def piece_starts(nodes: Iterable[int], *, separates: bool, inputs: int = 0) -> list[int]:
    """Numbers of the layers with which pieces begin.

    Args:
        nodes: nodes of each layer's graph; 0: not known, the layer is a piece of its own.
        separates: see ``PieceRule``.
        inputs: nodes of the stage's input.

    >>> piece_starts([10, 10, 10, 10], separates=True, inputs=4)
    [0, 2]
    >>> piece_starts([10, 10, 10, 10], separates=False)
    [0, 1]
    >>> piece_starts([10, 0, 10], separates=True)
    [0, 1, 2]
    """
    rule, starts, beneath, last = PieceRule(separates=separates), [0], inputs, 1
    for number, count in enumerate(nodes):
        if number and (not last or not count or rule.may_begin(beneath)):
            rule.begin(beneath)
            starts.append(number)
        beneath += count
        last = count
    return starts
