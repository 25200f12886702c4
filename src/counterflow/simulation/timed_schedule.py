"""A schedule prepared for timing: its lists as arrays, and where costs are filled in.

Trying many costs on a schedule only fills in numbers. Ops and messages are played by the player
(``program/player.py``). The gradient syncs of a synchronous schedule follow them (``sync_times.py``); those
of an asynchronous one are played with them, as later ops wait for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count, starmap
from operator import add
from typing import Any, NamedTuple

import numpy as np

from counterflow.errors import ConfigError
from counterflow.program.lists import Messages, lists_of_ops, messages_of, refuse_stuck, spread
from counterflow.program.player import Floats, Ints, Lasting, ListArrays, Times, play
from counterflow.program.sync import (
    GradientSync,
    gradient_syncs,
    needs_sync,
    plan_syncs,
)
from counterflow.schedule.graph import Nodes, OpGraph, outside
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.op import boundary
from counterflow.schedule.residency import peak_activations, version_lives

from .awaited_syncs import Awaited, awaited_syncs
from .costs import Costs, Link, stage_bytes
from .lanes import LaneLists, lane_lists
from .memory import Changes
from .op_costs import Piece, per_stage
from .pair_times import exchanging, pair_nodes, with_pairs_at_once
from .sync_times import sync_times
from .travel import travel_seconds


class Played(NamedTuple):
    """Start and end of everything in a schedule.

    Attributes:
        start: start of each op.
        end: end of each op.
        released: time when the worker continues: later than the op's end if it is busy with a message.
        syncs: (period, stage, start, end) rows of the gradient syncs that take time.
        sent: time when each message begins to travel.
        arrived: time when each message is received.
    """

    start: Floats
    end: Floats
    released: Floats
    syncs: Floats
    sent: Floats
    arrived: Floats


class Ready(NamedTuple):
    """Durations of everything that is played.

    Attributes:
        lists: the lists to play: the workers' orders, and in asynchronous schedules the syncs.
        lasting: durations, as the player reads them.
        travel: seconds of each message.
        waited: seconds that each message waits for earlier ones of its op.
        links: number of links that carry one message at a time; 0: all carry any number.
        lanes: number of these links and of lanes of ops other than compute.
    """

    lists: ListArrays
    lasting: Lasting
    travel: Floats
    waited: Floats
    links: int
    lanes: int


class TimedSchedule:
    """A schedule's lists as arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.nodes = schedule, Nodes(schedule)
        self.ops, self.first = self.nodes.ops, self.nodes.first
        self._links: dict[object, tuple[Ints, int]] = {}
        self._before: tuple[Lasting, Times] | None = None
        self._silent: tuple[Floats, tuple[list[float], list[float]]] | None = None

    @cached_property
    def worker(self) -> Ints:
        """Worker of each op."""
        return np.array(self.nodes.worker, dtype=np.int64)

    @cached_property
    def graph(self) -> OpGraph:
        """The dependencies of the ops.

        Raises:
            ScheduleError: an op's stage or pipe does not exist, its input is computed nowhere, or it exists
                twice.
        """
        return OpGraph(self.schedule, self.nodes)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Maximum forwards stashed at once on each worker, in (stage x micro-batch) units."""
        return peak_activations(self.schedule)

    @cached_property
    def messages(self) -> Messages:
        """The messages between workers."""
        return messages_of(self.graph)

    @cached_property
    def sent(self) -> tuple[Ints, Floats]:
        """Stage whose output or output gradient each message contains, and the work of its op."""
        pieces, which = self.pieces
        made_by = which[self.messages.makers]
        stages = np.array([boundary(piece.kind, piece.stage) for piece in pieces], dtype=np.int64)
        return stages[made_by], np.array([piece.work for piece in pieces])[made_by]

    @cached_property
    def lists(self) -> ListArrays:
        """The workers' orders.

        Raises:
            DeadlockError: an op waits for a later one of its own worker.
        """
        lists = lists_of_ops(self.graph, self.messages)
        return lists if self.lane_lists is None else self.lane_lists.lists

    @cached_property
    def lane_lists(self) -> LaneLists | None:
        """The orders with ops on other lanes than compute; None: there are none.

        Raises:
            ConfigError: the schedule is asynchronous.
        """
        lists = lane_lists(self.nodes, self.messages)
        if lists is not None and not self.schedule.synchronous:
            raise ConfigError(f"{self.schedule}: ops on lanes of their own need a synchronous schedule")
        return lists

    @cached_property
    def awaited(self) -> Awaited:
        """The syncs of an asynchronous schedule: ops that use new weights, or begin new gradients, wait for
        them.
        """
        return awaited_syncs(self.nodes, self.messages)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the existing ops whose products it takes."""
        place = {op: node for node, op in enumerate(self.ops)}

        def needs(op: Op) -> tuple[Op, ...]:
            try:
                return self.schedule.workload.needs(op)
            except KeyError:  # in a schedule that is wrong
                return ()

        return tuple(tuple(place[need] for need in needs(op) if need in place) for op in self.ops)

    def links(self, costs: Costs) -> tuple[Ints, int]:
        """The link of each message, and the number of links; links of one sender that share a way are one."""
        key = None if costs.ways is None else tuple(map(tuple, costs.ways))
        if key not in self._links:
            messages, workers = self.messages, self.schedule.workers
            way, ways = messages.receivers, workers
            if costs.ways is not None:
                table = np.array(costs.ways, dtype=np.int64)
                if table.shape != (workers, workers):
                    raise ConfigError(f"ways: a table of shape {table.shape} for {workers} workers")
                way, ways = table[messages.senders, messages.receivers], int(table.max()) + 1
            used, which = np.unique(messages.senders * ways + way, return_inverse=True)
            self._links[key] = which, len(used)
        return self._links[key]

    @cached_property
    def pieces(self) -> tuple[list[Piece], Ints]:
        """The distinct pieces of work in order of appearance, and the piece of each op.

        Raises:
            ScheduleError: an op's stage does not exist.
        """
        shares = {
            m: len(batch.shares) for batch in self.schedule.workload.passes for m in batch.micro_batches
        }
        stages = range(self.schedule.stages)
        kinds, of, batches, _, part, parts, _ = self.nodes.columns
        backwards, workload = [1] * len(self.ops), self.schedule.workload
        lengths = workload.lengths
        if len(lengths) == 1:
            part = [0] * len(self.ops)
        # A sliced forward has one backward: that of its own slice.
        if len(lengths) == 1 and any(several > 1 for several in shares.values()):
            backwards = [shares.get(op.micro_batches[0], 1) if op.kind.is_forward else 1 for op in self.ops]
        numbers: defaultdict[tuple[Any, ...], int] = defaultdict(count().__next__)
        keys = zip(kinds, of, self.nodes.worker, map(len, batches), parts, backwards, part, strict=True)
        which = np.fromiter(map(numbers.__getitem__, keys), dtype=np.int64, count=len(self.ops))
        if not all(key[1] in stages for key in numbers):
            raise outside(self.schedule, next(op for op in self.ops if op.stage not in stages))
        piece = partial(Piece, lengths=lengths, recomputed=workload.recomputes)
        return list(starmap(piece, numbers)), which

    def seconds(self, costs: Costs) -> Floats:
        """Duration of each op; ops that run at once share the duration of their pair.

        Raises:
            ConfigError: a duration is negative or not finite.
        """
        pieces, which = self.pieces
        ops = costs.of_ops(self.schedule.stages)
        lasts = np.array([ops.seconds(piece) for piece in pieces])
        if costs.ops is not None and not (np.isfinite(lasts).all() and (lasts >= 0).all()):
            odd = next(p for p, s in zip(pieces, lasts.tolist(), strict=True) if not 0 <= s < float("inf"))
            raise ConfigError(f"{odd} takes {ops.seconds(odd)} seconds: must be finite, 0 or more")
        durations: Floats = lasts[which]
        if self._pairs and costs.all_to_all != 0.0:
            exchanges = [
                exchanging(piece, seconds, costs, self.schedule.stages)
                for piece, seconds in zip(pieces, lasts.tolist(), strict=True)
            ]
            return with_pairs_at_once(durations, self._pairs, exchanges, which.tolist())
        return durations

    @cached_property
    def _pairs(self) -> list[list[list[int]]]:
        return pair_nodes(self.schedule, self.first, self.ops)

    def changes(self, costs: Costs) -> Changes:
        """Changes of each worker's memory; ``costs.memory`` is set."""
        assert costs.memory is not None
        schedule = self.schedule
        pieces, which = self.pieces
        ops = costs.of_ops(schedule.stages)
        added = np.array([ops.bytes(piece) for piece in pieces]).reshape(-1, 2)[which]
        table = stage_bytes(costs.memory, Recompute(costs.recompute), schedule.stages)
        versions = np.zeros(len(which))
        weights = [stage.weights for stage in table]
        bases = schedule.placement.summed([stage.fixed for stage in table])
        if schedule.synchronous:  # one version exists throughout
            bases = list(map(add, bases, schedule.placement.summed(weights)))
        for worker, first in enumerate(() if schedule.synchronous else self.first[:-1]):
            for stage, version, born, dies in version_lives(schedule, worker):
                if version and born >= 0:
                    versions[first + born] += weights[stage]
                elif version == 0:
                    bases[worker] += weights[stage]
                if dies is not None and dies >= 0:
                    versions[first + dies] -= weights[stage]
        return Changes(bases, added[:, 0], added[:, 1], versions)

    def synced(self, costs: Costs) -> bool:
        """True if syncs affect times: they take time, or asynchronous ops wait for all copies."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        return (any(lasts) or not self.schedule.synchronous) and needs_sync(self.schedule, costs.replicas)

    def play(self, costs: Costs, limit: float = math.inf, tail: Sequence[float] = ()) -> Played | None:
        """Start and end of everything.

        Args:
            costs: seconds.
            limit: time by which each worker's ops and its tail have to end, in seconds.
            tail: by worker, the seconds that follow its last op; empty: none.

        Returns:
            None: a worker of a synchronous schedule exceeds the limit.

        Raises:
            ScheduleError: an op's input is computed nowhere.
            DeadlockError: the workers wait for each other in a circle.
        """
        seconds = self.seconds(costs)
        played = self._play(costs, seconds, limit, tail)
        if played is not None and costs.sync_slowdown and len(played.syncs):
            overlaps = self.sync_overlaps(played)
            if overlaps.any():
                return self._play(costs, seconds, limit, tail, costs.sync_slowdown * overlaps)
        return played

    def placing_times(
        self, costs: Costs, seconds: Floats, start: Floats, released: Floats
    ) -> tuple[list[float], list[float]]:
        """Start and end of each op by which a synchronous schedule's syncs are placed.

        ``eager-opt`` looks for bubbles of the order itself, so it has the times of ops that take ``seconds``
        if messages take no time. Otherwise an op that waits for a message would be a bubble, however short.

        Args:
            costs: costs of the play.
            seconds: each op's, if no sync slows it.
            start: start of each op in the play.
            released: when each op's worker goes on.
        """
        silent = costs.p2p == 0.0 and costs.p2p_per_byte == 0.0
        if Sync(costs.sync_mode) is not Sync.EAGER_OPT or (silent and not costs.sync_slowdown):
            return start.tolist(), released.tolist()
        if self._silent is None or not np.array_equal(self._silent[0], seconds):
            none = np.zeros(len(self.messages.makers))
            no_link = np.full(len(none), -1, dtype=np.int64)
            lasting = Lasting(seconds, np.zeros(len(seconds)), none, none, no_link)
            times = self.played(self._ready(lasting, none, none, 0))
            assert times is not None  # because no limit was given
            self._silent = seconds, (times.start.tolist(), times.end.tolist())
        return self._silent[1]

    def ready(self, costs: Costs, seconds: Floats) -> Ready:
        """The lists and durations if ops last ``seconds``; in asynchronous schedules including the syncs."""
        durations = self.ready_ops(costs, seconds)
        awaited = self.synced(costs) and not self.schedule.synchronous
        return self._with_syncs(costs, durations) if awaited else durations

    def ready_ops(self, costs: Costs, seconds: Floats) -> Ready:
        """The lists and durations of ops and messages alone."""
        free = costs.p2p == 0.0 and costs.p2p_per_byte == 0.0
        none = np.zeros(len(self.messages.makers))
        travel = none if free else travel_seconds(costs, self.schedule, self.messages, self.sent)
        busy, waited = np.zeros(len(seconds)), none
        if not costs.overlap and not free:  # messages of one op travel one after another
            np.add.at(busy, self.messages.sent_after, travel)
            waited = self.messages.before_of_op(travel)
        if free or costs.link is not Link.ONE_AT_A_TIME:
            no_link = np.full(len(travel), -1, dtype=np.int64)
            lasting, links = Lasting(seconds, busy, travel + waited, none, no_link), 0
        else:
            which, links = self.links(costs)
            lasting = Lasting(seconds, busy, waited, travel, which)
        return self._ready(lasting, travel, waited, links)

    def _ready(self, lasting: Lasting, travel: Floats, waited: Floats, links: int) -> Ready:
        if self.lane_lists is None:
            return Ready(self.lists, lasting, travel, waited, links, links)
        lasting = self.lane_lists.lasting(lasting, links)
        return Ready(self.lists, lasting, travel, waited, links, links + self.lane_lists.count)

    def _with_syncs(self, costs: Costs, ready: Ready) -> Ready:
        syncs, lists, places = self.awaited
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        seconds = np.concatenate((np.zeros(len(self.ops)), [lasts[sync.stage] for sync in syncs]))
        ops = np.arange(len(seconds))
        ops[len(self.ops) :] = -1
        return ready._replace(lists=lists, lasting=spread(ready.lasting, lists, ops, places, seconds))

    def played(
        self,
        ready: Ready,
        at: tuple[Floats, Floats] | None = None,
        limit: float = math.inf,
        tail: Sequence[float] = (),
    ) -> Times | None:
        """Times of ops and messages if lists and links begin at ``at``; for the other arguments see ``play``.

        Returns:
            None: the limit was exceeded.
        """
        begin = at or (np.zeros(len(ready.lists.first) - 1), np.zeros(ready.lanes))
        rest = None
        if limit < math.inf:
            before = np.concatenate(([0.0], np.cumsum(ready.lasting.nodes)))
            done = before[self.first[1:]] + (tail or 0.0)
            rest = done[self.worker] - before[:-1]
        times = play(ready.lists, ready.lasting, begin, rest=rest, limit=limit)
        if times is not None:
            refuse_stuck(self.graph, ready.lists, times)
            if self.lane_lists is not None:
                return self.lane_lists.times(times, ready.lasting)
        return times

    def _play(
        self,
        costs: Costs,
        seconds: Floats,
        limit: float,
        tail: Sequence[float],
        more: Floats | float = 0.0,
    ) -> Played | None:
        ready = self.ready(costs, seconds + more)
        times = self._played_once(ready, limit, tail)
        if times is None:
            return None
        ops = len(self.ops)
        start, end = times.start[:ops], times.end[:ops]
        released = end + ready.lasting.busy[:ops]
        if not self.synced(costs):
            syncs = np.empty((0, 4))
        elif self.schedule.synchronous:
            placing = self.placing_times(costs, seconds, start, released)
            syncs = self._syncs_after(costs, placing, released)
        else:
            labels = [(float(sync.period), float(sync.stage)) for sync in self.awaited.syncs]
            syncs = np.column_stack((np.array(labels).reshape(-1, 2), times.start[ops:], times.end[ops:]))
        sent = end[self.messages.sent_after] + ready.waited
        if ready.links:
            sent = times.sent
            if ready.lists is not self.lists:
                sent = sent[self.awaited.places >= 0]
            elif self.lane_lists is not None:
                sent = sent[self.lane_lists.places >= 0]
        return Played(start, end, released, syncs, sent, sent + ready.travel)

    def _played_once(self, ready: Ready, limit: float, tail: Sequence[float]) -> Times | None:
        # Sync modes differ only in what follows.
        known = self._before
        if known is not None and all(map(np.array_equal, known[0], ready.lasting)):
            return known[1]
        times = self.played(ready, limit=limit, tail=tail)
        if times is not None:
            self._before = ready.lasting, times
        return times

    def sync_overlaps(self, played: Played) -> Floats:
        """Seconds that each op overlaps with a gradient sync of its worker."""
        start, end, syncs = played.start, played.end, played.syncs
        overlaps = np.zeros(len(start))
        first = self.first
        for _, stage, begins, ends in syncs.tolist():
            for worker in {w for _, w in self.schedule.placement.copies(int(stage))}:
                nodes = slice(first[worker], first[worker + 1])
                both = np.minimum(end[nodes], ends) - np.maximum(start[nodes], begins)
                overlaps[nodes] += np.maximum(both, 0.0)
        return overlaps

    def _syncs_after(
        self, costs: Costs, placing: tuple[list[float], list[float]], released: Floats
    ) -> Floats:
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        mode = Sync(costs.sync_mode)
        planned = plan_syncs(self.schedule, mode, *placing, self.gradient_syncs)
        # In parallel with each worker's compute; only the update waits for it.
        lane = np.zeros(self.schedule.workers)
        times = sync_times(planned, released, self.first, lasts, lane, crossings=costs.sync_crossings)
        return np.array([(0.0, float(stage), begin, end) for stage, begin, end, _ in times]).reshape(-1, 4)

    @cached_property
    def gradient_syncs(self) -> tuple[GradientSync, ...]:
        """The syncs of every stage and period."""
        return gradient_syncs(self.schedule)
