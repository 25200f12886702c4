"""A schedule's orders for the player: ops, and the messages between workers right after their ops.

Lowering writes the messages into a program in the same places (``lowering.py``), whose lists are made in
``action_lists.py``. Invariant: a schedule and its program are played with the same ops and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from counterflow.errors import DeadlockError
from counterflow.schedule.graph import OpGraph

from .player import Floats, Ints, Lasting, ListArrays, Times, play


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a schedule, in the order of the ops that make them; those of one op in the order of
    sending.

    Attributes:
        makers: the op that makes each message.
        takers: the op that takes the message.
        sent_after: the op after which it is sent: the last one of its maker's pair, or its maker.
        needed_by: the op that waits for it: the first one of its taker's pair, or its taker.
        senders: the worker that sends the message.
        receivers: the worker that receives the message.
        skips: index of its skip connection in the workload; -1: none.
    """

    makers: Ints
    takers: Ints
    sent_after: Ints
    needed_by: Ints
    senders: Ints
    receivers: Ints
    skips: Ints

    def before_of_op(self, seconds: Floats) -> Floats:
        """For each message, the total travel time of earlier messages of the same op, or of its pair."""
        if not len(seconds):
            return seconds
        before = np.cumsum(seconds) - seconds
        first = np.concatenate(([True], self.sent_after[1:] != self.sent_after[:-1]))
        seconds_before: Floats = before - before[first][np.cumsum(first) - 1]
        return seconds_before


def messages_of(graph: OpGraph) -> Messages:
    """The messages between workers."""
    worker = np.array(graph.worker, dtype=np.int64)
    sources = np.array([-1 if source is None else source for source in graph.source], dtype=np.int64)
    takers = np.flatnonzero(sources >= 0)
    makers = sources[takers]
    between = worker[makers] != worker[takers]
    makers, takers = makers[between], takers[between]
    skips = np.full(len(makers), -1, dtype=np.int64)
    if graph.by_skips:
        numbers = {skip: number for number, skip in enumerate(graph.schedule.workload.skips)}
        rows = [(source, taker, numbers[skip]) for source, taker, skip in graph.by_skips]
        further = np.array(rows, dtype=np.int64).T
        makers, takers, skips = map(np.concatenate, zip((makers, takers, skips), further, strict=True))
    firsts, lasts = (np.array(nodes, dtype=np.int64) for nodes in graph.pair_ends)
    order = np.lexsort((takers, skips, makers, lasts[makers]))
    makers, takers, skips = makers[order], takers[order], skips[order]
    return Messages(makers, takers, lasts[makers], firsts[takers], worker[makers], worker[takers], skips)


def lists_of(first: Sequence[int], makers: Ints, takers: Ints, receivers: Ints) -> ListArrays:
    """Lists in which one node takes each message.

    Args:
        first: each list's first node, then one past the last node of all.
        makers: node that makes each message, ascending.
        takers: node that takes each message.
        receivers: list of the node that takes each message.
    """
    nodes = np.arange(first[-1] + 1)
    by_taker = np.argsort(takers, kind="stable")
    return ListArrays(
        first=np.array(first, dtype=np.int64),
        takes=np.searchsorted(takers[by_taker], nodes),
        inputs=by_taker,
        outputs=np.searchsorted(makers, nodes),
        receivers=receivers,
    )


def lists_of_ops(graph: OpGraph, messages: Messages) -> ListArrays:
    """The orders of a schedule.

    Raises:
        DeadlockError: an op takes a product of a later op of its own worker.
    """
    stuck = _before_their_own(graph)
    if stuck:
        raise DeadlockError(graph.describe_circle(stuck))
    return lists_of(graph.first, messages.sent_after, messages.needed_by, messages.receivers)


def _before_their_own(graph: OpGraph) -> dict[int, tuple[int, int]]:
    """For each such worker, an op that takes the product of a later op of the same worker, and that later
    op.
    """
    return {
        graph.worker[node]: (node, source)
        for node, source in enumerate(graph.source)
        if source is not None and source > node and graph.worker[source] == graph.worker[node]
    }


def instant(lists: ListArrays, nodes: Floats | None = None) -> Lasting:
    """Messages that take no time, between nodes with the given durations or none."""
    none, messages = np.zeros(lists.first[-1]), np.zeros(len(lists.receivers))
    lanes = np.full(len(messages), -1, dtype=np.int64)
    return Lasting(none if nodes is None else nodes, none, messages, messages, lanes)


