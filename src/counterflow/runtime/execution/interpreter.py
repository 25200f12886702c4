"""Executes one worker's action list: a table from kinds of actions to tasks, and a short loop.

Invariant: what can be looked up once is looked up before the first step, when tasks are made.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.profiler import record_function

from counterflow.api.aux_loss import collecting
from counterflow.common.tensors.torch_private import profiling
from counterflow.errors import CounterflowError
from counterflow.program.actions import Action, Compute, Program, Receive, Send
from counterflow.program.communication.receive_buffers import lifetimes
from counterflow.program.shifts import shifted, shifted_op
from counterflow.schedule.ir import Op, OpKind, Product, Schedule

from ..messages.compression import Compression
from ..messages.receive_layout import ReceiveLayout
from ..mini_batch.batch import Batch
from ..mini_batch.loss_output import LossFunction
from ..stages.saved_bytes import SavedBytes
from ..stages.stage import LocalStage
from ..stages.stage_wrappers import failing_part
from ..transport.base import Transport
from ..transport.worker_watch import worker_error
from .addresses import Addresses
from .backwards import GradientTask, RunBackward, RunVerb, RunWeightGradients
from .forwards import RunForward
from .in_flight import InFlight
from .meters import clock_of
from .outputs import Outputs
from .pairs import PairedOp, PairThread, RunPair, refuse_contexts
from .tasks import ActionTask, DoOther, ReceiveTask, RunOp, SendTask, Tasks, Tools

_NOTHING = nullcontext()

TASKS: Mapping[OpKind | type[Action], Callable[[Any, Tools, int], ActionTask]] = {
    OpKind.FORWARD: RunForward,
    OpKind.BACKWARD: RunBackward,
    OpKind.INPUT_GRADIENT: RunBackward,
    OpKind.WEIGHT_GRADIENTS: RunWeightGradients,
    **{kind: RunVerb for kind in OpKind if kind.verb},
    Send: SendTask,
    Receive: ReceiveTask,
}
"""What runs each kind of op and of message; all other actions are the runner's."""


