"""Runs the forwards of mini-batches on which nothing is trained, and gathers what came of them.

A worker goes on with the next step as soon as its own forwards have run: the gather of the losses is begun
there and read later.

Invariant: all workers begin the same evaluations in the same order. A result that was begun is read without
the other workers, so that each may ask for it whenever it likes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.program.actions import Program

from ..mini_batch.batch import Batch
from ..parameters.shared_state import SharedState
from ..stages.attributes import restored_attributes
from ..stages.stage import LocalStage
from .gathers import GatherRequest, Head, MiniBatch, StepGathers
from .interpreter import Interpreter
from .step import Evaluation, Workers

Outcome = list[Evaluation | CounterflowError]
"""Result or error of an evaluation, once it is known; empty before."""


class PendingEvaluation:
    """An evaluation whose result may still be on its way; made by ``Pipeline.start_evaluation``.

    Args:
        outcome: list that receives the result, or the error.
        read: waits until it is there.
    """

    def __init__(self, outcome: Outcome, read: Callable[[Outcome], None]) -> None:
        self._outcome, self._read = outcome, read

    def result(self) -> Evaluation:
        """Wait until all workers have run it; each worker may ask when it likes, or not at all.

        Raises:
            ConfigError: it has metrics of other names than the pipeline's first evaluation.
            WorkerError: a worker failed, or nothing in the mini-batch counts.
        """
        if not self._outcome:
            self._read(self._outcome)
        (outcome,) = self._outcome
        if isinstance(outcome, CounterflowError):
            raise outcome
        return outcome


class EvaluationRunner:
    """One worker's part.

    Args:
        program: the lists of all workers.
        make: makes the interpreter of a schedule.
        stages: this worker's.
        workers: where this worker is.
        shared: what stages share.
    """

    def __init__(
        self,
        program: Program,
        make: Callable[..., Interpreter],
        stages: Mapping[int, LocalStage],
        workers: Workers,
        shared: SharedState,
    ) -> None:
        self._shared = shared
        self._interpreter, self._stages, self._workers = make(program.schedule), stages, workers
        self._tasks = self._interpreter.prepare(program, {})
        self.peers = self._tasks.peers
        """The ranks to which messages go or from which they come."""
        self._gathers = StepGathers(workers, digests=0, together=1, square=_no_norm, head=_no_report)
        self._begun: deque[tuple[Outcome, MiniBatch]] = deque()
        self.named = False
        """Whether all workers know the names of the metrics."""
        self.in_flight = False
        """Whether results were not read, or what was sent may still be on its way."""

    def run(self, batch: Batch) -> None:
        """Run the forwards in evaluation mode; their losses and outputs are the batch's then."""
        with ExitStack() as evaluating:
            for stage in self._stages.values():
                evaluating.enter_context(stage.evaluating())
            self.in_flight = True
            self._shared.note(training=False)
            try:
                self._interpreter.run(self._tasks, batch, drains=False)
            except WorkerError as error:
                self._shared.explain(error)
                raise
            self._shared.check()
        self._interpreter.leave(batch)
        self._shared.end()

    def probe(self, batch: Batch) -> None:
        """Run the forwards of a check, which leave the modules as they were; outputs are the batch's then."""
        with ExitStack() as probing:
            for stage in self._stages.values():
                probing.enter_context(stage.probing())
                modules = (m for layer in stage.with_weights for m in layer.module.modules())
                probing.enter_context(restored_attributes(modules))
            self._interpreter.run(self._tasks, batch, drains=False)
            self._interpreter.in_flight.messages.drain()
        self._interpreter.leave(batch)

    def start(self, batch: Batch, read: Callable[[Outcome], None]) -> PendingEvaluation:
        """Run the forwards, and begin to gather their losses; all workers have run earlier ones by then.

        Args:
            batch: the mini-batch.
            read: waits for the result where it is asked for.
        """
        self.run(batch)
        self.read()
        mini_batch = MiniBatch(batch.step, batch.losses, compared=False, updates=False)
        self._gathers.start(GatherRequest(mini_batch, None, None))
        outcome: Outcome = []
        self._begun.append((outcome, mini_batch))
        return PendingEvaluation(outcome, read)

    def read(self, last: Outcome | None = None, *, together: bool = False) -> None:
        """Wait for results, in the order in which they were begun.

        Args:
            last: where the last one goes; None: all.
            together: whether all workers make this call, so that they may agree on names of metrics.

        Raises:
            ConfigError: names of metrics are new, and other workers may not be here.
            WorkerError: nothing in a mini-batch counts.
        """
        while self._begun:
            outcome, mini_batch = self._begun.popleft()
            try:
                outcome.append(self._result(mini_batch, together=together))
            except CounterflowError as error:
                outcome.append(error)
                raise
            if outcome is last:
                return

    def drain(self) -> None:
        """Read all results, on all workers together, and wait until all is sent."""
        self.read(together=True)
        self._interpreter.drain()
        self.in_flight = False

    def _result(self, mini_batch: MiniBatch, *, together: bool) -> Evaluation:
        self._workers.transport.status.now("gathering what came of an evaluation")
        gathered = self._gathers.wait()
        if gathered.has_new_metrics and not together:
            raise ConfigError(
                f"the evaluation after step {mini_batch.step - 1} has metrics of other names than the "
                "first one, on which all workers would have to agree; call evaluate"
            )
        weighed = [part.weights for part in gathered.parts]
        scale = 1 / self._workers.weight(weighed, mini_batch.step)[0]
        metrics = self._gathers.metrics(gathered, weighed, mini_batch.losses, scale)
        self.named = True
        return Evaluation(scale * math.fsum(part.loss for part in gathered.parts), metrics)


def _no_norm(_: MiniBatch) -> float:
    return 0.0


def _no_report(_: GatherRequest) -> Head:
    return (), lambda _: None  # the calls were compared before anything was sent
