"""What waits for what, as arrays: ops, and messages on links that carry one at a time.

Nodes are the schedule's ops and, where links are lanes, one node for each message after them. A message
follows the op that made it and the message before it on the same link: a worker sends in the order of its
ops (``program/lowering.py``), so a link's order is known without any times.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from counterflow.schedule.graph import OpGraph

from .kernel import Floats, Ints, longest_paths


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a schedule, in the order of the ops that make them; of one op as they are sent.

    Attributes:
        makers: the op that made each.
        takers: the op that takes it.
        senders: the worker that sends it.
        receivers: the worker that receives it.
        skips: which of the workload's skips it goes by; -1: none.
    """

    makers: Ints
    takers: Ints
    senders: Ints
    receivers: Ints
    skips: Ints

    def before_of_op(self, seconds: Floats) -> Floats:
        """For each message, how long the earlier ones of the same op travel together."""
        if not len(seconds):
            return seconds
        before = np.cumsum(seconds) - seconds
        first = np.concatenate(([True], self.makers[1:] != self.makers[:-1]))
        found: Floats = before - before[first][np.cumsum(first) - 1]
        return found


@dataclass(frozen=True, slots=True)
class Edges:
    """What waits for what, by place: nodes are ordered so that each comes after all it waits for.

    Attributes:
        order: the node at each place.
        first: the node at place p waits for those at the places ``sources[first[p]:first[p + 1]]``.
        sources: see ``first``.
        travel: the edge along which each message travels, or, where messages are nodes, the one to it from
            the op that makes it.
        busy: edges from an op that sends to the op after it on its worker ...
        senders: ... and that op.
    """

    order: Ints
    first: Ints
    sources: Ints
    travel: Ints
    busy: Ints
    senders: Ints

    def play(self, delay: Floats, seconds: Floats) -> tuple[Floats, Floats]:
        """Start and end of every node, each as early as possible; ``delay`` by edge, ``seconds`` by node."""
        starts, ends = longest_paths(self.first, self.sources, delay, seconds[self.order])
        start, end = np.empty(len(seconds)), np.empty(len(seconds))
        start[self.order], end[self.order] = starts, ends
        return start, end


def messages_of(graph: OpGraph) -> Messages:
    """The messages between workers."""
    numbers = {skip: number for number, skip in enumerate(graph.schedule.workload.skips)}
    rows = sorted((s, -1 if skip is None else numbers[skip], t) for s, t, skip in graph.messages)
    found = np.array(rows, dtype=np.int64).reshape(-1, 3)
    worker = np.array(graph.worker, dtype=np.int64)
    makers, takers = found[:, 0], found[:, 2]
    return Messages(makers, takers, worker[makers], worker[takers], found[:, 1])


def edges_of(graph: OpGraph, messages: Messages, *, links: Ints | None) -> Edges:
    """What waits for what: each op for the one before it on its worker, then for what it takes.

    Args:
        graph: the ops.
        messages: what travels between workers.
        links: the link of each message, where they carry one at a time; then messages are nodes.
    """
    ops, count = len(graph.ops), len(messages.makers)
    nodes = np.arange(ops)
    ordered = np.ones(ops, dtype=bool)
    ordered[np.array(graph.first[:-1])[np.diff(graph.first) > 0]] = False
    source = np.array([-1 if s is None else s for s in graph.source], dtype=np.int64)
    fed = source >= 0
    number = np.arange(count)
    skipping = messages.takers[messages.skips >= 0]
    degree = ordered.astype(np.int64) + fed + np.bincount(skipping, minlength=ops)
    lanes = links is not None
    before = np.empty(0, dtype=np.int64) if links is None else _before_on_link(messages, links)
    degree = np.concatenate((degree, 1 + (before >= 0)))
    first: Ints = np.concatenate(([0], np.cumsum(degree)))
    sources: Ints = np.empty(first[-1], dtype=np.int64)
    sources[first[:ops][ordered]] = nodes[ordered] - 1
    data = first[1 : ops + 1] - 1
    sources[data[fed]] = source[fed]
    taken = data[messages.takers]  # what comes by skips stands before what every stage takes
    if len(skipping):
        taken -= _rank(messages)
    sources[taken] = ops + number if lanes else messages.makers
    if lanes:
        sources[first[ops:-1]] = messages.makers
        sources[first[ops + 1 :][before >= 0] - 1] = ops + before[before >= 0]
    topological = np.array(graph.topological, dtype=np.int64)
    if lanes:  # each message right after the op that made it
        rank = np.empty(ops, dtype=np.int64)
        rank[topological] = 2 * nodes
        topological = np.argsort(np.concatenate((rank, rank[messages.makers] + 1)), kind="stable")
    # Where a worker is busy with its messages, the op after the sending one waits for them.
    sending = np.zeros(ops, dtype=bool)
    sending[messages.makers] = True
    earlier = np.where(ordered, nodes - 1, 0)
    after_send = ordered & sending[earlier]
    placed, waited, moved = _by_place(topological, first, sources)
    return Edges(
        topological,
        placed,
        waited,
        travel=moved[first[ops:-1] if lanes else taken],
        busy=moved[first[:ops][after_send]],
        senders=earlier[after_send],
    )


