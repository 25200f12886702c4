"""A worker's actions with all that can be looked up before a step, so that a step costs little Python.

Invariant: peers, stages and micro-batches come from the list (Hanayo section 4); nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from counterflow.program.actions import Action, Compute, Message, Program, Receive, Send
from counterflow.schedule.ir import Op, OpKind, Product, Schedule, SkipLink

from ..messages.values import Shapes, Structure, TensorSpec, Unit
from ..stages.stage import StageCopy

HERE = -1
"""In place of a message's number: what travels stays on its worker."""


@dataclass(slots=True)
class Task:
    """An action, ready to be run.

    Attributes:
        action: what it does.
        handler: who does it.
        place: of the action in the worker's list.
        op: that is run.
        units: what the op, or the op whose output travels, runs on.
        slot: of the mini-batch.
        stage: of the op, or of the op whose output travels.
        number: of the message sent, received or waited for; -1: none.
        sent_as: number of the message with the op's output; -1: it is not sent.
        answers: number of the message whose gradient a backward takes; -1: there was none.
        peer: rank.
        activation: whether it is about a message of activations, not gradients.
        copy: the op's stage.
        hands_over: the op's output is taken by an op of this worker.
        takes: the skips that an op takes something from, a backward a gradient, and the number of the message
            (``HERE``: an op of this worker made it; None: it is there already).
        gives: likewise those that it makes something for (None: nothing is made any more).
        splits: whether a backward of what the op runs on is two ops.
        ends_losses: whether the losses of the mini-batch are all there after it.
        known: the shapes that ``specs`` and ``message`` were looked up in.
        structures: of the values that travel, by unit.
        specs: of the tensors that travel, by unit.
        message: of the tensors of the message.
        gradients: how many tensors take one that is asked for in a message of gradients.
        missing: the places of those among them that get none.
    """

    action: Action
    handler: Callable[[Task], None]
    place: int
    op: Op | None = None
    units: tuple[Unit, ...] = ()
    slot: int = 0
    stage: int = 0
    number: int = -1
    sent_as: int = -1
    answers: int = -1
    peer: int = -1
    activation: bool = False
    copy: StageCopy | None = None
    hands_over: bool = False
    takes: tuple[tuple[SkipLink, int | None], ...] = ()
    gives: tuple[tuple[SkipLink, int | None], ...] = ()
    splits: bool = False
    ends_losses: bool = False
    known: Shapes | None = None
    structures: Sequence[Structure | None] = ()
    specs: Sequence[Sequence[TensorSpec]] = ()
    message: list[TensorSpec] = field(default_factory=list)
    gradients: int = 0
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Tasks:
    """A worker's list, ready to be run.

    Attributes:
        local_prefix: the first tasks, as long as they need no other worker.
        rest: the tasks after them.
    """

    local_prefix: tuple[Task, ...]
    rest: tuple[Task, ...]

    def __iter__(self) -> Iterator[Task]:
        yield from self.local_prefix
        yield from self.rest