def spread(lasting: Lasting, lists: ListArrays, ops: Ints, messages: Ints, seconds: Floats) -> Lasting:
    """Durations of everything in lists that have more in them than ops and the messages between workers.

    What a further message says is known as soon as its maker is done with all messages between workers.

    Args:
        lasting: the ops, and the messages between workers.
        lists: what is played.
        ops: of each node, which op it is; -1: none.
        messages: of each message, which one between workers it is; -1: none.
        seconds: of each node that is no op.
    """
    nodes, busy = seconds.copy(), np.zeros(len(seconds))
    nodes[ops >= 0], busy[ops >= 0] = lasting.nodes[ops[ops >= 0]], lasting.busy[ops[ops >= 0]]
    late, travel = np.zeros(len(messages)), np.zeros(len(messages))
    late[: lists.outputs[-1]] = np.repeat(busy, np.diff(lists.outputs))
    lanes = np.full(len(messages), -1, dtype=np.int64)
    between, which = messages >= 0, messages[messages >= 0]
    late[between], travel[between] = lasting.late[which], lasting.travel[which]
    lanes[between] = lasting.lanes[which]
    return Lasting(nodes, busy, late, travel, lanes)


def played(lists: ListArrays, lasting: Lasting) -> Times:
    """A play without a limit, in which all lists begin at 0 and all lanes are free."""
    lanes = int(lasting.lanes.max(initial=-1)) + 1
    times = play(lists, lasting, (np.zeros(len(lists.first) - 1), np.zeros(lanes)))
    assert times is not None  # because no limit was given
    return times


def earliest(graph: OpGraph, durations: Sequence[int]) -> tuple[list[int], list[int]]:
    """Start and end of every op, worker by worker in order, if each runs as soon as it can.

    Messages take no time.

    Raises:
        DeadlockError: workers wait for each other in a circle.
    """
    lists, times = _instantly(graph, np.array(durations, dtype=np.float64))
    refuse_stuck(graph, lists, times)
    return times.start.astype(int).tolist(), times.end.astype(int).tolist()


def _instantly(graph: OpGraph, durations: Floats | None = None) -> tuple[ListArrays, Times]:
    lists = lists_of_ops(graph, messages_of(graph))
    return lists, played(lists, instant(lists, durations))


def circle_of_ops(graph: OpGraph) -> list[tuple[int, int]]:
    """A circle of (op that waits, op it waits for) as numbers of ops; [] if all orders end."""
    stuck = _before_their_own(graph)
    if not stuck:
        stuck = _stuck_ops(graph, *_instantly(graph))
    return graph.circle(stuck) if stuck else []


def refuse_stuck(graph: OpGraph, lists: ListArrays, times: Times) -> None:
    """Refuse orders that do not reach their end.

    Raises:
        DeadlockError: workers wait for each other in a circle.
    """
    stuck = _stuck_ops(graph, lists, times)
    if stuck:
        raise DeadlockError(graph.describe_circle(stuck))
    if times.stuck(lists):
        raise DeadlockError("deadlock, the workers wait in a circle for sums of gradients; run the checker")


def _stuck_ops(graph: OpGraph, lists: ListArrays, times: Times) -> dict[int, tuple[int, int]]:
    """For each worker that does not reach the end of its order, its next op and the op whose product this
    takes.

    None if one of them waits for a sum.
    """
    stuck = {}
    for worker in times.stuck(lists):
        if worker >= len(graph.schedule.orders):
            return {}
        head = int(times.head[worker])
        waits = [(node, graph.source[node]) for node in range(head, graph.pair_ends[1][head] + 1)]
        for node, source in waits:
            if source is not None and (source >= times.head[graph.worker[source]] or len(waits) == 1):
                stuck[worker] = node, source
                break
        else:
            return {}
    return stuck


def topological(graph: OpGraph) -> list[int]:
    """The numbers of all ops, each after the ops that it waits for.

    Raises:
        DeadlockError: workers wait for each other in a circle.
    """
    start, _ = earliest(graph, [1] * len(graph.ops))
    nodes: list[int] = np.argsort(start, kind="stable").tolist()
    return nodes


def ops_before(graph: OpGraph) -> list[list[int]]:
    """For each op and other worker, the number of that worker's ops that have to end before the op can begin.

    Ops of the op's own worker are not counted, as its place alone says how many precede it.
    """
    rows: list[list[int]] = [[]] * len(graph.ops)
    none = [0] * len(graph.schedule.orders)
    begins = set(graph.first)
    firsts, lasts = graph.pair_ends
    for node in topological(graph):
        row = none if node in begins else rows[node - 1]
        for paired in range(node, lasts[node] + 1) if node == firsts[node] else ():
            source = graph.source[paired]
            if source is not None and graph.worker[source] != graph.worker[node]:
                last, maker = lasts[source], graph.worker[source]
                row = list(map(max, row, rows[last]))
                row[maker] = max(row[maker], last - graph.first[maker] + 1)
        rows[node] = row
    return rows
