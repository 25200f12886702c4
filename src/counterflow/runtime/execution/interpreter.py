"""Executes one worker's action list: a table from action type to handler, and a short loop.

Invariant: a handler does what its action names and nothing else. What can be looked up once is looked up
before the first step (``tasks.py``); messages are ``messages/message_queue.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.program.actions import (
    Action,
    Agree,
    Exchange,
    Program,
    Receive,
    Send,
    StartSync,
    TellLoss,
    Update,
    WaitSync,
)
from counterflow.schedule.program.segments import shifted, shifted_op

from ..mesh.dtensors import settled, whole
from ..messages.compression import Compression
from ..messages.message_queue import MessageQueue, Taken
from ..messages.values import (
    Layout,
    Structure,
    TensorSpec,
    Unit,
    Value,
    put_together,
    take_apart,
    takes_gradient,
)
from ..mini_batch.batch import Batch, Key
from ..mini_batch.losses import Entry, LossFunction, read_loss
from ..mini_batch.samples import Dims, cut
from ..stages.randomness import Rows, versions
from ..stages.recomputation import Contents, Hold, copied, mapped, refuse_other
from ..stages.skips import Carried
from ..stages.split_backward import Joints, SplitBackward, accumulate
from ..stages.stage import StageCopy
from ..transport import Transport
from ..workers.watch import worker_error
from .meters import Kept, SavedBytes, clock_of, graph_of, pointers
from .skips import Came, Output, SkipTraffic
from .tasks import Preparation, Task, Tasks

_Output = tuple[Structure | None, list[Tensor]]
"""What the next stage takes of a unit, taken apart."""


class Owner(Protocol):
    """What the interpreter leaves to who runs it: all that is about weights."""

    def start_sync(self, sync: StartSync) -> None:
        """Begin to sum gradients, or to average running statistics."""

    def wait_sync(self, sync: WaitSync) -> None:
        """Until they are summed."""

    def tell_loss(self) -> None:
        """Begin to tell everybody this worker's part of the loss."""

    def agree(self) -> None:
        """Hear of all workers' losses and gradients, and clip these."""

    def update(self, stage: int, version: int, frees: Sequence[int]) -> None:
        """Make a version of a stage's weights; the older ones that nothing later uses may go."""


class _Given(NamedTuple):
    """What a forward runs on, for one unit.

    ``buffers`` are those of the inputs that are given back; ``by_skips`` tells how many tensors with a
    gradient came by each skip.
    """

    unit: Unit
    structure: Structure | None
    tensors: list[Tensor]
    value: Value
    buffers: Sequence[Tensor]
    rows: Rows
    by_skips: Sequence[int] = ()


class _Again(NamedTuple):
    """What a stage is computed again from.

    Attributes:
        value: its input.
        versions: of the input's tensors.
        buffers: what the stage's buffers held.
        marked: whether each output tensor was said to need a gradient.
        first: copies of the output, if the second one is compared with it.
    """

    value: Value
    versions: list[int]
    buffers: Contents
    marked: list[bool]
    first: list[Tensor] | None = None


