"""A schedule's ops and messages played once, without syncs, and given up where they are sure to be late.

For a search that plays many schedules and keeps few: no graph, no numbered nodes, no arrays, and no end where
a worker's time and the work it has left are beyond what is wanted.

Invariant: what is played to its end ends when ``simulate`` says, to the last bit. What is given up, as a
worker that has waited does all the rest of its ops one after the other, takes at least so long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from counterflow.errors import DeadlockError
from counterflow.schedule.ir import OpKind, Product, Schedule

from .costs import Costs, Link
from .op_costs import per_stage
from .timed_schedule import TimedSchedule, timed

_Key = tuple[tuple[int, ...], int, int]
"""Of what an op takes or makes, on its pipe and stage: micro-batches, part and parts."""


class Ended(NamedTuple):
    """When ops end.

    Attributes:
        seconds: the last op; of a play that was given up, at least that.
        made: by stage, when the last of its copies has its gradients; None: given up.
    """

    seconds: float
    made: tuple[float, ...] | None


class _Ways(NamedTuple):
    """What ops of one kind, stage and pipe take and send.

    Attributes:
        takes: when what they take is there; None: they wait for nothing but the op before them.
        gives: when what they make is there; None: nobody waits for it.
        target: the worker that takes it.
        lane: of the message, which also waits for its turn if it takes no time; None: there is none.
        latency: its seconds, ...
        per_work: ... and those of its bytes, for one micro-batch.
        stage: where they make weight gradients, of which stage; else -1.
    """

    takes: dict[_Key, float] | None
    gives: dict[_Key, float] | None
    target: int
    lane: int | None
    latency: float
    per_work: float
    stage: int


def may_play(schedule: Schedule, costs: Costs) -> bool:
    """Whether ``ops_alone`` knows all that these do: one message an op at most, beside compute."""
    return schedule.synchronous and not schedule.workload.skips and costs.overlap and not costs.ties


def ops_alone(
    schedule: Schedule, costs: Costs, *, limit: float = math.inf, tail: Sequence[float] | None = None
) -> Ended:
    """When the ops of a schedule end, if no gradients are summed.

    Args:
        schedule: one that ``may_play`` allows; the checker accepts it.
        costs: seconds; its syncs are left out.
        limit: seconds; a schedule that takes longer, with its tail, is given up.
        tail: of each worker, seconds that follow its last op.

    Raises:
        ScheduleError: an op's input is computed nowhere.
        DeadlockError: the workers wait for each other in a circle.
        ConfigError: costs that do not fit the schedule.
    """
    return _Play(timed(schedule), costs).run(limit, tail or (0.0,) * schedule.workers)


class _Play:
    def __init__(self, model: TimedSchedule, costs: Costs) -> None:
        self.model, self.schedule, self.costs = model, model.schedule, costs
        self.lasts = model.seconds(costs).tolist()
        self.ways: dict[tuple[OpKind, int, int], _Ways] = {}
        self.there: dict[tuple[Product, int, int], dict[_Key, float]] = {}
        self.free: list[float] = []
        self.lanes: dict[tuple[int, int], int] = {}
        self.sizes = per_stage("message_bytes", costs.message_bytes, self.schedule.stages)

    def run(self, limit: float, tail: Sequence[float]) -> Ended:  # noqa: C901, PLR0912 - no call an op
        """Every worker as far as it gets, in turns."""
        schedule, lasts, ways, free = self.schedule, self.lasts, self.ways, self.free
        ops, first = self.model.ops, self.model.first
        at_node = first[:-1].copy()
        clock = [0.0] * schedule.workers
        left = [sum(lasts[first[w] : first[w + 1]]) for w in range(schedule.workers)]
        made = [0.0] * schedule.stages
        waits: list[tuple[dict[_Key, float], _Key] | None] = [None] * schedule.workers
        one_at_a_time = self.costs.link is Link.ONE_AT_A_TIME
        ready = list(range(schedule.workers))[::-1]
        while ready:
            worker = ready.pop()
            node, stop, now, rest = at_node[worker], first[worker + 1], clock[worker], left[worker]
            most = limit - tail[worker]
            while node < stop:
                kind, of, batches, pipe, part, parts, _ = ops[node]
                way = ways.get((kind, of, pipe))
                if way is None:
                    way = self._way(worker, kind, of, pipe)
                takes, gives, target, lane, latency, per_work, stage = way
                key = batches, part, parts
                if takes is not None:
                    arrives = takes.get(key)
                    if arrives is None:
                        waits[worker] = takes, key
                        break
                    if arrives > now:
                        now = arrives
                        if now + rest > most:
                            return Ended(now + rest + tail[worker], None)
                seconds = lasts[node]
                now += seconds
                rest -= seconds
                if stage >= 0 and now > made[stage]:
                    made[stage] = now
                if gives is not None:
                    end = now
                    if lane is not None:
                        if one_at_a_time and free[lane] > end:
                            end = free[lane]
                        end += latency + per_work * (len(batches) / parts)
                        free[lane] = end
                    gives[key] = end
                    waiting = waits[target]
                    if waiting is not None and waiting[0] is gives and waiting[1] == key:
                        waits[target] = None
                        ready.append(target)
                node += 1
            at_node[worker], clock[worker], left[worker] = node, now, rest
        if at_node != first[1:]:
            raise DeadlockError(self.model.graph.describe_cycle())
        return Ended(max(clock), tuple(made))

    def _way(self, worker: int, kind: OpKind, stage: int, pipe: int) -> _Ways:
        holders = self.schedule.placement.pipes_stages[pipe]
        takes: dict[_Key, float] | None = None
        gives: dict[_Key, float] | None = None
        lane: int | None = None
        target, latency, per_work = worker, 0.0, 0.0
        if kind.takes is not None and 0 <= stage - kind.takes.goes < len(holders):
            takes = self.there.setdefault((kind.takes, pipe, stage), {})
        if kind.gives is not None and 0 <= stage + kind.gives.goes < len(holders):
            target = holders[stage + kind.gives.goes]
            gives = self.there.setdefault((kind.gives, pipe, stage + kind.gives.goes), {})
            boundary = min(stage, stage + kind.gives.goes)
        if gives is not None and target != worker:
            costs = self.costs
            latency = _of_link(costs.p2p, worker, target)
            per_work = _of_link(costs.p2p_per_byte, worker, target) * self.sizes[boundary]
            by = target if costs.ways is None else costs.ways[worker][target]
            lane = self.lanes.setdefault((worker, by), len(self.free))
            if lane == len(self.free):
                self.free.append(0.0)
        own = stage if Product.WEIGHT_GRADIENTS in kind.makes else -1
        found = _Ways(takes, gives, target, lane, latency, per_work, own)
        self.ways[kind, stage, pipe] = found
        return found


def _of_link(value: float | Sequence[Sequence[float]], sender: int, receiver: int) -> float:
    return float(value) if isinstance(value, (int, float)) else value[sender][receiver]