def _rank(messages: Messages) -> Ints:
    """Of each message its number among those that its op takes; one of no skip is the first."""
    order = np.lexsort((messages.skips, messages.takers))
    takers = messages.takers[order]
    first = np.concatenate(([True], takers[1:] != takers[:-1]))
    place = np.arange(len(order))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = place - place[first][np.cumsum(first) - 1]
    # Where what every stage takes comes from the same worker, its place is the first all the same.
    alone = np.ones(takers.max() + 1, dtype=bool)
    alone[messages.takers[messages.skips < 0]] = False
    rank[alone[messages.takers]] += 1
    return rank


def _by_place(order: Ints, first: Ints, sources: Ints) -> tuple[Ints, Ints, Ints]:
    """The same edges with nodes numbered by their place in an order, and where each edge went."""
    degree = np.diff(first)[order]
    placed: Ints = np.concatenate(([0], np.cumsum(degree)))
    edge = np.arange(len(sources)) + np.repeat(first[order] - placed[:-1], degree)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    moved = np.empty(len(sources), dtype=np.int64)
    moved[edge] = np.arange(len(sources))
    return placed, place[sources[edge]], moved


def _before_on_link(messages: Messages, link: Ints) -> Ints:
    """The message before each on its link, by number; -1 for the first."""
    order = np.lexsort((messages.makers, link))
    before = np.full(len(order), -1, dtype=np.int64)
    same = link[order][1:] == link[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def with_nodes(
    edges: Edges, delay: Floats, extra: dict[int, list[int]], added: list[list[tuple[int, float]]]
) -> tuple[Edges, Floats]:
    """Edges with more sources for some nodes (``extra``), and nodes appended with (source, delay) pairs."""
    sources: list[list[int]] = [[] for _ in edges.order]
    delays: list[list[float]] = [[] for _ in edges.order]
    order, first = edges.order.tolist(), edges.first.tolist()
    old_sources, old_delay = edges.order[edges.sources].tolist(), delay.tolist()
    for place, node in enumerate(order):
        span = slice(first[place], first[place + 1])
        more = extra.get(node, [])
        sources[node] = old_sources[span] + more
        delays[node] = old_delay[span] + [0.0] * len(more)
    for waits in added:
        sources.append([source for source, _ in waits])
        delays.append([late for _, late in waits])
    found = _topological(sources)
    degree = np.array([len(row) for row in sources])
    node_first: Ints = np.concatenate(([0], np.cumsum(degree)))
    flat = np.array(list(chain.from_iterable(sources)), dtype=np.int64)
    placed, at, moved = _by_place(found, node_first, flat)
    late = np.empty(len(flat))
    late[moved] = list(chain.from_iterable(delays))
    none = np.empty(0, dtype=np.int64)
    return Edges(found, placed, at, none, none, none), late


def _topological(sources: list[list[int]]) -> Ints:
    """Nodes in an order in which sources go first."""
    targets: list[list[int]] = [[] for _ in sources]
    missing = [len(row) for row in sources]
    for node, row in enumerate(sources):
        for source in row:
            targets[source].append(node)
    ready = [node for node, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for target in targets[node]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    assert len(order) == len(sources)  # waiting for an update of earlier ops closes no circle
    return np.array(order, dtype=np.int64)
