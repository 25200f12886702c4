"""Pairs: ops of one worker that can run at once, the all-to-all of one beside the compute of the other.

::

    one after another   F F x x F F  B B B x x B B B       x: all-to-all, during which the device waits
    as a pair           F F B B B F F B B B
                            x x     x x                    on a lane of its own

A pair is a forward and a backward of two stages of a worker, next to each other in its order, with the
recomputation of the backward if there is one. DualPipe is made of them; in other schemes they exist where an
order happens to have them. Ops of one stage are no pair: a module would run twice at once.

A pair counts as one op: it begins when the inputs of both are there, and its products are sent when both have
ended. So two ops are a pair only if, when a worker that begins without pairs could begin the first one, the
second one could begin too (forwards take 1, backwards 2). Invariant: in that play every op ends, so pairs
close no circle.

Source: DeepSeek-V3 technical report (arXiv 2412.19437) section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

from counterflow.errors import ConfigError
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Op, Schedule

RECENT_SCHEDULES = 8
"""Number of schedules whose result is cached, because callers try many costs on a few schedules."""

_recent: tuple[tuple[Schedule, Schedule], ...] = ()
"""Schedules, each with its result, the newest last; replaced as a whole, because threads share it."""

_LONGEST = 3
"""Ops of a pair: a forward, and a backward with its recomputation."""


def with_pairs(schedule: Schedule) -> Schedule:
    """The schedule with its pairs of ops; itself if it has none, or has them already.

    The same object is returned for the same schedule again.

    Args:
        schedule: a synchronous schedule that the checker accepts.

    Raises:
        ConfigError: the schedule is asynchronous.

    >>> from counterflow.schedule.schemes import dualpipe_v
    >>> for pair in paired_ops(with_pairs(dualpipe_v(workers=1, micro_batches=3)))[0]:
    ...     print(*pair)
    F1.0 B0.1
    F1.1 B0.0
    F2.0 B1.1
    F2.1 B1.0
    """
    global _recent  # noqa: PLW0603 - a cache
    if not schedule.synchronous:
        raise ConfigError(
            f"{schedule}: ops run at once in synchronous schemes only; take one, or run one op after another"
        )
    if schedule.pairs:
        return schedule
    for known, paired in _recent:
        if known is schedule:
            return paired
    pairs = _Play(OpGraph(schedule)).pairs()
    paired = replace(schedule, pairs=pairs) if any(pairs) else schedule
    _recent = (*_recent, (schedule, paired))[-RECENT_SCHEDULES:]
    return paired


def paired_ops(schedule: Schedule) -> list[list[tuple[Op, ...]]]:
    """For each worker, the ops of each of its pairs."""
    if not schedule.pairs:
        return [[] for _ in schedule.orders]
    rows = zip(schedule.orders, schedule.pairs, strict=True)
    return [[order[begin:stop] for begin, stop in pairs] for order, pairs in rows]


def is_pair(ops: tuple[Op, ...]) -> bool:
    """True if consecutive ops of a worker are of the kinds and stages of a pair.

    >>> from counterflow.schedule.op import B, F, R
    >>> forward, recomputation, backward = Op(F, 0, (2,)), Op(R, 1, (0,)), Op(B, 1, (0,))
    >>> is_pair((forward, recomputation, backward)), is_pair((recomputation, forward, backward))
    (True, False)
    """
    sides = sorted(ops_by_stage(ops), key=lambda side: not side[0].kind.is_forward)
    if len(sides) != 2 or len(sides[0]) != 1 or not sides[0][0].kind.is_forward:
        return False
    *before, backward = sides[1]
    return backward.kind.carries < 0 and all(op.kind.restores and op[1:] == backward[1:] for op in before)


def ops_by_stage(ops: tuple[Op, ...]) -> list[list[Op]]:
    """Consecutive ops of one stage, which run one after another in a pair."""
    sides: list[list[Op]] = []
    for op in ops:
        if sides and sides[-1][-1].stage == op.stage:
            sides[-1].append(op)
        else:
            sides.append([op])
    return sides


class _Play:
    """Play in the order of time, in which a worker runs two ops at once if both can begin.

    Args:
        graph: ops of a schedule without pairs.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.inputs = [[] if source is None else [source] for source in graph.source]
        for source, node, skip in graph.messages:
            if skip is not None:
                self.inputs[node].append(source)
        scale = max((op.parts for op in graph.ops), default=1)
        self.durations = [(len(op.kind.makes) or 1) * round(scale * op.work) or 1 for op in graph.ops]
        self.ended = bytearray(len(graph.ops))

    def pairs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The slices of each worker's order that are pairs."""
        first = self.graph.first
        heads = list(first[:-1])
        pairs: list[list[tuple[int, int]]] = [[] for _ in heads]
        idle = set(range(len(heads)))
        running: list[tuple[int, int, int]] = []  # end, worker, first node
        now = 0
        while True:
            for worker in sorted(idle):
                nodes = self._next(heads[worker], first[worker + 1])
                if not nodes:
                    continue
                if len(nodes) > 1:
                    pairs[worker].append((nodes.start - first[worker], nodes.stop - first[worker]))
                heappush(running, (now + sum(self.durations[node] for node in nodes), worker, nodes.start))
                heads[worker] = nodes.stop
                idle.remove(worker)
            if not running:
                return tuple(map(tuple, pairs))
            now = running[0][0]
            while running and running[0][0] == now:
                _, worker, start = heappop(running)
                self.ended[start : heads[worker]] = b"\1" * (heads[worker] - start)
                idle.add(worker)

    def _next(self, head: int, stop: int) -> range:
        """The nodes that a worker begins; empty: it has to wait."""
        if head == stop or not self._can_begin(head):
            return range(0)
        for candidate in self._candidates(head, stop):
            if all(map(self._can_begin, candidate)):
                return candidate
        return range(head, head + 1)

    def _candidates(self, head: int, stop: int) -> Iterator[range]:
        for length in range(_LONGEST, 1, -1):
            if head + length <= stop and is_pair(tuple(self.graph.ops[head : head + length])):
                yield range(head, head + length)

    def _can_begin(self, node: int) -> bool:
        return all(self.ended[source] for source in self.inputs[node])
