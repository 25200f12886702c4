"""Ops on lanes other than compute (``OpKind.lane``): their worker starts them and continues.

In the worker's list such an op takes no time; it lasts as a message on its lane to the next op that uses its
tensors. So ops of one lane run one after another, beside those of others.

Invariant: such an op makes nothing that another stage takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from counterflow.program.lists import Messages, lists_of, spread
from counterflow.program.player import Ints, Lasting, ListArrays, Times
from counterflow.schedule.graph import Nodes
from counterflow.schedule.op import Lane, OpKind, Saved


@dataclass(frozen=True, slots=True)
class LaneLists:
    """The orders of a schedule with ops on other lanes than compute.

    Attributes:
        ops: numbers of these ops, ascending.
        lists: the orders, with a message of each such op.
        places: of each message of ``lists`` which one between workers it is, or -1.
        lanes: of each message of ``lists`` the lane that it occupies as an op, or -1.
    """

    ops: list[int]
    lists: ListArrays
    places: Ints
    lanes: Ints

    @property
    def count(self) -> int:
        """Number of lanes."""
        return int(self.lanes.max(initial=-1)) + 1

    def lasting(self, lasting: Lasting, links: int) -> Lasting:
        """Durations of everything, from those of ops and of messages on ``links`` links."""
        seconds = lasting.nodes.copy()
        seconds[self.ops] = 0.0
        nodes = np.arange(len(seconds))
        result = spread(
            lasting._replace(nodes=seconds), self.lists, nodes, self.places, np.zeros(len(seconds))
        )
        of_ops = self.lanes >= 0
        result.travel[of_ops] = lasting.nodes[self.ops]
        result.lanes[of_ops] = links + self.lanes[of_ops]
        return result

    def times(self, times: Times, lasting: Lasting) -> Times:
        """Times in which these ops last as long as they occupy their lanes."""
        of_ops = self.lanes >= 0
        times.start[self.ops] = times.sent[of_ops]
        times.end[self.ops] = times.sent[of_ops] + lasting.travel[of_ops]
        return times


def lane_lists(nodes: Nodes, messages: Messages) -> LaneLists | None:
    """The orders of a schedule; None: all ops are on the lane of compute."""
    if all(kind.lane is Lane.COMPUTE for kind in {*nodes.columns[0]}):
        return None
    columns = (row.tolist() for row in (messages.sent_after, messages.needed_by, messages.receivers))
    rows = [(maker, at, taker, to, -1) for at, (maker, taker, to) in enumerate(zip(*columns, strict=True))]
    ops = [node for node, op in enumerate(nodes.ops) if op.kind.lane is not Lane.COMPUTE]
    lanes: dict[tuple[int, Lane], int] = {}
    for node in ops:
        worker = nodes.worker[node]
        lane = lanes.setdefault((worker, nodes.ops[node].kind.lane), len(lanes))
        rows.append((node, -1, next(_users(nodes, node), len(nodes.ops)), worker, lane))
    rows.sort()
    makers, places, takers, receivers, on_lanes = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return LaneLists(ops, lists_of(nodes.first, makers, takers, receivers), places, on_lanes)


def _users(nodes: Nodes, node: int) -> Iterator[int]:
    op = nodes.ops[node]
    tensors = _tensors(op.kind)
    for user in range(node + 1, nodes.first[nodes.worker[node] + 1]):
        if nodes.ops[user][1:] == op[1:] and tensors & _tensors(nodes.ops[user].kind):
            yield user


def _tensors(kind: OpKind) -> set[Saved]:
    return {saved for saved in (kind.saves, kind.restores, *kind.frees) if saved}
