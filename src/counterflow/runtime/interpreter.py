"""Executes one worker's action list: a table from action type to handler, and a short loop.

Invariant: a handler does what its action names and nothing else; peers, stages and micro-batches come
from the list (Hanayo section 4). What can be looked up once is looked up before the first step
(``_prepare``), so that a step costs little Python.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import fsum, isfinite
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import (  # the engine's entry has no public name but with checks, see _run_backward
    GradientEdge,
    _engine_run_backward,
    get_gradient_edge,
)
from torch.utils import _pytree as pytree

from counterflow.errors import CounterflowError
from counterflow.schedule.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    Program,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Send,
    SendActivation,
    SendGradient,
    StartGradientSync,
    Update,
    WaitGradientSync,
)
from counterflow.schedule.crossing import crossing
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.segments import later, shifted

from .failure import worker_error
from .randomness import Rows
from .saved_bytes import Kept, SavedBytes
from .stage import StageCopy
from .transport import Crossing, Pending, Transport
from .transport.base import Described
from .values import BufferPool, TensorSpec, Unit, Value, cut, tensors_of, value_of

LossFunction = Callable[[Any, Any], Tensor]
"""Output of the last stage and target to the mean loss over the samples."""

Key = tuple[int, Unit]
"""A stage and what runs through it (a micro-batch runs on one pipe only)."""

Shapes = dict[Key, list[TensorSpec]]
"""What each stage gives, by stage and unit (``Unit.shape``)."""


class Owner(Protocol):
    """What the interpreter leaves to who runs it: all that is about weights."""

    def start_sync(self, stage: int) -> None:
        """Begin to sum a stage's gradients."""

    def wait_sync(self, stage: int) -> None:
        """Until they are summed."""

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Make a version of a stage's weights; the older ones that nothing later uses may go."""


@dataclass(slots=True)
class Losses:
    """The losses of a step's micro-batches on this worker: (unit, mean loss, its share in the mini-batch)."""

    entries: list[tuple[Unit, Tensor, float]] = field(default_factory=list)

    def summed(self) -> tuple[float, int]:
        """The worker's part of the mini-batch's loss; the first micro-batch whose is not finite, or -1."""
        if not self.entries:
            return 0.0, -1
        values = torch.stack([loss for _, loss, _ in self.entries]).tolist()  # from a GPU all at once
        odd = [e[0].micro_batch for e, value in zip(self.entries, values, strict=True) if not isfinite(value)]
        return fsum(v * e[2] for e, v in zip(self.entries, values, strict=True)), min(odd, default=-1)


@dataclass(slots=True)
class Batch:
    """The replica's mini-batch of one step.

    Attributes:
        step: the step's number.
        inputs: by micro-batch; None on a worker without the first stage.
        targets: by micro-batch; None on a worker without the last stage.
        samples: by micro-batch.
        total: samples of the mini-batch of all replicas.
        first: number of this replica's first micro-batch among those of all replicas.
        training: whether gradients are wanted.
        known: the shapes of what travels, by stage and unit, if they were seen before.
        learnt: where they are noted.
        settle: waits for what the others were given, before anything they see; gives ``total``.
        losses: of its micro-batches, as they come.
    """

    step: int
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    samples: Sequence[int]
    total: int
    first: int
    training: bool
    known: Shapes | None
    learnt: Shapes
    settle: Callable[[], int] | None = None
    losses: Losses = field(default_factory=Losses)

    def rows(self, units: Sequence[Unit]) -> tuple[Rows, ...]:
        """The samples of ``units`` in terms of the whole mini-batch."""
        found = []
        for unit in units:
            samples = self.samples[unit.micro_batch]
            rows = unit.rows(samples)
            found.append(Rows(self.first + unit.micro_batch, samples, rows.start, rows.stop))
        return tuple(found)

    def share(self, unit: Unit) -> float:
        """The unit's share of the mini-batch's samples."""
        rows = unit.rows(self.samples[unit.micro_batch])
        return float(rows.stop - rows.start) / self.total


@dataclass(frozen=True, slots=True)
class Ran:
    """An op as it ran, in seconds; ``later``: how many periods later than it says."""

    op: Op
    later: int
    start: float
    end: float


