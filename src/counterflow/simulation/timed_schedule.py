"""A schedule made ready to be timed: numbered nodes, what they wait for, and where costs go in.

Kept for the last few schedules, so that trying many costs only fills in numbers.
Nodes are the schedule's ops, its messages where links carry one at a time (``edges.py``), and, for an
asynchronous schedule whose syncs take time, one node for each gradient sync that later ops wait for.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import numpy as np

from counterflow.errors import ConfigError
from counterflow.program.sync import (
    GradientSync,
    by_last_backward,
    first_users,
    gradient_syncs,
    needs_sync,
    plan_syncs,
)
from counterflow.schedule.graph import OpGraph, outside
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.residency import peak_activations, version_lives

from .costs import Costs, Link, PerLink
from .edges import Edges, Messages, edges_of, messages_of, with_nodes
from .kernel import Floats, Ints
from .memory import Changes
from .op_costs import Piece, per_stage, stage_bytes
from .sync_times import sync_times

KEPT_MODELS = 8
"""Models kept, so that trying many costs on a few schedules builds each of them once."""

_kept: list[TimedSchedule] = []
_keeping = Lock()
"""Held while that list is looked at or changed: threads may simulate at one time."""


class Played(NamedTuple):
    """When everything of a schedule starts and ends.

    Attributes:
        start: of each op.
        end: of each op.
        released: when the worker goes on: later than at an op's end where it is busy with its message.
        syncs: (period, stage, start, end) rows of the gradient syncs that take time.
        sent: when each message begins to travel.
        arrived: when it has come.
    """

    start: Floats
    end: Floats
    released: Floats
    syncs: Floats
    sent: Floats
    arrived: Floats


class Ready(NamedTuple):
    """What is played, with its costs.

    Attributes:
        edges: what waits for what.
        delay: by edge.
        lasts: seconds of each op, and, where links are lanes, of each message.
        busy: how long each op's worker is busy with its messages after it.
        travel: seconds of each message.
        waited: how long each message waits for earlier ones of its op.
        lanes: whether messages are nodes.
    """

    edges: Edges
    delay: Floats
    lasts: Floats
    busy: Floats
    travel: Floats
    waited: Floats | float
    lanes: bool


class TimedSchedule:
    """A schedule's dependencies as arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops = list(schedule.ops())
        self.first = [0, *accumulate(map(len, schedule.orders))]
        """Each worker's first op, and one past the last of all."""
        self._lanes: dict[object, Edges] = {}
        self._before: tuple[Edges, Floats, Floats, Floats, Floats] | None = None
        self.border: tuple[Edges, Edges, Ints] | None = None
        """For ``steady``: edges, the same with what is before and after a step, and whose delay each has."""

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most forwards stashed at once on each worker, in (stage x micro-batch) units."""
        return peak_activations(self.schedule)

    @cached_property
    def graph(self) -> OpGraph:
        """What waits for what; memory can be told without."""
        return OpGraph(self.schedule)

    @cached_property
    def worker(self) -> Ints:
        """Of each op."""
        return np.repeat(np.arange(self.schedule.workers, dtype=np.int64), np.diff(self.first))

    @cached_property
    def messages(self) -> Messages:
        """Between workers."""
        return messages_of(self.graph)

    @cached_property
    def several(self) -> bool:
        """Whether some op makes several messages."""
        return len(np.unique(self.messages.makers)) < len(self.messages.makers)

    @cached_property
    def sent(self) -> tuple[Ints, Floats]:
        """Of each message the stage whose output it is, or the gradient of that, and the work of its op."""
        made = [self.ops[node] for node in self.messages.makers.tolist()]
        outputs = [op.boundary for op in made]
        return np.array(outputs, dtype=np.int64), np.array([op.work for op in made], dtype=np.float64)

    @cached_property
    def free(self) -> Edges:
        """What waits for what, on links that carry any number of messages at once."""
        return edges_of(self.graph, self.messages, links=None)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Of each op, those whose products it takes and that are there."""
        place = {op: node for node, op in enumerate(self.graph.ops)}

        def needs(op: Op) -> tuple[Op, ...]:
            try:
                return self.schedule.workload.needs(op)
            except KeyError:  # of a schedule that is wrong
                return ()

        return tuple(tuple(place[need] for need in needs(op) if need in place) for op in self.graph.ops)

    def links(self, costs: Costs) -> Ints:
        """The link of each message."""
        messages, workers = self.messages, self.schedule.workers
        if costs.ways is None:
            return messages.senders * workers + messages.receivers
        ways = np.array(costs.ways, dtype=np.int64)
        if ways.shape != (workers, workers):
            raise ConfigError(f"ways: a table of shape {ways.shape} for {workers} workers")
        found: Ints = messages.senders * (int(ways.max()) + 1) + ways[messages.senders, messages.receivers]
        return found

    def lanes(self, costs: Costs) -> Edges:
        """What waits for what, on links that carry one message at a time."""
        key = None if costs.ways is None else tuple(map(tuple, costs.ways))
        if key not in self._lanes:
            self._lanes[key] = edges_of(self.graph, self.messages, links=self.links(costs))
        return self._lanes[key]

    @cached_property
    def pieces(self) -> tuple[list[Piece], Ints]:
        """The different pieces of work, and of each op which of them it is.

        Raises:
            ScheduleError: an op is of no stage.
        """
        shares = {m: len(one.shares) for one in self.schedule.workload.passes for m in one.micro_batches}
        numbers: dict[tuple[OpKind, int, int, int, int, int], int] = {}
        which = []
        for (kind, stage, batches, _, _, parts, _), worker in zip(
            self.ops, self.worker.tolist(), strict=True
        ):
            each = shares.get(batches[0], 1) if kind.whole else 1
            key = kind, stage, worker, len(batches), parts, each
            which.append(numbers.setdefault(key, len(numbers)))
        if any(stage >= self.schedule.stages for _, stage, *_ in numbers):
            raise outside(self.schedule, next(op for op in self.ops if op.stage >= self.schedule.stages))
        return [Piece(*key) for key in numbers], np.array(which, dtype=np.int64)

    def seconds(self, costs: Costs) -> Floats:
        """How long each op lasts.

        Raises:
            ConfigError: something takes less than no time.
        """
        pieces, which = self.pieces
        ops = costs.of_ops(self.schedule.stages)
        lasts = np.array([ops.seconds(piece) for piece in pieces])
        if costs.ops is not None and not (np.isfinite(lasts).all() and (lasts >= 0).all()):
            odd = next(p for p, s in zip(pieces, lasts.tolist(), strict=True) if not 0 <= s < float("inf"))
            raise ConfigError(f"{odd} takes {ops.seconds(odd)} seconds: must be finite, 0 or more")
        found: Floats = lasts[which]
        return found

    def message_seconds(self, costs: Costs) -> Floats:
        """How long each message travels."""
        seconds = self._by_message("p2p", costs.p2p)
        if costs.p2p_per_byte == 0.0:
            return seconds
        sizes = np.array(per_stage("message_bytes", costs.message_bytes, self.schedule.stages))
        outputs, work = self.sent
        sent: Floats = sizes[outputs]
        by_skip = self.messages.skips >= 0
        if by_skip.any():
            skips = self.schedule.workload.skips
            if not isinstance(costs.skip_bytes, (int, float)) and len(costs.skip_bytes) != len(skips):
                raise ConfigError(
                    f"skip_bytes: {len(costs.skip_bytes)} numbers for {len(skips)} skips; give one "
                    "number, or one a skip"
                )
            each = np.broadcast_to(np.array(costs.skip_bytes, dtype=np.float64), (len(skips),))
            sent[by_skip] = each[self.messages.skips[by_skip]]
        sent *= work
        return seconds + self._by_message("p2p_per_byte", costs.p2p_per_byte) * sent

    def _by_message(self, name: str, value: PerLink) -> Floats:
        """A cost of links for each message."""
        if isinstance(value, (int, float)):
            return np.full(len(self.messages.makers), float(value))
        links = np.array(value, dtype=np.float64)
        if links.shape != (self.schedule.workers,) * 2:
            raise ConfigError(
                f"{name}: a table of shape {links.shape} for {self.schedule.workers} workers; "
                "give one number, or one row of numbers a worker"
            )
        return links[self.messages.senders, self.messages.receivers]

    def changes(self, costs: Costs) -> Changes:
        """What changes each worker's memory; ``costs.memory`` is set."""
        assert costs.memory is not None
        schedule = self.schedule
        pieces, which = self.pieces
        ops = costs.of_ops(schedule.stages)
        added = np.array([ops.bytes(piece) for piece in pieces]).reshape(-1, 2)[which]
        each = stage_bytes(costs.memory, Recompute(costs.recompute), schedule.stages)
        versions = np.zeros(len(which))
        bases = []
        for worker in range(schedule.workers):
            base = sum(each.fixed[stage] for _, stage in schedule.placement.held(worker))
            first = self.first[worker]
            if schedule.synchronous:  # one version throughout
                base += sum(each.weights[stage] for _, stage in schedule.placement.held(worker))
            else:
                for stage, version, born, dies in version_lives(schedule, worker):
                    if version and born >= 0:
                        versions[first + born] += each.weights[stage]
                    elif version == 0:
                        base += each.weights[stage]
                    if dies is not None and dies >= 0:
                        versions[first + dies] -= each.weights[stage]
            bases.append(base)
        return Changes(bases, added[:, 0], added[:, 1], versions)

    def synced(self, costs: Costs) -> bool:
        """Whether syncs matter to time: they take some, or, without a flush, ops wait for all copies."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        return (any(lasts) or not self.schedule.synchronous) and needs_sync(self.schedule, costs.replicas)

    def play(self, costs: Costs) -> Played:
        """When everything starts and ends."""
        seconds = self.seconds(costs)
        played = self._play(costs, seconds)
        if costs.sync_slowdown and len(played.syncs):
            beside = self._beside_syncs(played)
            if beside.any():
                played = self._play(costs, seconds + costs.sync_slowdown * beside)
        return played

    def ready(self, costs: Costs, seconds: Floats) -> Ready:
        """What is played, if ops last ``seconds``."""
        free = costs.p2p == 0.0 and costs.p2p_per_byte == 0.0
        travel = np.zeros(len(self.messages.makers)) if free else self.message_seconds(costs)
        lanes = not free and costs.link is Link.ONE_AT_A_TIME
        edges = self.lanes(costs) if lanes else self.free
        delay = np.zeros(len(edges.sources))
        if not free and not lanes:
            delay[edges.travel] = travel
        ops = len(seconds)
        busy = np.zeros(ops)
        waited: Floats | float = 0.0
        if not costs.overlap and not free:  # the messages of one op go one after another
            np.add.at(busy, self.messages.makers, travel)
            delay[edges.busy] = busy[edges.senders]
            if self.several:
                waited = self.messages.before_of_op(travel)
                delay[edges.travel] += waited
        lasts = np.concatenate((seconds, travel)) if lanes else seconds
        return Ready(edges, delay, lasts, busy, travel, waited, lanes)

    def _play(self, costs: Costs, seconds: Floats) -> Played:
        ready = self.ready(costs, seconds)
        edges, delay, lasts, busy, travel, waited, lanes = ready
        ops = len(seconds)
        syncs = np.empty((0, 4))
        if self.synced(costs) and not self.schedule.synchronous:
            longer, delays, all_seconds, ordered = self.with_syncs(costs, ready)
            start, end = longer.play(delays, all_seconds)
            begin, until = start[len(lasts) :], end[len(lasts) :]
            rows = [
                (float(s.period), float(s.stage), *at) for s, *at in zip(ordered, begin, until, strict=True)
            ]
            syncs = np.array(rows).reshape(-1, 4)
        else:
            start, end = self._ops_played(edges, delay, lasts)
        sent = start[ops : ops + len(travel)] if lanes else end[self.messages.makers] + waited
        start, end = start[:ops], end[:ops]
        if self.synced(costs) and self.schedule.synchronous:
            syncs = self._syncs_after(costs, start, end + busy)
        return Played(start, end, end + busy, syncs, sent, sent + travel)

    def _ops_played(self, edges: Edges, delay: Floats, lasts: Floats) -> tuple[Floats, Floats]:
        """Start and end of ops and messages; kept once, since sync modes differ in what comes after them."""
        known = self._before
        if known is None or known[0] is not edges or not _equal(known[1], delay, known[2], lasts):
            self._before = known = edges, delay, lasts, *edges.play(delay, lasts)
        return known[3], known[4]

    def _beside_syncs(self, played: Played) -> Floats:
        """For how long each op runs beside a gradient sync of its worker."""
        start, end, syncs = played.start, played.end, played.syncs
        beside = np.zeros(len(start))
        first = self.graph.first
        for _, stage, begins, ends in syncs.tolist():
            for worker in {w for _, w in self.schedule.placement.copies(int(stage))}:
                nodes = slice(first[worker], first[worker + 1])
                both = np.minimum(end[nodes], ends) - np.maximum(start[nodes], begins)
                beside[nodes] += np.maximum(both, 0.0)
        return beside

    def _syncs_after(self, costs: Costs, start: Floats, released: Floats) -> Floats:
        """Syncs on the lane beside each worker's compute; nothing waits for them but the update."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        mode = Sync(costs.sync_mode)
        planned = plan_syncs(self.graph, mode, start.tolist(), released.tolist(), self.gradient_syncs)
        lane = np.zeros(self.schedule.workers)
        times = sync_times(planned, released, self.graph.first, lasts, lane, crossings=costs.sync_crossings)
        return np.array([(0.0, float(stage), begin, end) for stage, begin, end, _ in times]).reshape(-1, 4)

    @cached_property
    def gradient_syncs(self) -> tuple[GradientSync, ...]:
        """The syncs of every stage and period."""
        return gradient_syncs(self.schedule)

    def with_syncs(self, costs: Costs, ready: Ready) -> tuple[Edges, Floats, Floats, list[GradientSync]]:
        """Asynchronous: ops that use new weights, or fill the gradients anew, wait for the sync.

        Returns:
            What waits for what with the syncs as further nodes, delays, seconds, and the syncs.
        """
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        ops, first, busy = len(ready.lasts), self.graph.first, ready.busy
        users = first_users(self.schedule)
        lane: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        added: list[list[tuple[int, float]]] = []
        ordered = by_last_backward(self.schedule)
        for sync in ordered:
            node = ops + len(added)
            ends = [first[worker] + last for worker, last in sync.last if last is not None]
            sources = [(end, float(busy[end])) for end in ends]
            sources += [(lane[worker], 0.0) for worker in sync.workers if worker in lane]
            added.append(sources)
            for worker in sync.workers:
                lane[worker] = node
                user = users.get((worker, sync.stage, sync.period))
                if user is not None:
                    waiting.setdefault(first[worker] + user, []).append(node)
        longer, delays = with_nodes(ready.edges, ready.delay, waiting, added)
        return longer, delays, np.concatenate((ready.lasts, [lasts[s.stage] for s in ordered])), ordered


def _equal(one: Floats, other: Floats, third: Floats, fourth: Floats) -> bool:
    return np.array_equal(one, other) and np.array_equal(third, fourth)


def timed(schedule: Schedule) -> TimedSchedule:
    """The schedule's model; those of the last few schedules are kept."""
    with _keeping:
        for place, kept in enumerate(_kept):
            if kept.schedule is schedule:
                _kept.append(_kept.pop(place))
                return kept
    model = TimedSchedule(schedule)
    with _keeping:
        _kept.append(model)
        del _kept[:-KEPT_MODELS]
    return model