class Preparation:
    """Makes tasks of one worker's lists.

    Args:
        schedule: what the lists were lowered from.
        slots: mini-batches that are in flight at once.
        worker: this worker's number in its group.
        ranks: the ranks of this replica's workers.
        stages: the worker's stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        slots: int,
        worker: int,
        ranks: Sequence[int],
        stages: Mapping[int, StageCopy],
    ) -> None:
        self.schedule = schedule
        self.slots = slots
        self.worker = worker
        self.ranks = tuple(ranks)
        self.stages = stages
        self.last_stage = schedule.stages - 1
        self.first_number = 0
        """Of messages."""
        self._parts = {op.micro_batches[0]: op.parts for op in schedule.ops() if not op.kind.whole}
        self._most_parts = max(self._parts.values(), default=1)
        self._skips = schedule.workload.skips
        self._first: dict[tuple[int, int, int], Op] = {}
        """By pipe, stage and period its first forward."""
        for op in schedule.ops():
            if op.kind.whole:
                self._first.setdefault((op.pipe, op.stage, schedule.period_of(op)), op)
        self._forwards = {
            (op.stage, number): op for op in schedule.ops() if op.kind.whole for number in op.micro_batches
        }
        self._split = {(op.stage, op.micro_batches[0]) for op in schedule.ops() if op.kind.rest is not None}

    def tasks(
        self,
        program: Program,
        period_offset: int,
        handlers: Mapping[type[Action] | OpKind, Callable[[Task], None]],
    ) -> Tasks:
        """The list of this worker, as it stands.

        Args:
            program: the lists of all workers.
            period_offset: how many periods later than it says it is going to run.
            handlers: who does what kind of action, and of op.
        """
        tasks = []
        for place, action in enumerate(program.actions[self.worker]):
            kind = action.op.kind if isinstance(action, Compute) else type(action)
            task = Task(action, handlers[kind], place)
            match action:
                case Compute(op):
                    self._computes(task, op, period_offset)
                case Send() | Receive():
                    self._sends(task, action, period_offset)
            tasks.append(task)
        with_loss = [task for task in tasks if task.op is not None and self._gives_loss(task.op)]
        if with_loss and self.schedule.synchronous:
            with_loss[-1].ends_losses = True
        prefix = next((i for i, task in enumerate(tasks) if not self._is_local(task)), len(tasks))
        return Tasks(tuple(tasks[:prefix]), tuple(tasks[prefix:]))

    def _gives_loss(self, op: Op) -> bool:
        return op.kind.whole and op.stage == self.last_stage

    def _computes(self, task: Task, op: Op, period_offset: int) -> None:
        task.op, task.stage, task.copy = op, op.stage, self.stages[op.stage]
        task.slot, task.units = self._units(op, period_offset)
        task.splits = any((op.stage, number) in self._split for number in op.micro_batches)
        if op.kind.gives is None:
            return
        ahead = op.kind.gives.goes
        goes_to = self._worker(op, op.stage + ahead)
        task.hands_over = goes_to == self.worker
        if self._worker(op, op.stage - ahead) not in (None, self.worker):
            task.number = self._number(op, op.stage - ahead, task.units[0])
            if not op.kind.whole:
                made = self._forwards[op.stage, op.micro_batches[0]]
                task.answers = self._number(made, op.stage, self._units(made, period_offset)[1][0])
        if goes_to not in (None, self.worker):
            task.sent_as = self._number(op, op.stage, task.units[0])
        if self._skips:
            self._skipping(task, op, period_offset)

    def _skipping(self, task: Task, op: Op, period_offset: int) -> None:
        """What an op takes and makes by skips; gradients go the other way."""
        forward = op.kind.whole
        for skip in self._skips:
            before, after = (skip.source, skip.target) if forward else (skip.target, skip.source)
            if op.stage not in (before, after) or (skip.once and not forward):
                continue
            here = self._worker(op, before) == self._worker(op, after)
            number: int | None = HERE if here else self._number(op, skip, task.units[0])
            if skip.once:
                period = self.schedule.period_of(op)
                if self._first[op.pipe, op.stage, period] != op:
                    number = None
                elif op.stage == after:
                    made = self._first[op.pipe, before, period]
                    unit = self._units(made, period_offset)[1][0]
                    number = None if here else self._number(made, skip, unit)
            if op.stage == after:
                task.takes += ((skip, number),)
            else:
                task.gives += ((skip, number),)

    def _sends(self, task: Task, message: Message, period_offset: int) -> None:
        op = message.output
        task.slot, task.units = self._units(op, period_offset)
        task.stage = op.stage
        task.peer = self.ranks[message.peer]
        task.number = self._number(op, message.skip or op.stage, task.units[0])
        task.activation = op.kind.whole
        if message.skip is not None and message.skip.once:
            task.units = task.units[:1]

    def _worker(self, op: Op, stage: int) -> int | None:
        """Who holds a stage of an op's pipe; None if there is no such stage."""
        return self.schedule.placement.worker(op.pipe, stage) if 0 <= stage <= self.last_stage else None

    def _units(self, op: Op, period_offset: int) -> tuple[int, tuple[Unit, ...]]:
        """The mini-batch's slot, and what an op runs on in pieces of what backwards run on."""
        slot = (self.schedule.period_of(op) + period_offset) % self.slots
        found = []
        for number in op.micro_batches:
            m = number % self.schedule.micro_batches
            if not op.kind.whole:
                found.append(Unit(m, op.part, op.parts, slot))
            else:  # of a whole micro-batch, also if there is no backward
                parts = self._parts.get(number, 1)
                found += [Unit(m, part, parts, slot) for part in range(parts)]
        return slot, tuple(found)

    def _number(self, op: Op, source: int | SkipLink, first: Unit) -> int:
        """Of the message with the output of a stage, or for a skip, for what ``op`` runs on.

        It is the same on all workers.
        """
        micro_batch = first.slot * self.schedule.micro_batches + first.micro_batch
        gradient = op.kind.gives is Product.INPUT_GRADIENT
        place = source if isinstance(source, int) else self.schedule.stages + self._skips.index(source)
        number = ((micro_batch * self._sources + place) * 2 + gradient) * self._most_parts + op.part
        return self.first_number + number

    @property
    def _sources(self) -> int:
        """What messages come from: stages and skips."""
        return self.schedule.stages + len(self._skips)

    @property
    def numbers(self) -> int:
        """How many ``_number`` tells apart."""
        return self.slots * self.schedule.micro_batches * self._sources * 2 * self._most_parts

    def _is_local(self, task: Task) -> bool:
        """Whether no other worker sees it, and nothing in it depends on what others were given."""
        action = task.action
        if isinstance(action, Compute):
            return action.op.kind.whole and action.op.stage == 0 != self.last_stage
        return isinstance(action, Receive)
