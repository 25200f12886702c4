"""The gradient syncs of an asynchronous schedule as lists of their own, for which ops wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from counterflow.program.lists import Messages, lists_of
from counterflow.program.player import Ints, ListArrays
from counterflow.program.sync import GradientSync, by_last_backward, first_users
from counterflow.schedule.graph import Nodes


class Awaited(NamedTuple):
    """The gradient syncs of an asynchronous schedule, for which ops wait: one list with one node each.

    Attributes:
        syncs: in the order in which they run on each worker's lane.
        lists: the orders, and behind them the syncs.
        places: of each message of ``lists`` which one between workers it is, or -1.
    """

    syncs: list[GradientSync]
    lists: ListArrays
    places: Ints


def awaited_syncs(nodes: Nodes, messages: Messages) -> Awaited:
    """The syncs of a schedule: ops that use new weights, or begin new gradients, wait for them.

    Args:
        nodes: the schedule's ops.
        messages: the messages between its workers.
    """
    schedule = nodes.schedule
    syncs, users = by_last_backward(schedule), first_users(schedule)
    count, workers = len(nodes.ops), schedule.workers
    columns = (row.tolist() for row in (messages.makers, messages.takers, messages.receivers))
    rows = [(maker, at, taker, to) for at, (maker, taker, to) in enumerate(zip(*columns, strict=True))]
    before: dict[int, int] = {}
    for number, sync in enumerate(syncs):
        node, sync_list = count + number, workers + number
        for worker, last in sync.last:
            if last is not None:
                rows.append((nodes.first[worker] + last, -1, node, sync_list))
            user = users.get((worker, sync.stage, sync.period))
            if user is not None:
                rows.append((node, -1, nodes.first[worker] + user, worker))
        earlier = {before[worker] for worker in sync.workers if worker in before}
        rows += [(previous, -1, node, sync_list) for previous in earlier]
        before |= dict.fromkeys(sync.workers, node)
    rows.sort()
    makers, places, takers, receivers = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    first = [*nodes.first, *(count + number for number in range(1, len(syncs) + 1))]
    return Awaited(syncs, lists_of(first, makers, takers, receivers), places)
