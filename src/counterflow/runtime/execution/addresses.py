"""Where a worker's ops take from and give to, and which message is which: all that follows from the schedule.

Invariant: peers, stages and micro-batches come from the list (Hanayo section 4); nothing is decided here. A
message has the same number on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.program.actions import Message
from counterflow.schedule.ir import Op, Product, Schedule, SkipLink

from ..messages.envelope import Envelope, Place
from ..messages.message_queue import MessageQueue
from ..messages.values import Unit
from .routes import HandedOver, LocalRoute, MessageRoute, Route, SkipRoute, SliceRoute


class Addresses:
    """One worker's.

    Args:
        schedule: what its lists were lowered from.
        slots: mini-batches that are in flight at once.
        worker: its number in its group.
        ranks: the ranks of this replica's workers.
        messages: its messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        slots: int,
        worker: int,
        ranks: Sequence[int],
        messages: MessageQueue,
    ) -> None:
        self._schedule, self._slots, self._worker, self._ranks = schedule, slots, worker, tuple(ranks)
        self._messages, self._handed = messages, HandedOver()
        ops = list(schedule.ops())
        self._slices = schedule.workload.slices
        self._parts = {op.micro_batches[0]: op.parts for op in ops if not op.kind.whole}
        self._skips = schedule.workload.skips
        self._first: dict[tuple[int, int, int], Op] = {}
        """First forward by pipe, stage and period."""
        for op in ops:
            if op.kind.whole:
                self._first.setdefault((op.pipe, op.stage, schedule.period_of(op)), op)
        self._forwards = {
            (op.stage, number, op.part): op for op in ops if op.kind.whole for number in op.micro_batches
        }
        self._split = {(op.stage, op.micro_batches[0]) for op in ops if op.kind.rest is not None}
        places = [*range(schedule.stages), *self._skips]
        self._places: dict[Place, int] = {place: number for number, place in enumerate(places)}
        self._most_parts = max(self._slices, *self._parts.values(), 1)
        numbers = slots * schedule.micro_batches * len(places) * 2 * self._most_parts
        self._first_number = messages.transport.reserve_tags(numbers)

    def units(self, op: Op, period_offset: int) -> tuple[Unit, ...]:
        """What an op runs on, in pieces of what backwards run on.

        Args:
            op: which one.
            period_offset: how many periods later than it says it is going to run.
        """
        slot = (self._schedule.period_of(op) + period_offset) % self._slots
        found = []
        for number in op.micro_batches:
            m = number % self._schedule.micro_batches
            if not op.kind.whole or self._slices > 1:
                found.append(Unit(m, op.part, op.parts, slot))
            else:  # of a whole micro-batch, also if there is no backward
                parts = self._parts.get(number, 1)
                found += [Unit(m, part, parts, slot) for part in range(parts)]
        return tuple(found)

    def splits(self, op: Op) -> bool:
        """Whether a backward of what an op runs on is two ops."""
        return any((op.stage, number) in self._split for number in op.micro_batches)

    def source(self, op: Op, period_offset: int) -> Route | None:
        """The way on which an op gets what it takes of another stage; None: it takes of none."""
        takes = op.kind.takes
        if takes is None:
            return None
        place, other = (op.stage - 1,) * 2 if takes.goes > 0 else (op.stage, op.stage + 1)
        answers = None
        if takes is Product.INPUT_GRADIENT and self._holder(op, other) is not None:
            made = self._forwards[op.stage, op.micro_batches[0], op.part if self._slices > 1 else 0]
            answers = self._number(place, self.units(made, period_offset)[0], gradient=False)
        return self._route(op, other, place, takes, period_offset, answers=answers)

    def target(self, op: Op, period_offset: int) -> Route | None:
        """The way on which what an op makes for another stage goes; None: it makes nothing for any."""
        gives = op.kind.gives
        if gives is None:
            return None
        return self._route(op, op.stage + gives.goes, op.boundary, gives, period_offset)

    def _route(
        self,
        op: Op,
        other: int,
        place: Place,
        what: Product,
        period_offset: int,
        *,
        answers: int | None = None,
    ) -> Route | None:
        """The way of a product between an op and another stage; None: there is no such stage."""
        worker = self._holder(op, other)
        if worker is None:
            return None
        if worker == self._worker:
            return LocalRoute(place, self._handed)
        unit = self.units(op, period_offset)[0]
        number = self._number(place, unit, gradient=what is Product.INPUT_GRADIENT)
        return MessageRoute(number, self._messages, answers)

    def by_skips(self, op: Op, period_offset: int) -> tuple[Sequence[SkipRoute], Sequence[SkipRoute]]:
        """The ways of what an op takes and makes by skips; gradients go the other way."""
        takes: list[SkipRoute] = []
        gives: list[SkipRoute] = []
        what, forward = op.kind.gives, op.kind.whole
        for link in self._skips:
            before, after = (link.source, link.target) if forward else (link.target, link.source)
            if what is None or op.stage not in (before, after) or (link.once and not forward):
                continue
            found, other = (takes, before) if op.stage == after else (gives, after)
            if not link.once:
                found.append(SkipRoute(link, self._route(op, other, link, what, period_offset)))
                continue
            period = self._schedule.period_of(op)
            first, route = self._first[op.pipe, op.stage, period] == op, None
            if first and self._holder(op, other) != self._worker:
                made = self._first[op.pipe, before, period]
                route = self._route(made, other, link, what, period_offset)
            found.append(SkipRoute(link, route, first=first))
        return takes, gives

    def carried(self, op: Op) -> tuple[Sequence[SkipRoute], Sequence[SkipRoute]]:
        """The ways of the states, or their gradients, that an op takes of one slice and leaves to another."""
        step = op.kind.carries
        if self._slices == 1 or not step:
            return (), ()
        link = SkipLink(op.stage, op.stage)
        takes = [SkipRoute(link, SliceRoute(link, self._handed, 0))]
        gives = [SkipRoute(link, SliceRoute(link, self._handed, step))]
        of = range(self._slices)
        return takes if op.part - step in of else (), gives if op.part + step in of else ()

    def envelope(self, message: Message, period_offset: int) -> tuple[Envelope, int]:
        """A message as it is known before it travels, and the slot of its mini-batch."""
        op = message.output
        units = self.units(op, period_offset)
        place = message.skip or op.boundary
        gradient = op.kind.gives is Product.INPUT_GRADIENT
        number = self._number(place, units[0], gradient=gradient)
        about = units[:1] if message.skip is not None and message.skip.once else units
        of = [(place, unit.shape) for unit in about]
        return Envelope(number, self._ranks[message.peer], op.stage, of, gradient), units[0].slot

    def _holder(self, op: Op, stage: int) -> int | None:
        """Worker that holds a stage of an op's pipe; None if the stage does not exist."""
        schedule = self._schedule
        return schedule.placement.worker(op.pipe, stage) if 0 <= stage < schedule.stages else None

    def _number(self, place: Place, unit: Unit, *, gradient: bool) -> int:
        """Number of the message that a place sends for some units, of which ``unit`` is the first."""
        micro_batch = unit.slot * self._schedule.micro_batches + unit.micro_batch
        number = (micro_batch * len(self._places) + self._places[place]) * 2 + gradient
        return self._first_number + number * self._most_parts + unit.part
