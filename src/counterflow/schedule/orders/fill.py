"""Filled waits: where a worker would wait for an input, it runs a later op of its order that can run.

Invariant: an op is only moved to a place where its inputs exist and its worker would wait, and never raises a
worker's stashed forwards above a limit, so the result is as legal as the original. Waits are computed in unit
times: an op takes the time of its work in micro-batches, a whole backward twice that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from counterflow.errors import DeadlockError

from ..graph import OpGraph
from ..ir import Op, OpKind, Schedule
from ..residency import stash_change


def filled(
    schedule: Schedule, limits: Sequence[float], movable: Callable[[Op], bool] = lambda _: True
) -> Schedule:
    """The schedule with its waits filled.

    If all ops take one unit, none starts later than before.

    Args:
        schedule: the schedule to fill.
        limits: maximum forwards that each worker may stash, in (stage x micro-batch) units.
        movable: which ops may be moved.

    Raises:
        ScheduleError: an op's input is computed nowhere.
        DeadlockError: the workers wait for each other in a circle.
    """
    graph = OpGraph(schedule)
    needs = graph.needs
    ended = [inf] * len(graph.ops)
    scale = max(
        (op.parts for op in graph.ops), default=1
    )  # times are whole numbers, so equal times compare equal
    workers = [
        _Worker(graph, w, needs, limit, movable)
        for w, limit in zip(range(schedule.workers), limits, strict=True)
    ]
    wakes = _wakes(graph, needs)
    moments = [(0.0, w) for w in range(schedule.workers)]
    while moments:
        now, w = heappop(moments)
        worker = workers[w]
        if worker.busy_until > now or worker.looked_at == now:
            continue
        worker.looked_at = now
        node = worker.next_node(now, ended)
        if node is not None:
            op = graph.ops[node]
            end = now + round(op.work * scale) * len(op.kind.makes)
            ended[node] = worker.busy_until = end
            for waiting in wakes[node]:
                heappush(moments, (end, waiting))
    stuck = {w: worker.waits(ended) for w, worker in enumerate(workers) if worker.remaining}
    if stuck:
        raise DeadlockError(graph.describe_circle(stuck))
    return replace(schedule, orders=tuple(tuple(worker.done) for worker in workers))


def _wakes(graph: OpGraph, needs: list[list[int]]) -> list[set[int]]:
    """Workers that may have something to run when a node ends: the node's own, and those that take its
    product.
    """
    wakes: list[set[int]] = [set() for _ in graph.ops]
    for worker, (first, end) in enumerate(pairwise(graph.first)):
        for node in range(first, end):
            wakes[node].add(worker)
            for need in needs[node]:
                wakes[need].add(worker)
    return wakes


class _Worker:
    def __init__(
        self,
        graph: OpGraph,
        worker: int,
        needs: list[list[int]],
        limit: float,
        movable: Callable[[Op], bool],
    ) -> None:
        nodes = range(graph.first[worker], graph.first[worker + 1])
        self.done: list[Op] = []
        self.remaining = len(nodes)
        self.busy_until = 0.0
        self.looked_at = -1.0
        self._ops = graph.ops
        self._needs = needs
        self._order: list[int | None] = list(nodes)
        self._head = 0
        self._limit = limit
        self._stashed = 0.0
        self._movable: dict[tuple[OpKind, int, int], deque[int]] = {}
        """Places in the order of ops that may be moved, by kind and stage; each such list keeps its order."""
        for place, node in enumerate(nodes):
            op = graph.ops[node]
            if movable(op):
                self._movable.setdefault((op.kind, op.pipe, op.stage), deque()).append(place)

    def next_node(self, now: float, ended: list[float]) -> int | None:
        """The node that the worker runs from ``now`` on; None if it has to wait."""
        if not self.remaining:
            return None
        if self._can_run(self._head, now, ended):
            return self._run(self._head)
        for place in sorted(places[0] for places in self._movable.values() if places):
            if self._can_run(place, now, ended) and self._fits(place):
                return self._run(place)
        return None

    def waits(self, ended: list[float]) -> tuple[int, int]:
        """The first node that has not run, if one is left, and a node for which it waits."""
        node = self._order[self._head]
        assert node is not None  # skip nodes that were taken
        return node, next(need for need in self._needs[node] if ended[need] == inf)

    def _can_run(self, place: int, now: float, ended: list[float]) -> bool:
        node = self._order[place]
        return node is not None and all(ended[need] <= now for need in self._needs[node])

    def _fits(self, place: int) -> bool:
        node = self._order[place]
        assert node is not None
        more = stash_change(self._ops[node])
        if more <= 0:
            return True
        stashed = self._stashed + more
        for before in self._order[self._head : place]:
            if stashed > self._limit:
                return False
            if before is not None:
                stashed += stash_change(self._ops[before])
        return stashed <= self._limit

    def _run(self, place: int) -> int:
        node, self._order[place] = self._order[place], None
        assert node is not None
        op = self._ops[node]
        places = self._movable.get((op.kind, op.pipe, op.stage))
        if places and places[0] == place:
            places.popleft()
        self.done.append(op)
        self.remaining -= 1
        self._stashed += stash_change(op)
        while self._head < len(self._order) and self._order[self._head] is None:
            self._head += 1
        return node
