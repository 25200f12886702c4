"""Pairs of ops that run at once: the all-to-all of one beside the compute of the other.

The forward runs in the worker's thread, the backward (and its recomputation) in a thread of its own, in turns
(``api/turns.py``). Inputs of both are received before, results of both are published after, in the order of
the list. So only the compute of the two stages is interleaved, at the places where they exchange tokens.

Invariant: numbers are those of the ops one after another, bit for bit. The first mini-batch runs so: it
diagnoses the stages. All positions of the mesh run the same pairs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from typing_extensions import override

from counterflow.api.aux_loss import collecting
from counterflow.api.turns import Turns
from counterflow.common.tensors import torch_private
from counterflow.common.tensors.devices import holds_host, module_of
from counterflow.errors import ConfigError

from ..mini_batch.batch import Batch
from .backwards import RunBackward
from .tasks import ActionTask, RunOp


class PairThread:
    """Thread of the backward of each pair, made when it is first needed.

    Attributes:
        at_once: True if ops of pairs run at once, False if one after another.
    """

    def __init__(self) -> None:
        self.at_once = False

    @cached_property
    def executor(self) -> ThreadPoolExecutor:
        """Executor with one thread."""
        return ThreadPoolExecutor(1, "counterflow-pair")


class RunPair(ActionTask):
    """The ops of a pair; in the list it has the place of the first one.

    Args:
        tasks: ops of the pair, in the order of the list.
        thread: thread of the backward.

    Attributes:
        failing: the op that failed, if one did.
    """

    def __init__(self, tasks: Sequence[RunOp], thread: PairThread) -> None:
        super().__init__(tasks[0].action)
        self.failing: RunOp = tasks[0]
        self._tasks, self._thread = tasks, thread
        self._sides = [
            [task for task in tasks if task.op.kind.is_forward is forward] for forward in (True, False)
        ]
        """The forward; the backward, after its recomputation if there is one."""
        self._inputs: dict[RunOp, Any] = {}
        self._results: dict[RunOp, Any] = {}
        self._mark: Any = None

    @property
    def place(self) -> int:
        """Place of the op that failed among those of the pair."""
        return self._tasks.index(self.failing)

    @override
    def run(self) -> None:
        if self._thread.at_once:
            self._run_at_once()
            return
        for task in self._tasks:
            self.failing = task
            task.run()

    def _run_at_once(self) -> None:
        first = self._tasks[0]
        in_flight, transport = first.in_flight, first.in_flight.transport
        transport.stay_near()
        if in_flight.ended:
            in_flight.end_ops()  # work that has time until an op runs
        batch = in_flight.batches[first.slot]
        *recomputations, backward = self._sides[1]
        assert isinstance(backward, RunBackward)
        backward.prepares_late = bool(recomputations)
        for task in self._tasks:
            self.failing = task
            self._inputs[task] = task.receive(batch)
        self._mark = in_flight.clock.begin()
        device, training = transport.device, batch.training
        forward, backwards = (partial(self._compute, batch, side) for side in self._sides)
        turns = Turns(
            forward, partial(_in_thread, backwards, _stream(device), training), first.local_stage.streams
        )
        turns.run(self._thread.executor, begins=int(not first.op.kind.is_forward))
        transport.computed()
        for task in self._tasks:
            if task not in recomputations:
                self.failing = task
                task.publish(batch, self._inputs[task], self._results[task])
        self._inputs.clear()
        self._results.clear()

    def _compute(self, batch: Batch, side: Sequence[RunOp]) -> None:
        """Run the ops of a side; their times begin where that of the op that ended last ends."""
        for task in side:
            in_flight = task.in_flight
            try:
                self._results[task] = task.compute(batch, self._inputs[task])
            except Exception:
                self.failing = task
                raise
            in_flight.clock.end(task.op, in_flight.period_offset, self._mark)
            self._mark = in_flight.clock.begin()
            if task is not side[-1]:
                task.publish(batch, self._inputs[task], self._results[task])


class PairedOp(ActionTask):
    """An op of a pair that its first one runs."""

    @override
    def run(self) -> None:
        pass


def _in_thread(
    compute: Callable[[], None],
    stream: AbstractContextManager[Any],
    training: bool,
) -> None:
    # Contexts of torch are each thread's own.
    with stream, torch.set_grad_enabled(training), collecting(by_stage=True):
        compute()


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    if not holds_host(device):
        return nullcontext()
    module = module_of(device)
    # Another thread has a current stream of its own.
    stream: AbstractContextManager[Any] = module.stream(module.current_stream(device))
    return stream


def refuse_contexts() -> None:
    """Refuse contexts of torch that the thread of a pair would not have.

    Raises:
        ConfigError: a mode or autocast is on in this thread.
    """
    modes = torch_private.active_modes()
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        modes = ["torch.autocast", *modes]
    if modes:
        raise ConfigError(
            f"overlap_experts: {' and '.join(modes)} is on around the step, in this thread alone, and "
            "backwards run in another one; leave it before the step, or run without overlap_experts"
        )