class Interpreter:
    """Runs one worker's action lists.

    Args:
        schedule: what the lists were lowered from.
        slots: mini-batches that are in flight at once.
        worker: this worker's number in its group.
        ranks: the ranks of this replica's workers.
        transport: how messages travel.
        stages: the worker's stages.
        loss_function: gives the loss of the last layer's output and target; None: the output is the loss.
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
        stages: Mapping[int, LocalStage],
        loss_function: LossFunction | None,
        compression: Compression | None = None,
        saved: SavedBytes,
    ) -> None:
        self.schedule = schedule
        self.slots = slots
        self.worker = worker
        self.transport = transport
        self._precisions = [
            local_stage.precision for local_stage in stages.values() if not local_stage.precision.plain
        ]
        self.saved = saved
        self.tracing = False
        """Whether ``timeline`` has all ops since ``trace``, and not only those of the last step."""
        self._clock = clock_of(transport.device)
        self.in_flight = in_flight = InFlight(
            transport, slots=slots, clock=self._clock, compression=compression, saved=saved
        )
        addresses = Addresses(schedule, slots=slots, worker=worker, ranks=ranks, messages=in_flight.messages)
        outputs = Outputs(schedule, loss_function, saved)
        self._tools = Tools(in_flight, outputs, addresses, stages)
        self._pair_thread = PairThread()
        self._trained = False
        """True if a mini-batch was trained, which diagnoses the stages."""

    def prepare(
        self,
        program: Program,
        handlers: Mapping[type[Action], Callable[[Any], None]],
        period_offset: int = 0,
    ) -> Tasks:
        """The list of this worker with all that can be looked up before it is run.

        Args:
            program: the lists of all workers.
            handlers: functions of the actions that are neither ops nor messages.
            period_offset: how many periods later than it says it is going to run.
        """
        tasks: list[ActionTask] = []
        pairs: list[tuple[int, int]] = []
        last_loss: RunForward | None = None
        last: dict[tuple[int, int], GradientTask] = {}
        for action in program.actions[self.worker]:
            make = TASKS.get(action.op.kind if isinstance(action, Compute) else type(action))
            if make is None:
                tasks.append(DoOther(action, handlers[type(action)]))
                continue
            if isinstance(action, Compute) and action.pair:
                pairs.append((len(tasks), len(tasks) + len(action.pair)))
            task = make(action, self._tools, period_offset)
            tasks.append(task)
            if isinstance(task, RunForward) and task.local_stage.last:
                last_loss = task
            if isinstance(task, GradientTask) and Product.WEIGHT_GRADIENTS in task.op.kind.makes:
                last[task.stage, self.schedule.period_of(task.op)] = task
        for task in last.values():
            task.ends_gradients = True
        if last_loss is not None:
            last_loss.ends_losses = self.schedule.synchronous
        for begin, stop in pairs:
            paired = tasks[begin:stop]
            tasks[begin:stop] = [
                RunPair([task for task in paired if isinstance(task, RunOp)], self._pair_thread),
                *(PairedOp(task.action) for task in paired[1:]),
            ]
        if self.schedule.synchronous:
            receives = [task.envelope for task in tasks if isinstance(task, ReceiveTask)]
            ReceiveLayout(lifetimes(program, self.worker), receives)
        prefix = next((i for i, task in enumerate(tasks) if not self._is_local(task.action)), len(tasks))
        return Tasks(tuple(tasks[:prefix]), tuple(tasks[prefix:]))

    def _is_local(self, action: Action) -> bool:
        # no other worker sees it, and nothing in it depends on the batches of others
        if isinstance(action, Compute):
            return (
                not action.pair
                and action.op.kind.is_forward
                and action.op.stage == 0 != self.schedule.stages - 1
            )
        return isinstance(action, Receive)

    # -- a step

    def run(self, tasks: Tasks, batch: Batch | None, *, period_offset: int = 0, drains: bool = True) -> None:
        """Run a list once.

        Args:
            tasks: the list.
            batch: the mini-batch that it begins; None if it only ends what is in flight.
            period_offset: how many periods later than it says it runs.
            drains: whether nothing is in flight at its end.

        Raises:
            WorkerError: something failed; it names the worker, the action and the cause.
        """
        self.in_flight.period_offset = period_offset
        if self.schedule.pairs:
            refuse_contexts()
            self._pair_thread.at_once = self._trained
            self._trained = True
        ops = batch is not None or any(isinstance(task.action, Compute) for task in tasks)
        if ops and not self.tracing:
            self._clock.start()
        if not self.in_flight.batches:
            self._forget_casts()
        if batch is not None:
            self.in_flight.admit(batch)
        status, now = self.transport.status, time.monotonic
        named = profiling()
        task: ActionTask | None = None
        try:
            around = self._precisions[0].step() if self._precisions else _NOTHING
            with torch.set_grad_enabled(batch is None or batch.training), around, collecting(by_stage=True):
                for task in tasks.local_prefix:
                    status.doing, status.waiting_for, status.since = task.action, None, now()
                    _run_named(task) if named else task.run()
                self.transport.get_ready()
                if batch is not None:
                    batch.agree()
                for task in tasks.rest:
                    status.doing, status.waiting_for, status.since = task.action, None, now()
                    _run_named(task) if named else task.run()
            self.in_flight.end_ops()
            if drains:
                self.drain()
        except CounterflowError:
            raise
        except Exception as error:
            raise worker_error(self._place(tasks, task, error), error, self.transport) from error
        status.now("between steps")

    def drain(self) -> None:
        """Wait until all is sent, and forget the mini-batches that are over."""
        self.in_flight.messages.drain()
        self.in_flight.batches.clear()
        self._forget_casts()

    def leave(self, batch: Batch) -> None:
        """Forget the mini-batches that are over, of which not all may be sent; ``batch`` may change then."""
        self.in_flight.release(batch)
        self.in_flight.batches.clear()
        self._forget_casts()

    def _forget_casts(self) -> None:
        for precision in self._precisions:
            precision.forget()

    def _place(self, tasks: Tasks, task: ActionTask | None, error: Exception) -> str:
        place = self._action(tasks, task)
        layers = (layer for local_stage in self._tools.stages.values() for layer in local_stage.layers)
        if (part := failing_part(error, layers)) is not None:
            place = f"{place}, {part}"
        if isinstance(task, RunOp) and task.is_empty:
            place += (
                " (on no rows, as this position has fewer samples than micro-batches, and others wait for "
                "what it communicates: give each position at least one sample a micro-batch)"
            )
        return place

    def _action(self, tasks: Tasks, task: ActionTask | None) -> str:
        if task is None:
            return f"worker {self.worker}"
        place = next(place for place, candidate in enumerate(tasks) if candidate is task)
        action = task.action
        if isinstance(task, RunPair):
            place, action = place + task.place, Compute(task.failing.op)
        action = shifted(action, self.in_flight.period_offset, self.schedule.micro_batches)
        return f"worker {self.worker}, action {place}: {action}"

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Keep the times of all ops from here on."""
        self._clock.start()
        self.tracing = True
        try:
            yield
        finally:
            self.tracing = False

    @property
    def began_seconds(self) -> float:
        """Beginning of the timeline, by the machine's clock (``time.perf_counter``)."""
        return self._clock.began_seconds

    def timeline(self) -> list[tuple[Op, float, float]]:
        """The ops of the last step as they ran: their starts and ends in seconds from ``began_seconds``."""
        count = self.schedule.micro_batches
        return [
            (shifted_op(op, offset, count) if offset else op, start, end)
            for op, offset, start, end in self._clock.ran()
        ]


def _run_named(task: ActionTask) -> None:
    with record_function(str(task.action)):
        task.run()


def timelines(
    transport: Transport, interpreter: Interpreter, ranks: Sequence[int]
) -> list[list[tuple[Op, float, float]]]:
    """The ops of some workers as they ran, on one clock a machine; all workers call it.

    Args:
        transport: how to reach the others.
        interpreter: this worker's.
        ranks: those asked for.
    """
    own_row = platform.node(), interpreter.began_seconds, interpreter.timeline()
    rows = cast("list[tuple[str, float, list[tuple[Op, float, float]]]]", transport.gather_objects(own_row))
    first: dict[str, float] = {}  # by machine: its workers share a clock, those of others do not
    for machine, began, _ in rows:
        first[machine] = min(began, first.get(machine, began))
    return [
        [(op, start + late, end + late) for op, start, end in row]
        for machine, began, row in (rows[rank] for rank in ranks)
        for late in (began - first[machine],)
    ]