@dataclass(slots=True)
class _Stash:
    """What a forward leaves for the backward of one unit.

    Attributes:
        inputs: the tensors of what it ran on.
        outputs: its own, until ``edges`` are made of them.
        edges: where the backward begins; None if it has to recompute the outputs first.
        by_skips: how many inputs with a gradient came by each skip.
        reused: buffers to give back after the backward.
        done: those to give back as soon as there is time.
        held: what is counted as saved for the backward.
        again: what that needs.
        joints: where the graph of a split backward is joined.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    edges: Sequence[GradientEdge] | None
    reused: Sequence[Tensor]
    held: list[Kept]
    again: _Again | None = None
    by_skips: Sequence[int] = ()
    joints: Joints | None = None
    done: Sequence[Tensor] = ()

    def release_outputs(self) -> None:
        """Keep of the outputs where the backward begins, and let them go."""
        self.edges = [get_gradient_edge(t) for t in self.outputs if t.requires_grad]
        self.outputs = []


class _Waiting(NamedTuple):
    """What an input gradient leaves for the weights' gradients of its unit.

    Attributes:
        split: the backward, half done.
        held: what is counted as kept for it.
    """

    split: SplitBackward
    held: list[Kept]


class Interpreter:
    """Runs one worker's action lists.

    Args:
        schedule: what the lists were lowered from.
        slots: mini-batches that are under way at once.
        worker: this worker's number in its group.
        ranks: the ranks of this replica's workers.
        transport: how messages travel.
        stages: the worker's stages.
        loss_function: gives the loss of the last layer's output and target; None: the output is the loss.
        owner: what does syncs and updates.
        compression: makes messages smaller; None: they go as they are.
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
        loss_function: LossFunction | None,
        owner: Owner,
        compression: Compression | None = None,
        saved: SavedBytes | None = None,
    ) -> None:
        self.schedule = schedule
        self.slots = slots
        self.worker = worker
        self.transport = transport
        self.loss_function = loss_function
        self.owner = owner
        self._stages = stages
        self._precisions = [copy.precision for copy in stages.values() if not copy.precision.plain]
        self.saved = saved
        self.counting = False
        """Whether what is saved for backward is counted, if it can be."""
        self.whole_timeline = False
        """Whether ``timeline`` has all since the pipeline was empty, and not only the last step."""
        self._last_stage = schedule.stages - 1
        self._clock = clock_of(transport.device)
        self._direct = transport.device.type == "cpu"
        self._preparation = Preparation(
            schedule,
            slots=slots,
            worker=worker,
            ranks=ranks,
            stages=stages,
        )
        self._preparation.first_number = transport.reserve_tags(self._preparation.numbers)
        # What is under way; empty whenever the pipeline is:
        self._period_offset = 0  # periods that the list at hand is run later than it says
        self._batches: list[Batch] = []
        self._newest = 0
        self._handed: dict[Key, _Output] = {}
        self._gradients: dict[Key, list[Tensor | None]] = {}
        self._stashes: dict[Key, _Stash] = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._over: list[_Stash] = []
        """Of ops that are over: what has time until the next op, after the send, is not done yet."""
        self._messages = MessageQueue(transport, self._batches, compression)
        self._skips = SkipTraffic(self._messages)

    def prepare(self, program: Program, period_offset: int = 0) -> Tasks:
        """The list of this worker with all that can be looked up before it is run.

        Args:
            program: the lists of all workers.
            period_offset: how many periods later than it says it is going to run.
        """
        handlers: dict[type[Action] | OpKind, Callable[[Task], None]] = {
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD: self._backward,
            OpKind.INPUT_GRADIENT: self._backward,
            OpKind.WEIGHT_GRADIENTS: self._weight_gradients,
            Send: self._messages.send,
            Receive: self._messages.receive,
            Exchange: self._messages.exchange,
            StartSync: self._start_sync,
            WaitSync: self._wait_sync,
            TellLoss: lambda _: self.owner.tell_loss(),
            Agree: lambda _: self.owner.agree(),
            Update: self._update,
        }
        return self._preparation.tasks(program, period_offset, handlers)

    # -- a step

    def run(self, tasks: Tasks, batch: Batch | None, *, period_offset: int = 0, drains: bool = True) -> None:
        """Run a list once.

        Args:
            tasks: the list.
            batch: the mini-batch that it begins; None if it only ends what is under way.
            period_offset: how many periods later than it says it runs.
            drains: whether nothing is under way at its end.

        Raises:
            WorkerError: something failed; it names the worker, the action and the cause.
        """
        self._period_offset = period_offset
        if not (self.whole_timeline and self._batches):
            self._clock.start()
        if not self._batches:
            self._forget_casts()
        if batch is not None:
            self._take_in(batch)
        status, now = self.transport.status, time.monotonic
        task: Task | None = None
        try:
            around = self._precisions[0].step() if self._precisions else _NOTHING
            with torch.set_grad_enabled(batch is None or batch.training), around:
                for task in tasks.local_prefix:
                    status.doing, status.waiting_for, status.since = task.action, None, now()
                    task.handler(task)
                if batch is not None and batch.await_total is not None:
                    batch.total = batch.await_total()
                for task in tasks.rest:
                    status.doing, status.waiting_for, status.since = task.action, None, now()
                    task.handler(task)
            self._end_ops()
            if drains:
                self.drain()
        except CounterflowError:
            raise
        except Exception as error:
            raise worker_error(self._place(task), error, self.transport) from error
        status.now("between steps")

    def drain(self) -> None:
        """Wait until all is sent, and forget the mini-batches that are over."""
        self._messages.drain()
        self._batches.clear()
        self._forget_casts()

    def _forget_casts(self) -> None:
        for precision in self._precisions:
            precision.forget()

    def release(self, batch: Batch) -> None:
        """Let go of the inputs and targets of a mini-batch whose ops are over: the user may change them."""
        if batch.inputs is not None or batch.targets is not None:
            given = pytree.tree_leaves((batch.inputs, batch.targets))
            batch.inputs = batch.targets = None
            self._messages.release(pointers(leaf for leaf in given if isinstance(leaf, Tensor)))

    def _take_in(self, batch: Batch) -> None:
        """Give a mini-batch the slot after the last one's, in place of one that is over."""
        batches = self._batches
        if len(batches) < self.slots:
            self._newest = len(batches)
            batches.append(batch)
        else:
            self._newest = (self._newest + 1) % self.slots
            batches[self._newest] = batch
        if self.saved is not None and self.counting:
            trees = [(one.inputs, one.targets) for one in batches]
            self.saved.leave_out(t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor))

    def _place(self, task: Task | None) -> str:
        """``worker 2, action 5: Forward F1.2``."""
        if task is None:
            return f"worker {self.worker}"
        action = shifted(task.action, self._period_offset, self.schedule.micro_batches)
        return f"worker {self.worker}, action {task.place}: {action}"

    @property
    def began_seconds(self) -> float:
        """When the timeline begins, by the machine's clock (``time.perf_counter``)."""
        return self._clock.began_seconds

    def timeline(self) -> list[tuple[Op, float, float]]:
        """The ops of the last step as they ran: their starts and ends in seconds from ``began_seconds``."""
        count = self.schedule.micro_batches
        return [
            (shifted_op(op, offset, count) if offset else op, start, end)
            for op, offset, start, end in self._clock.ran()
        ]

    def _end_ops(self) -> None:
        """Do what the last op left to be done; graphs that were gone through go as well."""
        for stash in self._over:
            if stash.outputs:
                stash.release_outputs()
            if stash.done:
                self._messages.give_back(stash.done)
        self._over.clear()

    # -- handlers

    def _start_sync(self, task: Task) -> None:
        assert isinstance(task.action, StartSync)
        self.owner.start_sync(task.action)

    def _wait_sync(self, task: Task) -> None:
        assert isinstance(task.action, WaitSync)
        self.owner.wait_sync(task.action)

    def _update(self, task: Task) -> None:
        action, period_offset = task.action, self._period_offset
        assert isinstance(action, Update)
        version, frees = action.version + period_offset, [v + period_offset for v in action.frees]
        self.owner.update(action.stage, version, frees)
        precision = self._stages[action.stage].precision
        if self.schedule.synchronous:
            precision.forget()
        else:
            precision.updated(version, frees)

    def _forward(self, task: Task) -> None:
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self.transport.stay_near()
        if self._over:
            self._end_ops()
        batch = self._batches[task.slot]
        given = self._inputs(task, copy, batch)
        begin = self._clock.begin()
        if copy.versions is not None and batch.training:
            copy.versions.use(op.version + self._period_offset)
        if not copy.precision.plain or (batch.training and copy.recompute is Recompute.STAGE):
            found = self._forward_in_context(task, copy, batch, given)
        else:
            found = [self._forward_unit(task, copy, batch, each) for each in given]
        self._clock.end(op, self._period_offset, begin)
        self.transport.computed()
        if task.stage != self._last_stage:
            self._hand_on(task, batch, found)
        elif task.ends_losses:
            batch.losses.ask()

    def _forward_in_context(
        self, task: Task, copy: StageCopy, batch: Batch, given: Sequence[_Given]
    ) -> Sequence[Output]:
        """The units' forwards with another precision, or without a graph where that is made later."""
        without_graph = batch.training and copy.recompute is Recompute.STAGE
        with torch.no_grad() if without_graph else _NOTHING, copy.precision.computing():
            if without_graph and len(given) > 1 and copy.joins is not False:
                found = self._forward_together(task, copy, batch, given)
                if found is not None:
                    return found
            return [self._forward_unit(task, copy, batch, each) for each in given]

    def _hand_on(self, task: Task, batch: Batch, found: Sequence[Output]) -> None:
        """Lay ready for the next stage what a forward gave."""
        outputs: Any = self._skips.give(task, batch, found) if task.gives else found
        if task.sent_as >= 0:
            flat = outputs[0][1] if len(outputs) == 1 else [t for _, tensors in outputs for t in tensors]
            self._messages.put(
                task.sent_as, flat, [(structure, len(tensors)) for structure, tensors in outputs]
            )
        if batch.known is None:
            for unit, output in zip(task.units, outputs, strict=True):
                batch.learnt[task.stage, unit.shape] = _layout(*output)
        if task.hands_over:
            for unit, output in zip(task.units, outputs, strict=True):
                self._handed[task.stage + 1, unit] = output

    def _inputs(self, task: Task, copy: StageCopy, batch: Batch) -> list[_Given]:
        """The op's inputs by unit, as leaves."""
        units = task.units
        rows = list(map(batch.rows.__getitem__, units))
        none: list[Tensor] = []
        if task.stage == 0:
            found = []
            for unit, its in zip(units, rows, strict=True):
                value = self._first_input(unit, batch)
                found.append(_Given(unit, None, _tensors(value), value, none, its))
            return found
        if task.number < 0:
            taken: list[Taken] = []
            leaf = _leaf if copy.entry.changes is False else copied  # the stage before may need it as it is
            for unit in units:
                structure, handed = self._handed.pop((task.stage, unit))
                taken.append((structure, [leaf(tensor) for tensor in handed], none))
        else:
            taken = self._messages.take(task.number, len(units), as_leaves=batch.training)
            if batch.known is None:
                for unit, (structure, tensors, _) in zip(units, taken, strict=True):
                    batch.learnt[task.stage - 1, unit.shape] = _layout(structure, tensors)
        found = [
            _Given(unit, structure, tensors, put_together(structure, tensors), buffers, its)
            for unit, (structure, tensors, buffers), its in zip(units, taken, rows, strict=True)
        ]
        if task.takes:
            leaf = _leaf if copy.entry.changes is False else copied
            found = list(map(_with_skips, found, self._skips.take(task, batch, leaf)))
        return found

    def _forward_unit(self, task: Task, copy: StageCopy, batch: Batch, given: _Given) -> Output:
        """One unit's forward; gives what later stages take."""
        unit, _, inputs, value, buffers, rows, by_skips = given
        if rows.start == rows.stop:
            return self._without_samples(task, batch, unit, buffers)
        held: list[Kept] = []
        if not batch.training:
            output: Any = copy.forward(value, batch.step, rows)
            found, tensors = self._with_loss(task, batch, output, unit)
            self._messages.give_back(buffers)
            return found, self._handed_on(tensors)
        if copy.recompute is Recompute.STAGE:
            return self._forward_to_recompute(task, copy, batch, given)
        copy.hold = self._holds(held) if self.counting else None
        joints: Joints | None = None
        if copy.entry.changes is not False:
            with self._joined(task, copy) as joints:
                output = self._first_run(copy, copy.entry.given(value), batch.step, rows)
        elif task.splits and copy.may_be_joined:
            with _joining(copy) as joints:
                output = copy.forward(value, batch.step, rows)
        else:
            output = copy.forward(value, batch.step, rows)
        found, tensors = self._with_loss(task, batch, output, unit)
        if self.counting or joints is not None or not copy.checked:
            self._graph_made(task, copy, inputs, tensors, held, joints=joints)
        stash = _Stash(inputs, tensors, (), buffers, held, None, by_skips, joints)
        self._over.append(stash)
        self._stashes[task.stage, unit] = stash
        return found, self._handed_on(tensors)

    def _without_samples(self, task: Task, batch: Batch, unit: Unit, buffers: Sequence[Tensor]) -> Output:
        """What has no samples runs as nothing: it hands on None and gets no gradient."""
        self._messages.give_back(buffers)
        if batch.training:
            self._stashes[task.stage, unit] = _Stash([], [], (), (), [])
        return self._apart(task, batch, None, unit)

    def _apart(self, task: Task, batch: Batch, output: Any, unit: Unit, *, again: bool = False) -> Output:
        """What a stage that is not the last gives for a unit; None: it has no samples."""
        assert task.copy is not None
        place, skips = f"stage {task.stage}", task.copy.skips
        if skips is None or not skips.gives:
            return take_apart(output, place)
        if not again:
            self._skips.give_once(task, skips, batch, unit, output and output.skips)
        return self._skips.apart(skips, output, place)

    def _handed_on(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a stage gives, and copies of what its weights and buffers are: these change in place."""
        saved = self.saved
        if saved is None or not any(map(saved.is_constant, tensors)):
            return tensors
        return [
            t.detach().clone().requires_grad_(t.requires_grad) if saved.is_constant(t) else t for t in tensors
        ]

    def _forward_to_recompute(self, task: Task, copy: StageCopy, batch: Batch, given: _Given) -> Output:
        """The same without a graph: the input is kept."""
        unit, value, rows = given.unit, given.value, given.rows
        contents = copy.buffers.now()
        same = mapped(_itself, value)  # a layer may change what its tensors are in
        kept, before = copy.entry.kept(same), versions(same)
        output: Any = self._first_run(copy, copy.entry.given(value), batch.step, rows)
        if copy.entry.changes:
            before = versions(kept)
        else:
            kept = same
        found, tensors = self._with_loss(task, batch, output, unit)
        again = _Again(kept, before, contents, [])
        if not copy.compared:
            copy.compared = True
            again = again._replace(first=[tensor.detach().clone() for tensor in tensors])
        return found, self._stashed(task, copy, given, again, tensors)

    def _first_run(self, copy: StageCopy, value: Value, step: int, rows: Rows) -> Any:
        """A stage's output; the first one tells whether it changes its input in place."""
        if copy.entry.changes is not None:
            return copy.forward(value, step, rows)
        before = versions(value)
        output = copy.forward(value, step, rows)
        copy.entry.learn(value, before)
        return output

    def _stashed(
        self, task: Task, copy: StageCopy, given: _Given, again: _Again, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Keep what a stage is computed again from; its outputs, marked as they would be with a graph."""
        inputs, held = _tensors(again.value), list[Kept]()
        trained = copy.trains or any(t.requires_grad for t in inputs)
        if trained:
            self._hold(inputs, held)
            tensors = [t.detach().requires_grad_(takes_gradient(t)) for t in tensors]
            again.marked.extend(t.requires_grad for t in tensors)
        self._stashes[task.stage, given.unit] = _Stash(
            inputs,
            [],
            None if trained else (),
            given.buffers,
            held,
            again if trained else None,
            given.by_skips,
        )
        return self._handed_on(tensors)

    def _forward_together(
        self, task: Task, copy: StageCopy, batch: Batch, given: Sequence[_Given]
    ) -> list[Output] | None:
        """A doubled forward whose graph is made later, unit by unit: all units in one run.

        None where they have to run one by one: a stage that draws, say, draws for each as it will again. The
        first time they run both ways, to see whether the samples' outputs depend on each other.
        """
        sizes = [each.rows.stop - each.rows.start for each in given]
        if not _joins([each.value for each in given], sizes, batch):
            return None
        contents = copy.buffers.now()
        output = copy.forward_joined(torch.cat([each.value for each in given]))
        if output is None:
            copy.joins = False
            return None
        structure, whole = take_apart(output, f"stage {task.stage}")
        if any(not t.dim() or t.shape[0] % sum(sizes) for t in whole):  # not all are its samples'
            return None
        pieces = [t.split([t.shape[0] // sum(sizes) * size for size in sizes]) for t in whole]
        joined = [[piece[index] for piece in pieces] for index in range(len(given))]
        if copy.joins is None:
            apart = [self._forward_unit(task, copy, batch, each) for each in given]
            if task.stage == self._last_stage:
                values = [put_together(structure, tensors) for tensors in joined]
                joined = [
                    self._with_loss(task, batch, value, each.unit, again=True)[1]
                    for each, value in zip(given, values, strict=True)
                ]
            copy.joins = all(map(_alike, joined, [tensors for _, tensors in apart]))
            return apart
        outputs: list[Output] = []
        for each, tensors in zip(given, joined, strict=True):
            if task.stage == self._last_stage:
                self._with_loss(task, batch, put_together(structure, tensors), each.unit)
            again = _Again(each.value, versions(each.value), contents, [])
            outputs.append((structure, self._stashed(task, copy, each, again, tensors)))
        return outputs

    def _with_loss(self, task: Task, batch: Batch, output: Any, unit: Unit, *, again: bool = False) -> Output:
        """A stage's output taken apart; after the last stage, the unit's share of the loss."""
        if task.stage != self._last_stage:
            return self._apart(task, batch, output, unit, again=again)
        if batch.outputs is not None and not again:
            batch.outputs[unit] = mapped(_kept, output)
        if not batch.has_loss:
            return None, []
        assert task.copy is not None
        rows = batch.rows[unit]
        if self.loss_function is not None:
            assert batch.targets is not None
            target = _part(batch.targets[unit.micro_batch], unit, batch, batch.target_dims)
            output = task.copy.loss(self.loss_function, output, target, batch.step, rows)
        means = task.copy.means
        found = read_loss(output) if means is None else means.read(output, rows.stop - rows.start)
        loss, weight, metrics, counts = found
        share = batch.share(unit)
        if weight is not None and self.schedule.synchronous:
            share = 1.0 / batch.total
        elif weight is not None:
            if share < 1.0:
                raise ConfigError(
                    f"{self.schedule.scheme} updates weights before the LossSum of all micro-batches is "
                    "known; return the mean loss of each, or take a scheme with a flush"
                )
            loss, metrics = loss / weight, {name: value / weight for name, value in metrics.items()}
            weight = None
        if not again:
            batch.losses.entries.append(Entry(unit, loss.detach(), share, weight, metrics, counts))
        return None, [loss * share]

    def _backward(self, task: Task) -> None:
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self.transport.stay_near()
        if self._over:
            self._end_ops()
        (unit,) = task.units
        stash = self._stashes.pop((task.stage, unit))
        edges: Sequence[Any] | None = stash.edges
        rows = self._batches[task.slot].rows[unit] if unit.parts > 1 else None
        split: SplitBackward | None = None
        if task.splits and edges is not None:
            split = SplitBackward(copy.splitting, stash.inputs, stash.joints)
            split.look_ahead(edges)  # before anything is waited for
        gradients, reused = self._output_gradients(task)
        begin = self._clock.begin()
        if copy.versions is not None:
            copy.versions.use(op.version + self._period_offset)
        if edges is None:
            edges, known = self._recomputed(task, copy, unit, stash, gradients)
            if task.splits:
                split = SplitBackward(copy.splitting, stash.inputs, stash.joints)
        else:
            edges, known = _with_gradients(edges, gradients)
        around = self._around_backward(copy, rows)
        if around is None:
            self._differentiate(op, edges, known, split)
        else:
            with around:
                self._differentiate(op, edges, known, split)
        self._clock.end(op, self._period_offset, begin)
        self.transport.computed()
        if task.stage > 0:
            self._hand_back(task, unit, stash)
        if split is not None and op.kind is OpKind.INPUT_GRADIENT:
            self._waiting[task.stage, unit] = _Waiting(split, [])
        stash.done = [*reused, *stash.reused]
        self._over.append(stash)
        if stash.held or self.counting:
            self._count(task, unit, stash)

    def _hand_back(self, task: Task, unit: Unit, stash: _Stash) -> None:
        """Lay ready for the stage before what a backward gave."""
        found = self._input_gradients(task, stash)
        if task.sent_as >= 0:
            self._messages.put(task.sent_as, found)
        elif task.hands_over:
            self._gradients[task.stage - 1, unit] = found

    def _count(self, task: Task, unit: Unit, stash: _Stash) -> None:
        """What is kept after a backward, and what no more."""
        if self.saved is None:
            return
        self.saved.release(stash.held)
        waiting = self._waiting.get((task.stage, unit))
        if waiting is not None and self.counting:
            self._hold(waiting.split.kept(), waiting.held)

    def _differentiate(
        self, op: Op, edges: Sequence[Any], gradients: Sequence[Tensor], split: SplitBackward | None
    ) -> None:
        """The gradients that an op makes."""
        if not edges:
            return
        if split is None:
            accumulate(edges, gradients, into=None, direct=self._direct)
            return
        split.input_gradient(edges, gradients, look=self.counting)
        if op.kind is not OpKind.INPUT_GRADIENT:  # the backward of another share is split
            split.weight_gradients()

    def _weight_gradients(self, task: Task) -> None:
        op, copy = task.op, task.copy
        assert op is not None
        assert copy is not None
        self.transport.stay_near()
        if self._over:
            self._end_ops()
        (unit,) = task.units
        waiting = self._waiting.pop((task.stage, unit))
        rows = self._batches[task.slot].rows[unit] if unit.parts > 1 else None
        begin = self._clock.begin()
        if copy.versions is not None:
            copy.versions.use(op.version + self._period_offset)
        around = self._around_backward(copy, rows)
        if around is None:
            waiting.split.weight_gradients()
        else:
            with around:
                waiting.split.weight_gradients()
        self._clock.end(op, self._period_offset, begin)
        self.transport.computed()
        if waiting.held:
            assert self.saved is not None
            self.saved.release(waiting.held)

    def _input_gradients(self, task: Task, stash: _Stash) -> list[Tensor | None]:
        """Of what the stage before gave, None where there is none; those of skips are on their way."""
        found: list[Tensor | None] = []
        for tensor in stash.inputs:
            if tensor.requires_grad:
                grad = tensor.grad
                found.append(grad if grad is None or type(grad) is Tensor else settled(grad))
                tensor.grad = None
        return self._skips.give_gradients(task, found, stash.by_skips) if task.gives else found

    def _output_gradients(self, task: Task) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        found, reused = self._next_gradients(task)
        if task.takes:
            more, buffers = self._skips.take_gradients(task)
            return [*found, *more], [*reused, *buffers]
        return found, reused

    def _next_gradients(self, task: Task) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Of what the next stage took."""
        if task.stage == self._last_stage:
            return [], []
        if task.number < 0:
            return self._gradients.pop((task.stage, task.units[0])), []
        return self._messages.take_gradients(task.number)

    def _recomputed(
        self, task: Task, copy: StageCopy, unit: Unit, stash: _Stash, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a unit whose forward kept only its inputs, with their graph and gradients."""
        batch, again = self._batches[task.slot], stash.again
        assert again is not None
        if versions(again.value) != again.versions:
            raise ConfigError(
                f"the input of stage {task.stage} was changed in place before the stage was computed again, "
                "which did not happen in the first forward; copy it before it is changed"
            )
        with (
            copy.precision.computing(),
            copy.buffers.as_then(again.buffers),
            self._joined(task, copy) as stash.joints,
        ):
            output: Any = copy.forward(copy.entry.given(again.value), batch.step, batch.rows[unit])
            _, tensors = self._with_loss(task, batch, output, unit, again=True)
        if again.first is not None:
            refuse_other(tensors, again.first, f"stage {task.stage}")
        self._graph_made(task, copy, stash.inputs, tensors, stash.held, joints=stash.joints)
        if task.stage == self._last_stage:
            return [tensor for tensor in tensors if tensor.requires_grad], []
        marked = [tensor for tensor, was in zip(tensors, again.marked, strict=True) if was]
        pairs = zip(marked, gradients, strict=True)
        there = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
        return [t for t, _ in there], [g for _, g in there]

    def _around_backward(self, copy: StageCopy, rows: Rows | None) -> AbstractContextManager[Any] | None:
        """What a backward runs in, if there is anything; ``rows`` as for ``RandomStreams.backward``."""
        drawing, casting = copy.streams.backward(rows), copy.precision.backward()
        saved = self.saved
        counts = saved is not None and self.counting and copy.recompute is Recompute.LAYER
        if casting is None and not counts:
            return drawing
        context = self._recounted(copy, saved) if saved is not None and counts else ExitStack()
        for other in (drawing, casting):
            if other is not None:
                context.enter_context(other)
        return context

    def _recounted(self, copy: StageCopy, saved: SavedBytes) -> ExitStack:
        """Around a backward: what single layers save when they are recomputed counts until the next one."""
        held: list[Kept] = []

        def recount() -> Hold:
            saved.release(held)
            return partial(saved.hold, collected=held)

        copy.recount = recount
        context = ExitStack()
        context.callback(saved.release, held)
        context.callback(setattr, copy, "recount", None)
        return context

    def _joined(self, task: Task, copy: StageCopy) -> AbstractContextManager[Joints | None]:
        """Around a forward with a graph: notes where this is joined, if its backward is split."""
        return _joining(copy) if task.splits else _NOTHING

    def _graph_made(
        self,
        task: Task,
        copy: StageCopy,
        inputs: list[Tensor],
        outputs: list[Tensor],
        held: list[Kept],
        *,
        joints: Joints | None,
    ) -> None:
        """Count what a graph keeps for its backward, if that is counted; look at a stage's first graph."""
        if self.saved is not None and self.counting:
            self.saved.note(graph_of(outputs, more=joints.ends if joints is not None else ()), held)
        if joints is not None:
            joints.learn(outputs, inputs)
        if not copy.checked:
            targets = self._batches[task.slot].targets
            copy.check_graph(outputs, [*inputs, *_tensors(targets)], joints)

    def _holds(self, held: list[Kept]) -> Hold | None:
        """Counts what is kept for a backward, if that is counted, and notes it in ``held``."""
        return partial(self.saved.hold, collected=held) if self.saved is not None and self.counting else None

    def _hold(self, tensors: Sequence[Tensor], held: list[Kept]) -> None:
        if self.saved is not None and self.counting:
            for tensor in tensors:
                self.saved.hold(tensor, held)

    def _first_input(self, unit: Unit, batch: Batch) -> Any:
        assert batch.inputs is not None
        part = _part(batch.inputs[unit.micro_batch], unit, batch, batch.input_dims)
        if isinstance(part, Tensor):
            return part
        return pytree.tree_map(lambda leaf: leaf, part)  # a layer may take things out of its dicts


_NOTHING = nullcontext()


@contextmanager
def _joining(copy: StageCopy) -> Iterator[Joints]:
    copy.joints = joints = Joints(copy.splitting)
    try:
        yield joints
    finally:
        copy.joints = None


def _with_skips(given: _Given, came: Came) -> _Given:
    """What a forward runs on with what came by skips."""
    value, held = given.value if type(given.value) is Carried else (given.value, {})
    return given._replace(
        tensors=[*given.tensors, *came.tensors],
        value=Carried(value, {**held, **came.skips}),
        buffers=[*given.buffers, *came.buffers],
        by_skips=came.gradients,
    )


def _part(tree: Any, unit: Unit, batch: Batch, dims: Dims) -> Any:
    """A unit's samples of its micro-batch."""
    if unit.parts == 1:
        return tree
    return cut(tree, unit.rows(batch.samples[unit.micro_batch]), dims)


def _with_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]
) -> tuple[Sequence[GradientEdge], list[Tensor]]:
    """Those of a stage's outputs that have a gradient; a loss needs none."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < len(gradients):
        edges = [e for e, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    return edges, there


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return list({id(tensor): tensor for tensor in found}.values())


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _kept(tensor: Tensor) -> Tensor:
    """Its content as it is now: the user's loss, or an update, may change it."""
    return whole(tensor.detach()).clone()


def _layout(structure: Structure | None, tensors: Sequence[Tensor]) -> Layout:
    return Layout(structure, [TensorSpec.of(tensor) for tensor in tensors])


def _joins(values: Sequence[Any], sizes: Sequence[int], batch: Batch) -> bool:
    """Whether values of several units are one of all their samples: lone tensors with these before all."""
    return batch.input_dims == 0 and all(
        size > 0 and isinstance(value, Tensor) and value.dim() > 0 and not value.shape[0] % size
        for value, size in zip(values, sizes, strict=True)
    )


def _alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are the same but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not takes_gradient(one):
            if not torch.equal(one, other):
                return False
        elif one.numel():
            error = 8 * torch.finfo(one.dtype).eps ** 0.5
            if not bool((one - other).abs().max() <= error * other.abs().max()):  # nor is what is not finite
                return False
    return True
