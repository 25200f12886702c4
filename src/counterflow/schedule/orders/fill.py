"""Waits filled: where a worker would wait for an input, it runs a later op of its order that can run.

Invariant: an op is only ever moved to where its inputs are there and its worker would wait, and never lifts a
worker's stashed forwards above a limit. So the result is as legal as what it was made of. Waits are those of
unit times: an op takes the time of its work in micro-batches, a whole backward twice that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from counterflow.errors import DeadlockError

from ..graph import OpGraph
from ..ir import Op, OpKind, Schedule
from ..residency import stash_change


def filled(
    schedule: Schedule, limits: Sequence[float], movable: Callable[[Op], bool] = lambda _: True
) -> Schedule:
    """The schedule with its waits filled.

    Where all ops take one unit, none starts later than before.

    Args:
        schedule: what each worker would run.
        limits: the most forwards that each worker may stash, in (stage x micro-batch) units.
        movable: which ops may be moved.

    Raises:
        DeadlockError: the workers wait for each other in a circle.
    """
    workers = [_Worker(schedule, *given, movable) for given in zip(schedule.orders, limits, strict=True)]
    ended: dict[Op, float] = {}
    moments, now = [0.0], -1.0
    while moments:
        if (moment := heappop(moments)) == now:
            continue
        now = moment
        for worker in workers:
            op = worker.next_at(now, ended)
            if op is not None:
                ended[op] = worker.busy_until = now + op.work * (2 if op.kind is OpKind.BACKWARD else 1)
                heappush(moments, worker.busy_until)
    if any(worker.left for worker in workers):
        raise DeadlockError(OpGraph(schedule).describe_cycle())
    return replace(schedule, orders=tuple(tuple(worker.done) for worker in workers))


class _Worker:
    """What one worker has run, and what is left of its order."""

    def __init__(
        self, schedule: Schedule, order: Sequence[Op], limit: float, movable: Callable[[Op], bool]
    ) -> None:
        self.done: list[Op] = []
        self.left = len(order)
        self.busy_until = 0.0
        self._needs = schedule.workload.needs
        self._order: list[Op | None] = list(order)
        self._head = 0
        self._limit = limit
        self._stashed = 0.0
        self._alike: dict[tuple[OpKind, int, int], deque[int]] = {}
        """Where ops that may be moved stand in the order, by kind and stage: these keep their order."""
        for place, op in enumerate(order):
            if movable(op):
                self._alike.setdefault((op.kind, op.pipe, op.stage), deque()).append(place)

    def next_at(self, now: float, ended: dict[Op, float]) -> Op | None:
        """Take what it runs from ``now`` on; None if it is busy or has to wait."""
        if not self.left or self.busy_until > now:
            return None

        def can_run(place: int) -> bool:
            op = self._order[place]
            return op is not None and all(ended.get(need, now + 1) <= now for need in self._needs(op))

        if can_run(self._head):
            return self._taken(self._head)
        for place in sorted(places[0] for places in self._alike.values() if places):
            if can_run(place) and self._fits(place):
                return self._taken(place)
        return None

    def _fits(self, place: int) -> bool:
        """Whether the op there can run before all that stands before it, within the limit."""
        op = self._order[place]
        assert op is not None
        more = stash_change(op)
        stashed = self._stashed + more
        for before in self._order[self._head : place] if more > 0 else ():
            if stashed > self._limit:
                return False
            if before is not None:
                stashed += stash_change(before)
        return more <= 0 or stashed <= self._limit

    def _taken(self, place: int) -> Op:
        op, self._order[place] = self._order[place], None
        assert op is not None
        places = self._alike.get((op.kind, op.pipe, op.stage))
        if places and places[0] == place:
            places.popleft()
        self.done.append(op)
        self.left -= 1
        self._stashed += stash_change(op)
        while self._head < len(self._order) and self._order[self._head] is None:
            self._head += 1
        return op
