"""Play of lists of calls under the rules of a transport: all end, or the ranks wait in a circle.

The lists become those of the program's player, which are played without durations: a play that gets stuck
does so in any order and at any speed. Under NCCL's order a rank is its device's queue of work, and each of
its streams is a list beside it. The other rules have one list a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from counterflow.program.lists import instant, played
from counterflow.program.player import ListArrays, Times

from .calls import CallLists, CallSide, CallStep, PartId
from .pairing import Pairs, pairs_of


class TransportRule(Enum):
    """A rule under which calls wait for each other.

    ``EAGER``: a send never waits; what takes a message waits for it. ``RENDEZVOUS``: a send holds its rank
    until its receive is posted. ``NCCL``: calls of one communicator run one after another in their rank's
    stream, each until both sides ran; no rank is held. ``ONE_QUEUE``: so, and nothing begins before all that
    its rank launched earlier has begun, as with ``CUDA_DEVICE_MAX_CONNECTIONS=1``. ``BLOCKING``: each call
    holds its rank until it is complete, as with ``CUDA_LAUNCH_BLOCKING=1``. ``FIRST_USE``: so does each call,
    and the first one of a connection moves nothing before both sides have called, in all parts of a batch.
    """

    EAGER = "eager sends"
    RENDEZVOUS = "rendezvous sends"
    NCCL = "NCCL's order"
    ONE_QUEUE = "NCCL's order, one hardware queue"
    BLOCKING = "launch-blocking"
    FIRST_USE = "launch-blocking, connections at first use"

    @property
    def by_name(self) -> bool:
        """True if messages are matched by name, not by order alone."""
        return self in (TransportRule.EAGER, TransportRule.RENDEZVOUS)

    @property
    def has_streams(self) -> bool:
        """True if calls run in streams, beside their rank."""
        return self in (TransportRule.NCCL, TransportRule.ONE_QUEUE)


def rules_of(lists: CallLists) -> tuple[TransportRule, ...]:
    """The rules that apply to lists."""
    return tuple(rule for rule in TransportRule if rule is not TransportRule.FIRST_USE or not lists.connected)


class Happening(Enum):
    """An event for which a list waits."""

    SENT = "sent"
    POSTED = "posted"
    CALLED = "called"
    BEGUN = "begun"
    ENTERED = "entered"
    DISPATCHED = "dispatched"
    DONE = "done"
    COMPUTED = "computed"

    __hash__ = object.__hash__  # in a play's innermost loops; that of Enum is written in Python


Event = tuple[Happening, PartId]


@dataclass(slots=True)
class _Queue:
    rank: int
    stream: str = ""
    steps: list[int] = field(default_factory=list)
    takes: list[list[Event]] = field(default_factory=list)
    makes: list[list[Event]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def node(self, position: int, takes: list[Event], makes: list[Event], seconds: float = 0.0) -> None:
        self.steps.append(position)
        self.takes.append(takes)
        self.makes.append(makes)
        self.seconds.append(seconds)


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that waits.

    Attributes:
        rank: its rank.
        position: its place in the rank's list, from 0.
        queued: True if it waits in a stream, not on the rank itself.
        event: the event that it waits for; None: its other side does not exist.
        awaited_rank: the rank that makes the event.
        awaited: the place, in that rank's list, of the step that makes the event; -1: none.
    """

    rank: int
    position: int
    queued: bool
    event: Happening | None
    awaited_rank: int
    awaited: int


@dataclass(frozen=True, slots=True)
class WaitPlay:
    """Play of lists under a rule.

    Attributes:
        rule: the rule.
        waits: the steps that wait for each other in a circle, or, if not ``closed``, for what never happens;
            empty if all lists end.
        closed: True if the waits are a circle.
        progress: number of nodes that were played.
        makespan: end of the play, in the time of a forward, if it was played with durations.
    """

    rule: TransportRule
    waits: tuple[Wait, ...]
    closed: bool
    progress: int
    makespan: float = 0.0

    @property
    def ok(self) -> bool:
        """True if all lists end."""
        return not self.waits


