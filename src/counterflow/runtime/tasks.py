"""A worker's actions with all that can be looked up before a step, so that a step costs little Python.

Invariant: peers, stages and micro-batches come from the list (Hanayo section 4); nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from counterflow.schedule.actions import (
    Action,
    Compute,
    Forward,
    Program,
    Receive,
    ReceiveActivation,
    Send,
    SendActivation,
)
from counterflow.schedule.crossing import crossing
from counterflow.schedule.ir import Op, Schedule

from .batch import Shapes
from .stage import StageCopy
from .values import Structure, TensorSpec, Unit


@dataclass(slots=True)
class Task:
    """An action, ready to be run.

    Attributes:
        action: what it does.
        handler: who does it.
        place: of the action in the worker's list.
        units: what the op, or the op whose output travels, runs on.
        slot: of the mini-batch.
        stage: of the op, or of the op whose output travels.
        number: of the message sent, received or waited for; -1: none.
        sent_as: number of the message with the op's output; -1: it is not sent.
        peer: rank.
        activation: whether it is about a message of activations, not gradients.
        copy: the op's stage.
        both: of an exchange, the two.
        hands_over: the op's output is taken by an op of this worker.
        known: the shapes that ``specs`` and ``message`` were looked up in.
        structures: of the values that travel, by unit.
        specs: of the tensors that travel, by unit.
        message: of the tensors of the message.
    """

    action: Action
    handler: Callable[[Task], None]
    place: int
    units: tuple[Unit, ...] = ()
    slot: int = 0
    stage: int = 0
    number: int = -1
    sent_as: int = -1
    peer: int = -1
    activation: bool = False
    copy: StageCopy | None = None
    both: tuple[Task, ...] = ()
    hands_over: bool = False
    known: Shapes | None = None
    structures: Sequence[Structure | None] = ()
    specs: Sequence[Sequence[TensorSpec]] = ()
    message: list[TensorSpec] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tasks:
    """A worker's list, ready to be run: what nobody else sees or decides, and the rest of it."""

    alone: tuple[Task, ...]
    beside: tuple[Task, ...]

    def __iter__(self) -> Iterator[Task]:
        yield from self.alone
        yield from self.beside


class Preparation:
    """Makes tasks of one worker's lists.

    Args:
        schedule: what the lists were lowered from.
        slots: mini-batches that are under way at once.
        worker: this worker's number in its group.
        ranks: the ranks of this replica's workers.
        stages: the worker's stages.
        keeps_order: whether the transport matches two workers' messages by their order.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        slots: int,
        worker: int,
        ranks: Sequence[int],
        stages: Mapping[int, StageCopy],
        keeps_order: bool,
    ) -> None:
        self.schedule = schedule
        self.slots = slots
        self.worker = worker
        self.ranks = tuple(ranks)
        self.stages = stages
        self.keeps_order = keeps_order
        self.last_stage = schedule.stages - 1
        self._parts = {op.micro_batches[0]: op.parts for op in schedule.ops() if not op.kind.makes_output}
        self._most_parts = max(self._parts.values(), default=1)

    def tasks(
        self,
        program: Program,
        later: int,
        handlers: Mapping[type[Action], Callable[[Task], None]],
        exchange: Callable[[Task], None],
    ) -> Tasks:
        """The list of this worker.

        Args:
            program: the lists of all workers.
            later: how many periods later than it says it is going to run.
            handlers: who does what kind of action.
            exchange: who does a send and a receive that cross the peer's, as one task.
        """
        tasks = [
            self._task(action, handlers[type(action)], place, later)
            for place, action in enumerate(program.actions[self.worker])
        ]
        if self.keeps_order:
            for index in sorted(crossing(program, self.worker), reverse=True):
                first, second = tasks[index : index + 2]
                both = first, second
                tasks[index : index + 2] = [Task(first.action, exchange, index, peer=first.peer, both=both)]
        else:
            tasks = posted_ahead(tasks)
        alone = next((i for i, task in enumerate(tasks) if not self._alone(task)), len(tasks))
        return Tasks(tuple(tasks[:alone]), tuple(tasks[alone:]))

    def _task(self, action: Action, handler: Callable[[Task], None], place: int, later: int) -> Task:
        task = Task(action, handler, place)
        if isinstance(action, Compute):
            op = action.op
            task.stage, task.copy = op.stage, self.stages[op.stage]
            task.slot, task.units = self._units(op, later)
            ahead = 1 if op.kind.makes_output else -1
            goes_to = self._worker(op, op.stage + ahead)
            task.hands_over = goes_to == self.worker
            if self._worker(op, op.stage - ahead) not in (None, self.worker):
                task.number = self._number(op, op.stage - ahead, task.units[0])
            if goes_to not in (None, self.worker):
                task.sent_as = self._number(op, op.stage, task.units[0])
        elif isinstance(action, Send | Receive):
            op = action.output
            task.slot, task.units = self._units(op, later)
            task.stage = op.stage
            task.peer = self.ranks[action.peer]
            task.number = self._number(op, op.stage, task.units[0])
            task.activation = isinstance(action, SendActivation | ReceiveActivation)
        else:
            task.stage = action.stage
        return task

    def _worker(self, op: Op, stage: int) -> int | None:
        """Who holds a stage of an op's pipe; None if there is no such stage."""
        return self.schedule.placement.worker(op.pipe, stage) if 0 <= stage <= self.last_stage else None

    def _units(self, op: Op, later: int) -> tuple[int, tuple[Unit, ...]]:
        """The mini-batch's slot, and what an op runs on in pieces of what backwards run on."""
        slot = (self.schedule.period_of(op) + later) % self.slots
        found = []
        for number in op.micro_batches:
            m = number % self.schedule.micro_batches
            if not op.kind.makes_output:
                found.append(Unit(m, op.part, op.parts, slot))
            else:  # of a whole micro-batch, also if there is no backward
                parts = self._parts.get(number, 1)
                found += [Unit(m, part, parts, slot) for part in range(parts)]
        return slot, tuple(found)

    def _number(self, op: Op, stage: int, first: Unit) -> int:
        """Of the message with the output of ``stage`` for what ``op`` runs on; the same on all workers."""
        micro_batch = first.slot * self.schedule.micro_batches + first.micro_batch
        gradient = op.kind.makes_input_gradient
        return ((micro_batch * (self.last_stage + 1) + stage) * 2 + gradient) * self._most_parts + op.part

    def _alone(self, task: Task) -> bool:
        """Whether no other worker sees it, and nothing in it depends on what others were given."""
        posts = isinstance(task.action, Receive) and not task.both
        return posts or (isinstance(task.action, Forward) and task.stage == 0 != self.last_stage)


def posted_ahead(tasks: Sequence[Task]) -> list[Task]:
    """A list in which every receive is posted before the op that runs ahead of the one that needs it.

    A list lowered for transports that match by order posts no receive before an earlier message of the two
    workers is sent; where that is just before the op, the message waits at its sender until it is asked
    for. Where tags match, nobody waits longer because a receive is there earlier.
    """
    taken_by: dict[int, int] = {}
    ops = 0
    for task in tasks:
        if isinstance(task.action, Compute):
            taken_by[task.number] = ops
            ops += 1
    found: list[Task] = []
    every, ops, ahead = ops, 0, 0
    for task in tasks:
        # What a later list takes counts as taken after the end.
        if isinstance(task.action, Receive) and taken_by.get(task.number, every) == ops:
            found.insert(ahead, task)
            ahead += 1
            continue
        if isinstance(task.action, Compute):
            ahead = len(found)
            ops += 1
        found.append(task)
    return found