class _Arrival:
    """A posted receive of known shapes."""

    __slots__ = ("buffers", "counts", "pending", "specs")

    def __init__(self, pending: Pending, buffers: list[Tensor], specs: list[list[TensorSpec]]) -> None:
        self.pending, self.buffers, self.specs = pending, buffers, specs

    def take(self, count: int) -> tuple[list[list[Tensor]], bool]:
        """The tensors by unit, and whether they are buffers of the pool."""
        del count
        self.pending.wait()
        found, at = [], 0
        for unit in self.specs:
            found.append(self.buffers[at : at + len(unit)])
            at += len(unit)
        return found, True


class _DescribedArrival:
    """A posted receive whose shapes come with it."""

    __slots__ = ("pending",)

    def __init__(self, pending: Described) -> None:
        self.pending = pending

    def take(self, count: int) -> tuple[list[list[Tensor]], bool]:
        """The tensors by unit; each unit has as many."""
        tensors = self.pending.wait()
        each = len(tensors) // count
        return [tensors[i * each : (i + 1) * each] for i in range(count)], False


@dataclass(slots=True)
class _Task:
    """An action with all that can be looked up before the step."""

    action: Action
    handler: Callable[[_Task], None]
    units: tuple[Unit, ...] = ()
    slot: int = 0  # of the mini-batch
    stage: int = 0
    number: int = -1  # of the message sent, received or waited for
    sent_as: int = -1  # number of the message with the op's output
    peer: int = -1  # rank
    copy: StageCopy | None = None
    both: tuple[_Task, ...] = ()  # of an exchange
    hands_over: bool = False  # the op's output is taken by an op of this worker
    sends: bool = False


@dataclass(slots=True)
class _Stash:
    """What a forward leaves for the backward of one unit."""

    inputs: list[Tensor]
    edges: list[GradientEdge] | None
    reused: list[Tensor]
    held: list[Kept]


@dataclass(frozen=True, slots=True)
class Tasks:
    """A worker's list, ready to be run: what nobody else sees or decides, and the rest of it."""

    alone: tuple[_Task, ...]
    beside: tuple[_Task, ...]

    def __iter__(self) -> Iterator[_Task]:
        yield from self.alone
        yield from self.beside


@dataclass(slots=True)
class _State:
    """What is under way; empty whenever the pipeline is."""

    batches: list[Batch]
    later: int = 0  # periods that the list at hand is run later than it says
    arrivals: dict[int, _Arrival | _DescribedArrival] = field(default_factory=dict)
    handed: dict[Key, list[Tensor]] = field(default_factory=dict)
    gradients: dict[Key, list[Tensor]] = field(default_factory=dict)
    outbox: dict[int, list[Tensor]] = field(default_factory=dict)
    stashes: dict[Key, _Stash] = field(default_factory=dict)
    sending: deque[tuple[Pending, list[Tensor]]] = field(default_factory=deque)