class Player:
    """Lists that are played under one rule.

    Args:
        lists: the lists of all ranks.
        rule: the rule.
        timed: whether work lasts; otherwise nothing does.
    """

    def __init__(self, lists: CallLists, rule: TransportRule, *, timed: bool = False) -> None:
        self.lists = lists
        self.rule = rule
        self.pairs: Pairs = pairs_of(lists, by_name=rule.by_name)
        self.positions = [{step.number: n for n, step in enumerate(row)} for row in lists.ranks]
        self.queues = [_Queue(rank) for rank in range(len(lists.ranks))]
        self.streams: dict[tuple[int, str], _Queue] = {}
        for rank, row in enumerate(lists.ranks):
            for position, step in enumerate(row):
                self._add(rank, position, step)
        self.queues += self.streams.values()
        self.makers: dict[Event, tuple[int, int]] = {}
        """The queue and the node that make each event."""
        self.arrays = self._arrays()
        seconds = [second if timed else 0.0 for queue in self.queues for second in queue.seconds]
        self.times: Times = played(self.arrays, instant(self.arrays, np.array(seconds, dtype=np.float64)))

    # -- the queues

    def _add(self, rank: int, position: int, step: CallStep) -> None:
        queue, rule = self.queues[rank], self.rule
        needs = [*self._needs(rank, position, step), *self._dispatched(rank, position)]
        ids = [PartId(rank, step.number, number) for number in range(len(step.parts))]
        if not step.parts:
            events: list[Event] = [(Happening.COMPUTED, PartId(rank, step.number, 0))]
            queue.node(position, needs, events, step.seconds)
            return
        sends = [i for i, part in zip(ids, step.parts, strict=True) if part.side is CallSide.SEND]
        receives = [i for i in ids if i not in sends]
        if rule is TransportRule.EAGER:
            queue.node(position, needs, self._to_partners(Happening.SENT, sends))
        elif rule is TransportRule.RENDEZVOUS:
            queue.node(position, needs, self._to_partners(Happening.POSTED, receives))
            if sends:
                waits: list[Event] = [(Happening.POSTED, part) for part in sends]
                queue.node(position, waits, self._to_partners(Happening.SENT, sends))
        elif rule.has_streams:
            called = (Happening.CALLED, PartId(rank, step.number, 0))
            queue.node(position, needs, [called])
            stream = self.streams.setdefault((rank, step.stream), _Queue(rank, step.stream))
            self._meet(stream, position, [called], ids)
            if rule is TransportRule.ONE_QUEUE:
                stream.makes[-2].append((Happening.DISPATCHED, PartId(rank, step.number, 0)))
            stream.makes[-1].append((Happening.DONE, PartId(rank, step.number, 0)))
        else:
            first = [i for i in ids if rule is TransportRule.FIRST_USE and self._is_first(i)]
            if first:
                queue.node(position, needs, self._to_partners(Happening.ENTERED, first))
                needs = [(Happening.ENTERED, part) for part in first]
            self._meet(queue, position, needs, ids)

    def _meet(self, queue: _Queue, position: int, takes: list[Event], ids: list[PartId]) -> None:
        queue.node(position, takes, self._to_partners(Happening.BEGUN, ids))
        queue.node(position, [(Happening.BEGUN, part) for part in ids], [])

    def _is_first(self, part: PartId) -> bool:
        return not self.lists.connected and self.pairs.order.get(part, 0) == 0

    def _to_partners(self, happening: Happening, parts: list[PartId]) -> list[Event]:
        partner = self.pairs.partner
        return [(happening, partner[part]) for part in parts if part in partner]

    def _needs(self, rank: int, position: int, step: CallStep) -> Iterator[Event]:
        positions, row = self.positions[rank], self.lists.ranks[rank]
        for number in step.needs:
            needed = row[positions[number]]
            if positions[number] > position:
                happening = Happening.DONE if needed.parts else Happening.COMPUTED
                yield happening, PartId(rank, number, -1)  # never: its own rank would have to be further
            elif not needed.parts:
                continue
            elif self.rule.has_streams:
                yield Happening.DONE, PartId(rank, number, 0)
            elif self.rule.by_name:
                alone = {part for owner, part in step.receives if owner == number}
                for index, part in enumerate(needed.parts):
                    if part.side is CallSide.RECEIVE and (not alone or index in alone):
                        yield Happening.SENT, PartId(rank, number, index)

    def _dispatched(self, rank: int, position: int) -> Iterator[Event]:
        before = self.lists.ranks[rank][position - 1] if position else None
        if self.rule is TransportRule.ONE_QUEUE and before is not None and before.parts:
            yield Happening.DISPATCHED, PartId(rank, before.number, 0)

    def _arrays(self) -> ListArrays:
        takers = {e: q for q, queue in enumerate(self.queues) for takes in queue.takes for e in takes}
        events: dict[Event, int] = {}
        inputs: list[int] = []
        takes, outputs, first = [0], [0], [0]
        for number, queue in enumerate(self.queues):
            for node, makes in enumerate(queue.makes):
                for event in makes:
                    if event in takers and event not in events:
                        events[event] = len(events)
                        self.makers[event] = number, node
                outputs.append(len(events))
            first.append(first[-1] + len(queue.steps))
        for event in takers:
            events.setdefault(event, len(events))
        for queue in self.queues:
            for needs in queue.takes:
                inputs += (events[event] for event in needs)
                takes.append(len(inputs))
        self.events = list(events)
        receivers = [takers[event] for event in self.events]
        rows = (first, takes, inputs, outputs, receivers)
        return ListArrays(*(np.array(row, dtype=np.int64) for row in rows))

    # -- the result

    def play(self) -> WaitPlay:
        """The result of the play."""
        progress = int(self.times.head.sum() - self.arrays.first[:-1].sum())
        stuck = self.times.stuck(self.arrays)
        makespan = float(self.times.clocks.max(initial=0.0))
        if not stuck:
            return WaitPlay(self.rule, (), closed=False, progress=progress, makespan=makespan)
        path: list[int] = []
        waits: list[Wait] = []
        queue: int | None = stuck[0]
        while queue is not None and queue not in path:
            path.append(queue)
            wait, queue = self._wait(queue)
            waits.append(wait)
        closed = queue is not None
        begin = path.index(queue) if queue is not None else 0
        return WaitPlay(self.rule, tuple(waits[begin:]), closed, progress)

    def _wait(self, number: int) -> tuple[Wait, int | None]:
        queue = self.queues[number]
        node = int(self.times.head[number] - self.arrays.first[number])
        event = self.events[self.times.waits[number]]
        happening, part = event
        maker = self.makers.get(event)
        queued = bool(queue.stream)
        if maker is None and part.part < 0:  # a later step of its own rank
            awaited = self.positions[part.rank][part.number]
            return Wait(queue.rank, queue.steps[node], queued, happening, queue.rank, awaited), number
        if maker is None:
            row = self.lists.ranks[part.rank]
            peer = row[self.positions[part.rank][part.number]].parts[part.part].peer
            return Wait(queue.rank, queue.steps[node], queued, None, peer, -1), None
        making = self.queues[maker[0]]
        wait = Wait(queue.rank, queue.steps[node], queued, happening, making.rank, making.steps[maker[1]])
        return wait, maker[0]


def play(lists: CallLists, rule: TransportRule, *, timed: bool = False) -> WaitPlay:
    """Play lists under a rule.

    Args:
        lists: the lists of all ranks.
        rule: the rule.
        timed: whether work lasts as long as its steps say.
    """
    return Player(lists, rule, timed=timed).play()
