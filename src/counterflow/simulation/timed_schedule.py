"""A schedule made ready to be timed: its lists as arrays, and where costs go in.

Kept for the last few schedules, so that trying many costs only fills in numbers. Ops and messages are played
by the player (``player.py``). The gradient syncs of a synchronous schedule follow them (``sync_times.py``);
those without one are played with them, as later ops wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from threading import Lock
from typing import NamedTuple

import numpy as np

from counterflow.errors import ConfigError, DeadlockError
from counterflow.program.sync import (
    GradientSync,
    by_last_backward,
    first_users,
    gradient_syncs,
    needs_sync,
    plan_syncs,
)
from counterflow.schedule.graph import OpGraph, outside
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.residency import peak_activations, version_lives

from .costs import Costs, Link, PerLink
from .lists import BEFORE, WHOLE, Columns, Messages, columns_of, lists_of, messages_of, sources_of, sums_of
from .memory import Changes
from .op_costs import Piece, per_stage, stage_bytes
from .player import Floats, Ints, Lasting, Lists, Sums, Times, play
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
    """How long everything takes that is played.

    Attributes:
        lasting: as the player reads it.
        sums: gradient syncs that ops wait for.
        travel: seconds of each message.
        waited: how long each message waits for earlier ones of its op.
        links: how many links carry one message at a time; 0: all carry any number.
    """

    lasting: Lasting
    sums: Sums
    travel: Floats
    waited: Floats
    links: int


class Awaited(NamedTuple):
    """The gradient syncs of an asynchronous schedule, which ops wait for.

    Attributes:
        syncs: in the order in which they run on each worker's lane.
        sums: the same for the player.
        users: a sync's number, and an op that waits for it.
    """

    syncs: list[GradientSync]
    sums: Sums
    users: list[tuple[int, int]]


class TimedSchedule:
    """A schedule's lists as arrays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops = list(schedule.ops())
        self.first = [0, *accumulate(map(len, schedule.orders))]
        """Each worker's first op, and one past the last of all."""
        self._links: dict[object, tuple[Ints, int]] = {}
        self._before: tuple[Lasting, Times] | None = None

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most forwards stashed at once on each worker, in (stage x micro-batch) units."""
        return peak_activations(self.schedule)

    @cached_property
    def graph(self) -> OpGraph:
        """What waits for what, op by op: a play does without, but can say no more of what is wrong."""
        return OpGraph(self.schedule)

    @cached_property
    def columns(self) -> Columns:
        """The ops by column."""
        return columns_of(self.ops, [len(order) for order in self.schedule.orders])

    @property
    def worker(self) -> Ints:
        """Of each op."""
        return self.columns.worker

    @cached_property
    def source(self) -> Ints:
        """The op whose product each op takes of another stage; -1: it takes none.

        Raises:
            ScheduleError: an op is of no stage or pipe, its input is computed nowhere, or it is there twice.
        """
        found = sources_of(self.schedule, self.columns)
        if found is None:
            found = np.array([-1 if s is None else s for s in self.graph.source], dtype=np.int64)
        return found

    @cached_property
    def messages(self) -> Messages:
        """Between workers."""
        return messages_of(self.source, self.worker, self.graph if self.schedule.workload.skips else None)

    @cached_property
    def several(self) -> bool:
        """Whether some op makes several messages."""
        return len(np.unique(self.messages.makers)) < len(self.messages.makers)

    @cached_property
    def sent(self) -> tuple[Ints, Floats]:
        """Of each message the stage whose output it is, or the gradient of that, and the work of its op."""
        makers = self.messages.makers
        ops = self.columns
        return (ops.stage - BEFORE[ops.kind])[makers], (ops.size / ops.parts)[makers]

    @cached_property
    def lists(self) -> Lists:
        """What is played.

        Raises:
            DeadlockError: an op waits for a later one of its own worker.
        """
        later = np.flatnonzero(self.source > np.arange(len(self.ops)))
        if (self.worker[self.source[later]] == self.worker[later]).any():
            raise DeadlockError(self.graph.describe_cycle())
        return lists_of(self.first, self.messages)

    @cached_property
    def _nothing_awaited(self) -> Sums:
        """No sums that ops wait for."""
        each, none = np.full(len(self.ops), -1, dtype=np.int64), np.empty(0, dtype=np.int64)
        return Sums(each, each, none, np.zeros(1, dtype=np.int64), none)

    @cached_property
    def awaited(self) -> Awaited:
        """If asynchronous, ops that use new weights, or fill the gradients anew, wait for the sync."""
        syncs, users = by_last_backward(self.schedule), first_users(self.schedule)
        found = Awaited(syncs, sums_of(self.first, syncs), [])
        for number, sync in enumerate(syncs):
            for worker in sync.workers:
                user = users.get((worker, sync.stage, sync.period))
                if user is not None:
                    found.users.append((number, self.first[worker] + user))
                    # Of several, all of one stage, the last one is there last.
                    found.sums.awaits[self.first[worker] + user] = number
        return found

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Of each op, those whose products it takes and that are there."""
        place = {op: node for node, op in enumerate(self.ops)}

        def needs(op: Op) -> tuple[Op, ...]:
            try:
                return self.schedule.workload.needs(op)
            except KeyError:  # of a schedule that is wrong
                return ()

        return tuple(tuple(place[need] for need in needs(op) if need in place) for op in self.ops)

    def links(self, costs: Costs) -> tuple[Ints, int]:
        """The link of each message, and how many there are: those of one sender that go one way are one."""
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
        """The different pieces of work, as they come, and of each op which of them it is.

        Raises:
            ScheduleError: an op is of no stage.
        """
        ops, schedule = self.columns, self.schedule
        if (ops.stage >= schedule.stages).any():
            raise outside(schedule, next(op for op in self.ops if op.stage >= schedule.stages))
        shares = {m: len(one.shares) for one in schedule.workload.passes for m in one.micro_batches}
        each = np.array([shares.get(m, 1) for m in ops.batch.tolist()], dtype=np.int64)
        each[~WHOLE[ops.kind]] = 1
        key = np.zeros(len(self.ops), dtype=np.int64)
        for column in (ops.kind, ops.stage, ops.worker, ops.size, ops.parts, each):
            key = key * (int(column.max(initial=0)) + 1) + column
        _, at, which = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(at)
        pieces = []
        for node in at[order].tolist():
            op, worker, shared = self.ops[node], int(ops.worker[node]), int(each[node])
            pieces.append(Piece(op.kind, op.stage, worker, len(op.micro_batches), op.parts, shared))
        return pieces, np.argsort(order)[which]

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
        bases = schedule.placement.summed(each.fixed)
        if schedule.synchronous:  # one version throughout
            bases = list(map(add, bases, schedule.placement.summed(each.weights)))
        for worker, first in enumerate(() if schedule.synchronous else self.first[:-1]):
            for stage, version, born, dies in version_lives(schedule, worker):
                if version and born >= 0:
                    versions[first + born] += each.weights[stage]
                elif version == 0:
                    bases[worker] += each.weights[stage]
                if dies is not None and dies >= 0:
                    versions[first + dies] -= each.weights[stage]
        return Changes(bases, added[:, 0], added[:, 1], versions)

    def synced(self, costs: Costs) -> bool:
        """Whether syncs matter to time: they take some, or asynchronous ops wait for all copies."""
        lasts = per_stage("sync", costs.sync, self.schedule.stages)
        return (any(lasts) or not self.schedule.synchronous) and needs_sync(self.schedule, costs.replicas)

    def play(self, costs: Costs, limit: float = math.inf, tail: Sequence[float] = ()) -> Played | None:
        """When everything starts and ends.

        Args:
            costs: seconds.
            limit: until when each worker's ops and its tail have to be over, in seconds.
            tail: by worker, the seconds that follow its last op; none: nothing does.

        Returns:
            None: some worker of a synchronous schedule is later than the limit.

        Raises:
            ScheduleError: an op's input is computed nowhere.
            DeadlockError: the workers wait for each other in a circle.
        """
        seconds = self.seconds(costs)
        played = self._play(costs, seconds, limit, tail)
        if played is not None and costs.sync_slowdown and len(played.syncs):
            beside = self._beside_syncs(played)
            if beside.any():
                return self._play(costs, seconds + costs.sync_slowdown * beside, limit, tail)
        return played

    def ready(self, costs: Costs, seconds: Floats) -> Ready:
        """What is played, if ops last ``seconds``."""
        free = costs.p2p == 0.0 and costs.p2p_per_byte == 0.0
        none = np.zeros(len(self.messages.makers))
        travel = none if free else self.message_seconds(costs)
        busy, waited = np.zeros(len(seconds)), none
        if not costs.overlap and not free:  # the messages of one op go one after another
            np.add.at(busy, self.messages.makers, travel)
            if self.several:
                waited = self.messages.before_of_op(travel)
        if free or costs.link is not Link.ONE_AT_A_TIME:
            apart = np.full(len(travel), -1, dtype=np.int64)
            lasting, links = Lasting(seconds, busy, travel + waited, none, apart, none[:0]), 0
        else:
            which, links = self.links(costs)
            lasting = Lasting(seconds, busy, waited, travel, which, none[:0])
        return Ready(lasting, self._nothing_awaited, travel, waited, links)

    def played(
        self,
        ready: Ready,
        at: tuple[Floats, Floats] | None = None,
        limit: float = math.inf,
        tail: Sequence[float] = (),
    ) -> Times | None:
        """When ops and messages are, if workers and links begin ``at`` some time; for the rest see ``play``.

        Returns:
            None: the limit was not kept.
        """
        begin = at or (np.zeros(self.schedule.workers), np.zeros(ready.links))
        rest = ready.lasting.ops
        if limit < math.inf:
            before = np.concatenate(([0.0], np.cumsum(rest)))
            done = before[self.first[1:]] + (tail or 0.0)
            rest = done[self.worker] - before[:-1]
        try:
            return play(self.lists, ready.sums, ready.lasting, begin, rest=rest, limit=limit)
        except DeadlockError:
            raise DeadlockError(self.graph.describe_cycle()) from None

    def _play(self, costs: Costs, seconds: Floats, limit: float, tail: Sequence[float]) -> Played | None:
        ready, synced = self.ready(costs, seconds), self.synced(costs)
        awaited = self.awaited.syncs if synced and not self.schedule.synchronous else []
        if awaited:
            lasts = np.array(per_stage("sync", costs.sync, self.schedule.stages))
            lasting = ready.lasting._replace(sums=lasts[[sync.stage for sync in awaited]])
            ready = ready._replace(lasting=lasting, sums=self.awaited.sums)
        times = self._kept(ready, limit, tail)
        if times is None:
            return None
        released = times.end + ready.lasting.busy
        if synced and self.schedule.synchronous:
            syncs = self._syncs_after(costs, times.start, released)
        else:
            labels = np.array([(float(sync.period), float(sync.stage)) for sync in awaited])
            syncs = np.column_stack((labels.reshape(-1, 2), times.begun, times.summed))
        sent = times.sent if ready.links else times.end[self.messages.makers] + ready.waited
        return Played(times.start, times.end, released, syncs, sent, sent + ready.travel)

    def _kept(self, ready: Ready, limit: float, tail: Sequence[float]) -> Times | None:
        """What is played; kept once: in synchronous schemes, sync modes differ in what comes after it."""
        known = self._before
        if known is not None and all(map(np.array_equal, known[0], ready.lasting)):
            return known[1]
        times = self.played(ready, limit=limit, tail=tail)
        if times is not None:
            self._before = ready.lasting, times
        return times

    def _beside_syncs(self, played: Played) -> Floats:
        """For how long each op runs beside a gradient sync of its worker."""
        start, end, syncs = played.start, played.end, played.syncs
        beside = np.zeros(len(start))
        first = self.first
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
        planned = plan_syncs(self.schedule, mode, start.tolist(), released.tolist(), self.gradient_syncs)
        lane = np.zeros(self.schedule.workers)
        times = sync_times(planned, released, self.first, lasts, lane, crossings=costs.sync_crossings)
        return np.array([(0.0, float(stage), begin, end) for stage, begin, end, _ in times]).reshape(-1, 4)

    @cached_property
    def gradient_syncs(self) -> tuple[GradientSync, ...]:
        """The syncs of every stage and period."""
        return gradient_syncs(self.schedule)


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