class Interpreter:
    """Runs one worker's action lists.

    Args:
        schedule: what the lists were lowered from.
        slots: mini-batches that are under way at once.
        worker: this worker's number in its group.
        ranks: the ranks of this replica's workers.
        transport: how messages travel.
        stages: the worker's stages.
        loss_function: mean loss over samples.
        owner: what does syncs and updates.
        autocast: makes the context in which layers run.
        saved: counts what is saved for backward.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        slots: int = 1,
        worker: int,
        ranks: Sequence[int],
        transport: Transport,
        stages: Mapping[int, StageCopy],
        loss_function: LossFunction,
        owner: Owner,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        saved: SavedBytes | None = None,
    ) -> None:
        self.schedule = schedule
        self.slots = slots
        self.worker = worker
        self.ranks = tuple(ranks)
        self.transport = transport
        self.stages = stages
        self.loss_function = loss_function
        self.owner = owner
        self.autocast = autocast
        self.saved = saved
        self.counting = False
        self.pool = BufferPool(transport.device)
        self.last_stage = schedule.stages - 1
        self.parts = {op.micro_batches[0]: op.parts for op in schedule.ops() if op.kind is OpKind.BACKWARD}
        self.most_parts = max(self.parts.values(), default=1)
        self.whole_timeline = False
        """Whether ``timeline`` has all since the pipeline was empty, and not only the last step."""
        self.began_seconds = 0.0
        """When that began, by the machine's clock (``time.perf_counter``)."""
        self._ran: list[Ran] = []
        self._state = _State([])
        self._newest = 0
        self._timed = self._cuda_timed if transport.device.type == "cuda" else self._host_timed
        self._events: list[tuple[Op, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._first_event: torch.cuda.Event | None = None

    # -- before a list is run

    def prepare(self, program: Program, later: int = 0) -> Tasks:
        """The list of this worker with all that can be looked up before it is run.

        Args:
            program: the lists of all workers.
            later: how many periods later than it says it is going to run.
        """
        handlers: dict[type[Action], Callable[[_Task], None]] = {
            Forward: self._forward,
            Backward: self._backward,
            SendActivation: self._send,
            SendGradient: self._send,
            ReceiveActivation: self._receive,
            ReceiveGradient: self._receive,
            StartGradientSync: lambda task: self.owner.start_sync(task.stage),
            WaitGradientSync: lambda task: self.owner.wait_sync(task.stage),
            Update: self._update,
        }
        tasks = []
        mine = program.actions[self.worker]
        for action in mine:
            task = _Task(action, handlers[type(action)])
            if isinstance(action, Compute):
                op = action.op
                task.stage, task.copy = op.stage, self.stages[op.stage]
                task.slot, task.units = self._units(op, later)
                ahead = 1 if op.kind is OpKind.FORWARD else -1
                goes_to = self._worker(op, op.stage + ahead)
                task.sends = goes_to not in (None, self.worker)
                task.hands_over = goes_to == self.worker
                if self._worker(op, op.stage - ahead) not in (None, self.worker):
                    task.number = self._number(op, op.stage - ahead, task.units[0])
                if task.sends:
                    task.sent_as = self._number(op, op.stage, task.units[0])
            elif isinstance(action, Send | Receive):
                op = action.output
                task.slot, task.units = self._units(op, later)
                task.stage = op.stage
                task.peer = self.ranks[action.peer]
                task.number = self._number(op, op.stage, task.units[0])
            else:
                task.stage = action.stage
            tasks.append(task)
        for index in sorted(crossing(program, self.worker), reverse=True):
            first, second = tasks[index : index + 2]
            both = _Task(first.action, self._exchange, peer=first.peer, both=(first, second))
            tasks[index : index + 2] = [both]
        alone = next((i for i, task in enumerate(tasks) if not self._alone(task)), len(tasks))
        return Tasks(tuple(tasks[:alone]), tuple(tasks[alone:]))

    def _worker(self, op: Op, stage: int) -> int | None:
        """Who holds a stage of an op's pipe; None if there is no such stage."""
        return self.schedule.placement.worker(op.pipe, stage) if 0 <= stage <= self.last_stage else None

    def _units(self, op: Op, later: int) -> tuple[int, tuple[Unit, ...]]:
        """The mini-batch's slot, and what an op runs on in pieces of what backwards run on."""
        slot = (self.schedule.period_of(op) + later) % self.slots
        found = []
        for number in op.micro_batches:
            m = number % self.schedule.micro_batches
            if op.kind is OpKind.BACKWARD:
                found.append(Unit(m, op.part, op.parts, slot))
            else:  # of a whole micro-batch, also if there is no backward
                parts = self.parts.get(number, 1)
                found += [Unit(m, part, parts, slot) for part in range(parts)]
        return slot, tuple(found)

    def _number(self, op: Op, stage: int, first: Unit) -> int:
        """Of the message with the output of ``stage`` for what ``op`` runs on; the same on all workers."""
        micro_batch = first.slot * self.schedule.micro_batches + first.micro_batch
        kind = op.kind is OpKind.BACKWARD
        return ((micro_batch * (self.last_stage + 1) + stage) * 2 + kind) * self.most_parts + op.part

    def _alone(self, task: _Task) -> bool:
        """Whether no other worker sees it, and nothing in it depends on what others were given."""
        posts = isinstance(task.action, Receive) and not task.both
        return posts or (isinstance(task.action, Forward) and task.stage == 0 != self.last_stage)

    # -- a step

    def run(self, tasks: Tasks, batch: Batch | None, *, later: int = 0, drains: bool = True) -> None:
        """Run a list once.

        Args:
            tasks: the list.
            batch: the mini-batch that it begins; None if it only ends what is under way.
            later: how many periods later than it says it runs.
            drains: whether nothing is under way at its end.

        Raises:
            WorkerError: something failed; it names the worker, the action and the cause.
        """
        state = self._state
        state.later = later
        if not (self.whole_timeline and state.batches):
            self._start_clock()
        if batch is not None:
            self._take_in(batch)
        task: _Task | None = None
        try:
            for task in self._in_turn(tasks, batch):
                task.handler(task)
            if drains:
                for pending, _ in state.sending:
                    pending.wait()
        except CounterflowError:
            raise
        except Exception as error:
            raise worker_error(self._place(tasks, task), error, self.transport) from error
        if drains:
            state.sending.clear()
            state.batches.clear()
        self.transport.status.now("between steps")

    def _in_turn(self, tasks: Tasks, batch: Batch | None) -> Iterator[_Task]:
        """The tasks as they begin; before the first that others see, what these were given is known."""
        status = self.transport.status
        for task in tasks.alone:
            status.now(task.action)
            yield task
        if batch is not None and batch.settle is not None:
            batch.total = batch.settle()
        for task in tasks.beside:
            status.now(task.action)
            yield task

    def _take_in(self, batch: Batch) -> None:
        """Give a mini-batch the slot after the last one's, in place of one that is over."""
        batches = self._state.batches
        if len(batches) < self.slots:
            self._newest = len(batches)
            batches.append(batch)
        else:
            self._newest = (self._newest + 1) % self.slots
            batches[self._newest] = batch
        if self.saved is not None and self.counting:
            trees = [(one.inputs, one.targets) for one in batches]
            self.saved.leave_out(t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor))

    def _place(self, tasks: Tasks, task: _Task | None) -> str:
        """``worker 2, action 5: Forward F1.2``."""
        if task is None:
            return f"worker {self.worker}"
        index = next(i for i, one in enumerate(tasks) if one is task)
        action = shifted(task.action, self._state.later, self.schedule.micro_batches)
        return f"worker {self.worker}, action {index}: {action}"

    def _update(self, task: _Task) -> None:
        action, later = task.action, self._state.later
        assert isinstance(action, Update)
        self.owner.update(action.stage, action.version + later, [v + later for v in action.frees])

    def _use(self, task: _Task, copy: StageCopy) -> None:
        """Let a stage compute with the weights its op is to use."""
        if copy.versions is not None:
            assert isinstance(task.action, Forward | Backward)
            copy.versions.use(task.action.op.version + self._state.later)

    # -- handlers

    def _forward(self, task: _Task) -> None:
        state = self._state
        batch = state.batches[task.slot]
        assert isinstance(task.action, Forward)
        values, reused = self._inputs(task, batch)
        finish = self._timed(task.action.op)
        copy = task.copy
        assert copy is not None
        if batch.training:
            self._use(task, copy)
        outputs: list[list[Tensor]] = []
        keeps = copy.recompute is not Recompute.STAGE
        with torch.set_grad_enabled(batch.training and keeps), self.autocast():
            if keeps or len(task.units) == 1 or not batch.training:
                for unit, value, buffers in zip(task.units, values, reused, strict=True):
                    outputs.append(self._forward_unit(task, copy, unit, value, buffers))
            else:
                outputs = self._forward_together(task, copy, values, reused)
        finish()
        if task.stage == self.last_stage:
            return
        for unit, tensors in zip(task.units, outputs, strict=True):
            if batch.known is None:
                batch.learnt[task.stage, unit.shape] = [TensorSpec.of(tensor) for tensor in tensors]
            if task.hands_over:
                state.handed[task.stage + 1, unit] = tensors
        if task.sends:
            flat = [tensor for tensors in outputs for tensor in tensors]
            state.outbox[task.sent_as] = flat

    def _inputs(self, task: _Task, batch: Batch) -> tuple[list[Any], list[list[Tensor]]]:
        """The op's inputs by unit, as leaves; and which of them are buffers to give back."""
        state = self._state
        if task.stage == 0:
            assert batch.inputs is not None
            found = [_part(batch.inputs[u.micro_batch], u, batch) for u in task.units]
            return found, [[] for _ in found]
        if task.number >= 0:
            tensors, pooled = state.arrivals.pop(task.number).take(len(task.units))
            if batch.known is not None:
                specs = [batch.known[task.stage - 1, unit.shape] for unit in task.units]
                for unit_tensors, unit_specs in zip(tensors, specs, strict=True):
                    for tensor, spec in zip(unit_tensors, unit_specs, strict=True):
                        tensor.requires_grad_(spec.requires_grad and batch.training)
            else:
                for unit, unit_tensors in zip(task.units, tensors, strict=True):
                    batch.learnt[task.stage - 1, unit.shape] = [TensorSpec.of(t) for t in unit_tensors]
            reused = tensors if pooled else [[] for _ in tensors]
        else:
            tensors = [
                [t.detach().requires_grad_(t.requires_grad) for t in state.handed.pop((task.stage, unit))]
                for unit in task.units
            ]
            reused = [[] for _ in tensors]
        return [value_of(unit_tensors) for unit_tensors in tensors], reused

    def _forward_unit(
        self, task: _Task, copy: StageCopy, unit: Unit, value: Value, buffers: list[Tensor]
    ) -> list[Tensor]:
        """One unit's forward; gives what the next stage takes."""
        batch = self._state.batches[task.slot]
        held: list[Kept] = []
        hooks = self.saved.watch(held) if self.saved is not None and self.counting else nullcontext()
        rows = batch.rows((unit,))
        with hooks:
            output: Any = copy.forward(value, batch.step, rows)
            tensors = self._with_loss(task, output, unit)
        inputs = _flat(value)
        if not batch.training:
            self._give_back(buffers, tensors)
            return tensors
        edges: list[GradientEdge] | None = None
        if copy.recompute is Recompute.STAGE:
            self._hold(inputs, held)
            tensors = _as_trained(tensors, copy, inputs)
        else:
            edges = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        self._state.stashes[task.stage, unit] = _Stash(inputs, edges, buffers, held)
        return tensors

    def _forward_together(
        self, task: _Task, copy: StageCopy, values: list[Value], reused: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """A doubled forward whose graph is made later, unit by unit: all units in one run."""
        batch = self._state.batches[task.slot]
        inputs = [_flat(value) for value in values]
        joined = value_of([torch.cat(same) for same in zip(*inputs, strict=True)])
        output = copy.forward(joined, batch.step, batch.rows(task.units))
        sizes = [r.stop - r.start for r in batch.rows(task.units)]
        whole = tensors_of(output, f"stage {task.stage}")
        pieces = [t.split([t.shape[0] // sum(sizes) * size for size in sizes]) for t in whole]
        outputs = []
        for index, unit in enumerate(task.units):
            held: list[Kept] = []
            self._hold(inputs[index], held)
            self._state.stashes[task.stage, unit] = _Stash(inputs[index], None, reused[index], held)
            tensors = [piece[index] for piece in pieces]
            if task.stage == self.last_stage:
                self._with_loss(task, value_of(tensors), unit)
            outputs.append(_as_trained(tensors, copy, inputs[index]))
        return outputs

    def _with_loss(self, task: _Task, output: Any, unit: Unit, *, again: bool = False) -> list[Tensor]:
        """A stage's output tensors; after the last stage, the unit's share of the loss."""
        batch = self._state.batches[task.slot]
        if task.stage != self.last_stage:
            return tensors_of(output, f"stage {task.stage}")
        assert batch.targets is not None
        loss = self.loss_function(output, _part(batch.targets[unit.micro_batch], unit, batch))
        share = batch.share(unit)
        if not again:
            batch.losses.entries.append((unit, loss.detach(), share))
        return [loss * share]

    def _backward(self, task: _Task) -> None:
        state = self._state
        assert isinstance(task.action, Backward)
        copy = task.copy
        assert copy is not None
        gradients, reused = self._output_gradients(task)
        finish = self._timed(task.action.op)
        self._use(task, copy)
        (unit,) = task.units
        stash = state.stashes.pop((task.stage, unit))
        edges: Sequence[GradientEdge | Tensor]
        if stash.edges is None:
            edges, gradients = self._recomputed(task, copy, unit, stash, gradients)
        else:
            edges = stash.edges
        if edges:
            with self._recomputed_layers(copy):
                _run_backward(edges, gradients)
        del edges
        stash.edges = None
        finish()
        if self.saved is not None:
            self.saved.release(stash.held)
        found: list[Tensor] = []
        if task.stage == 0:
            self._give_back(reused, found)
            return
        for tensor in stash.inputs:
            if tensor.requires_grad:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
                tensor.grad = None
        self._give_back(reused, found)
        if task.hands_over:
            state.gradients[task.stage - 1, unit] = found
        elif task.sends:
            state.outbox[task.sent_as] = found
        for tensor in stash.reused:
            tensor.requires_grad_(False)
        self.pool.give(stash.reused)

    def _output_gradients(self, task: _Task) -> tuple[list[Tensor], list[Tensor]]:
        if task.stage == self.last_stage:
            return [], []
        state = self._state
        if task.number < 0:
            return state.gradients.pop((task.stage, task.units[0])), []
        tensors, pooled = state.arrivals.pop(task.number).take(1)
        return tensors[0], tensors[0] if pooled else []

    def _recomputed(
        self, task: _Task, copy: StageCopy, unit: Unit, stash: _Stash, gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a unit whose forward kept only its inputs, with their graph and gradients."""
        batch = self._state.batches[task.slot]
        hooks = self.saved.watch(stash.held) if self.saved is not None and self.counting else nullcontext()
        inputs: Any = value_of(stash.inputs) if task.stage else self._first_input(unit, batch)
        with torch.enable_grad(), self.autocast(), hooks:
            output: Any = copy.forward_again(inputs, batch.step, batch.rows((unit,)))
            tensors = self._with_loss(task, output, unit, again=True)
        if task.stage == self.last_stage:
            return [tensor for tensor in tensors if tensor.requires_grad], []
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        pairs = [(t, g) for t, g in zip(floating, gradients, strict=True) if t.requires_grad]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _recomputed_layers(self, copy: StageCopy) -> AbstractContextManager[Any]:
        """Around a backward: what single layers save when they are recomputed counts until the next one."""
        saved = self.saved
        if saved is None or not self.counting or copy.recompute is not Recompute.LAYER:
            return nullcontext()
        held: list[Kept] = []
        copy.before_again = partial(saved.release, held)
        context = ExitStack()
        context.enter_context(saved.watch(held))
        context.callback(saved.release, held)
        return context

    def _give_back(self, buffers: list[Tensor], others: list[Tensor]) -> None:
        """Give buffers back to the pool, but for those that ``others`` share memory with."""
        if buffers:
            used = {tensor.untyped_storage().data_ptr() for tensor in others}
            self.pool.give([b for b in buffers if b.untyped_storage().data_ptr() not in used])

    def _first_input(self, unit: Unit, batch: Batch) -> Any:
        assert batch.inputs is not None
        return _part(batch.inputs[unit.micro_batch], unit, batch)

    def _hold(self, tensors: Sequence[Tensor], held: list[Kept]) -> None:
        if self.saved is not None and self.counting:
            for tensor in tensors:
                self.saved.hold(tensor, held)

    def _send(self, task: _Task) -> None:
        state = self._state
        known = state.batches[task.slot].known
        if known is None:
            tensors = state.outbox.pop(task.number)
            pending = self.transport.send_described(tensors, task.peer, task.number)
        else:
            tensors = self._to_send(task, known)
            pending = self.transport.send(tensors, task.peer, task.number)
        self._keep(pending, tensors)

    def _to_send(self, task: _Task, known: Shapes) -> list[Tensor]:
        """The tensors of a message whose shapes the receiver knows."""
        tensors = [tensor.detach() for tensor in self._state.outbox.pop(task.number)]
        if isinstance(task.action, SendActivation):
            self._as_known(task, tensors, known)
        return tensors

    def _keep(self, pending: Pending, tensors: list[Tensor]) -> None:
        """Keep what is sent until it is, and no longer."""
        sending = self._state.sending
        while sending and sending[0][0].done():
            sending.popleft()
        sending.append((pending, tensors))

    def _as_known(self, task: _Task, tensors: list[Tensor], known: Shapes) -> None:
        expected = [spec for unit in task.units for spec in known[task.stage, unit.shape]]
        if len(tensors) == len(expected) and all(
            tensor.shape == spec.shape and tensor.dtype is spec.dtype
            for tensor, spec in zip(tensors, expected, strict=True)
        ):
            return
        raise TypeError(
            f"stage {task.stage} gave {_shapes(tensors)} where it gave {_shapes(expected)} for inputs of the "
            "same shapes before; make the pipeline with dynamic_shapes=True"
        )

    def _receive(self, task: _Task) -> None:
        state = self._state
        known = state.batches[task.slot].known
        if known is None:
            arrival = _DescribedArrival(self.transport.receive_described(task.peer, task.number))
            state.arrivals[task.number] = arrival
            return
        buffers, specs = self._to_receive(task, known)
        pending = self.transport.receive(buffers, task.peer, task.number)
        state.arrivals[task.number] = _Arrival(pending, buffers, specs)

    def _to_receive(self, task: _Task, known: Shapes) -> tuple[list[Tensor], list[list[TensorSpec]]]:
        """Buffers for a message of known shapes, and the shapes by unit."""
        if isinstance(task.action, ReceiveActivation):
            specs = [known[task.stage, unit.shape] for unit in task.units]
        else:  # the gradient of what the stage below gave
            specs = [[s for s in known[task.stage - 1, unit.shape] if s.requires_grad] for unit in task.units]
        return [self.pool.take(spec) for unit in specs for spec in unit], specs

    def _exchange(self, task: _Task) -> None:
        """A send and a receive that cross the peer's, in one go."""
        state = self._state
        send, receive = sorted(task.both, key=lambda single: isinstance(single.action, Receive))
        sent_as, received_as = (state.batches[single.slot].known for single in (send, receive))
        if sent_as is None or received_as is None:
            for single in task.both:
                single.handler(single)
            return
        tensors = self._to_send(send, sent_as)
        buffers, specs = self._to_receive(receive, received_as)
        sent, received = self.transport.exchange(
            Crossing(tensors, send.number, task.both[0] is send),
            Crossing(buffers, receive.number, task.both[0] is receive),
            task.peer,
        )
        self._keep(sent, tensors)
        state.arrivals[receive.number] = _Arrival(received, buffers, specs)

    # -- the clock

    def _start_clock(self) -> None:
        self._ran.clear()
        self._events.clear()
        self.began_seconds = time.perf_counter()
        if self.transport.device.type == "cuda":
            self._first_event = torch.cuda.Event(enable_timing=True)
            self._first_event.record()

    def _host_timed(self, op: Op) -> Callable[[], None]:
        periods, start = self._state.later, time.perf_counter()

        def finish() -> None:
            begun = self.began_seconds
            self._ran.append(Ran(op, periods, start - begun, time.perf_counter() - begun))

        return finish

    def _cuda_timed(self, op: Op) -> Callable[[], None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._events.append((op, self._state.later, start, end))
        return end.record

    def timeline(self) -> list[tuple[Op, float, float]]:
        """The ops of the last step as they ran: their starts and ends in seconds from ``began_seconds``."""
        if self._first_event is not None:
            torch.cuda.synchronize(self.transport.device)
            first = self._first_event
            self._ran = [
                Ran(op, late, first.elapsed_time(start) / 1e3, first.elapsed_time(end) / 1e3)
                for op, late, start, end in self._events
            ]
        count = self.schedule.micro_batches
        return [
            (later(ran.op, ran.later, count) if ran.later else ran.op, ran.start, ran.end)
            for ran in self._ran
        ]


def _part(tree: Any, unit: Unit, batch: Batch) -> Any:
    """A unit's samples of its micro-batch."""
    if unit.parts == 1:
        return tree
    return cut(tree, unit.rows(batch.samples[unit.micro_batch]))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, tuple) else []


def _as_trained(tensors: list[Tensor], copy: StageCopy, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs made without a graph, marked as they would be with one."""
    if not copy.trains and not any(t.requires_grad for t in inputs):
        return tensors
    return [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]


def _run_backward(edges: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, without a second look at gradients that came in the outputs' shapes.

    Its checks in Python take as long as all else that an op costs here; the engine below has its own.
    """
    if gradients:
        _engine_run_backward(
            tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(edges)


def _shapes(found: Sequence[Tensor | TensorSpec]) -> str:
    return ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in found)
