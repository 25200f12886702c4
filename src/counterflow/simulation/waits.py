"""Waits in a play as pairs of nodes, for analyses of which waits matter instead of when things happen.

Nodes are those of the lists, then the messages of lanes that carry one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from counterflow.program.player import Floats, Ints, Lasting, ListArrays


class Waits(NamedTuple):
    """Every wait: ``taker`` begins ``delay`` seconds after ``source`` has ended.

    Attributes:
        source: node that is waited for.
        taker: node that waits.
        delay: in seconds.
        lasts: duration of each node in seconds.
    """

    source: Ints
    taker: Ints
    delay: Floats
    lasts: Floats


def waits_of(lists: ListArrays, lasting: Lasting) -> Waits:
    """The waits of nodes and messages."""
    count = len(lasting.nodes)
    follows = np.setdiff1d(np.arange(count), lists.first)
    makers = np.repeat(np.arange(count), np.diff(lists.outputs))
    takers = np.empty(len(makers), dtype=np.int64)
    takers[lists.inputs] = np.repeat(np.arange(count), np.diff(lists.takes))
    at_once, on_lane = np.flatnonzero(lasting.lanes < 0), np.flatnonzero(lasting.lanes >= 0)
    nodes = count + np.arange(len(on_lane))
    order = np.lexsort((makers[on_lane], lasting.lanes[on_lane]))
    lanes = lasting.lanes[on_lane][order]
    behind = np.flatnonzero(lanes[1:] == lanes[:-1])
    nothing = np.zeros(len(lists.receivers))
    rows = (
        (follows - 1, follows, lasting.busy[follows - 1]),
        (makers[at_once], takers[at_once], lasting.late[at_once]),
        (makers[on_lane], nodes, lasting.late[on_lane]),
        (nodes[order[behind]], nodes[order[behind + 1]], nothing[behind]),
        (nodes, takers[on_lane], nothing[on_lane]),
    )
    source, taker, delay = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Waits(source, taker, delay, np.concatenate((lasting.nodes, lasting.travel[on_lane])))
