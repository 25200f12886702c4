"""Routing table of one worker: source, destination and tag of each op's input and output.

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
from .routes import LocalMailbox, LocalRoute, MessageRoute, Route, SkipRoute, SliceRoute


class Addresses:
    """Routing table of one worker.

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
        self._messages, self._mailbox = messages, LocalMailbox()
        ops = list(schedule.ops())
        self._slices = schedule.workload.slices
        self._parts = {op.micro_batches[0]: op.parts for op in ops if not op.kind.is_forward}
        self._skips = schedule.workload.skips
        self._first: dict[tuple[int, int, int], Op] = {}
        """First forward by pipe, stage and period."""
        for op in ops:
            if op.kind.is_forward:
                self._first.setdefault((op.pipe, op.stage, schedule.period_of(op)), op)
        self._forwards = {
            (op.stage, number, op.part): op for op in ops if op.kind.is_forward for number in op.micro_batches
        }
        self._split = {(op.stage, op.micro_batches[0]) for op in ops if op.kind.rest is not None}
        places = [*range(schedule.stages), *self._skips]
        self._places: dict[Place, int] = {place: number for number, place in enumerate(places)}
        self._most_parts = max(self._slices, *self._parts.values(), 1)
        numbers = slots * schedule.micro_batches * len(places) * 2 * self._most_parts
        self._first_number = messages.transport.reserve_tags(numbers)

    def units(self, op: Op, period_offset: int) -> tuple[Unit, ...]:
        """Units that an op runs on, in the pieces that backwards run on.

        Args:
            op: which one.
            period_offset: how many periods later than it says it is going to run.
        """
        slot = (self._schedule.period_of(op) + period_offset) % self._slots
        units = []
        for number in op.micro_batches:
            m = number % self._schedule.micro_batches
            if not op.kind.is_forward or self._slices > 1:
                units.append(Unit(m, op.part, op.parts, slot))
            else:  # of a whole micro-batch, also if there is no backward
                parts = self._parts.get(number, 1)
                units += [Unit(m, part, parts, slot) for part in range(parts)]
        return tuple(units)

    def splits(self, op: Op) -> bool:
        """True if a backward of the op's units is two ops."""
        return any((op.stage, number) in self._split for number in op.micro_batches)

    def source(self, op: Op, period_offset: int) -> Route | None:
        """Route of an op's input from another stage; None: it has none."""
        takes = op.kind.takes
        if takes is None:
            return None
        place, neighbor = (op.stage - 1,) * 2 if takes.goes > 0 else (op.stage, op.stage + 1)
        answers = None
        if takes is Product.INPUT_GRADIENT and self._holder(op, neighbor) is not None:
            forward = self._forwards[op.stage, op.micro_batches[0], op.part if self._slices > 1 else 0]
            answers = self._number(place, self.units(forward, period_offset)[0], gradient=False)
        return self._route(op, neighbor, place, takes, period_offset, answers=answers)

    def target(self, op: Op, period_offset: int) -> Route | None:
        """Route of an op's output to another stage; None: it has none."""
        gives = op.kind.gives
        if gives is None:
            return None
        return self._route(op, op.stage + gives.goes, op.boundary, gives, period_offset)

    def _route(
        self,
        op: Op,
        peer_stage: int,
        place: Place,
        what: Product,
        period_offset: int,
        *,
        answers: int | None = None,
    ) -> Route | None:
        # None: there is no such stage
        worker = self._holder(op, peer_stage)
        if worker is None:
            return None
        if worker == self._worker:
            return LocalRoute(place, self._mailbox)
        unit = self.units(op, period_offset)[0]
        number = self._number(place, unit, gradient=what is Product.INPUT_GRADIENT)
        return MessageRoute(number, self._messages, answers)

    def by_skips(self, op: Op, period_offset: int) -> tuple[Sequence[SkipRoute], Sequence[SkipRoute]]:
        """Routes of an op's inputs and outputs by skip connections; gradients go the other way."""
        takes: list[SkipRoute] = []
        gives: list[SkipRoute] = []
        what, forward = op.kind.gives, op.kind.is_forward
        for link in self._skips:
            before, after = (link.source, link.target) if forward else (link.target, link.source)
            if what is None or op.stage not in (before, after) or (link.once and not forward):
                continue
            links, peer_stage = (takes, before) if op.stage == after else (gives, after)
            if not link.once:
                links.append(SkipRoute(link, self._route(op, peer_stage, link, what, period_offset)))
                continue
            period = self._schedule.period_of(op)
            first, route = self._first[op.pipe, op.stage, period] == op, None
            if first and self._holder(op, peer_stage) != self._worker:
                first_op = self._first[op.pipe, before, period]
                route = self._route(first_op, peer_stage, link, what, period_offset)
            links.append(SkipRoute(link, route, first=first))
        return takes, gives

    def carried(self, op: Op) -> tuple[Sequence[SkipRoute], Sequence[SkipRoute]]:
        """Routes of the states, or their gradients, from one slice to the next."""
        step = op.kind.carries
        if self._slices == 1 or not step:
            return (), ()
        link = SkipLink(op.stage, op.stage)
        takes = [SkipRoute(link, SliceRoute(link, self._mailbox, 0))]
        gives = [SkipRoute(link, SliceRoute(link, self._mailbox, step))]
        of = range(self._slices)
        return takes if op.part - step in of else (), gives if op.part + step in of else ()

    def envelope(self, message: Message, period_offset: int) -> tuple[Envelope, int]:
        """Envelope of a message, and the slot of its mini-batch."""
        op = message.output
        units = self.units(op, period_offset)
        place = message.skip or op.boundary
        gradient = op.kind.gives is Product.INPUT_GRADIENT
        number = self._number(place, units[0], gradient=gradient)
        about = units[:1] if message.skip is not None and message.skip.once else units
        of = [(place, unit.shape) for unit in about]
        return Envelope(number, self._ranks[message.peer], op.stage, of, gradient), units[0].slot

    def _holder(self, op: Op, stage: int) -> int | None:
        schedule = self._schedule
        return schedule.placement.worker(op.pipe, stage) if 0 <= stage < schedule.stages else None

    def _number(self, place: Place, unit: Unit, *, gradient: bool) -> int:
        """Number of the message that a place sends for some units, of which ``unit`` is the first."""
        micro_batch = unit.slot * self._schedule.micro_batches + unit.micro_batch
        number = (micro_batch * len(self._places) + self._places[place]) * 2 + gradient
        return self._first_number + number * self._most_parts + unit.part
