"""The end of what is in flight, before calls that need all weights as after the last step."""

from __future__ import annotations

import time
from functools import partial

from .call_guard import CallGuard
from .execution.evaluation import EvaluationRunner
from .execution.runner import Runner
from .execution.step import Step
from .mini_batch.batches import Batches
from .mini_batch.step_report import CallKind, CallReport
from .parameters.weights import Weights
from .stages.ownership import ThreadLocalModules
from .stages.randomness import RandomStreams


class Drain:
    """Mini-batches and evaluations in flight on one worker, and the steps that no call has reported.

    Args:
        guard: guard of the pipeline's calls.
        runner: runner of the training steps.
        evaluation: runner of the evaluations.
        batches: the worker's mini-batches.
        weights: the worker's weights.
        owned: the modules that the worker trains.
        streams: random streams.
        compares: True if copies of stages are compared after a flush.
    """

    def __init__(
        self,
        guard: CallGuard,
        runner: Runner,
        evaluation: EvaluationRunner,
        *,
        batches: Batches,
        weights: Weights,
        owned: ThreadLocalModules,
        streams: RandomStreams,
        compares: bool,
    ) -> None:
        self._guard, self._runner, self._evaluation = guard, runner, evaluation
        self._batches, self._weights, self._owned, self._streams = batches, weights, owned, streams
        self._compares = compares
        self._unreported: list[Step] = []

    @property
    def in_flight(self) -> bool:
        """True if a flush would have something to do."""
        return self._runner.in_flight or self._evaluation.in_flight

    def flush(self) -> list[Step]:
        """End what is in flight; returns the steps that no call has reported. All workers call it."""
        self._guard.require_stream_consumed()
        unreported, self._unreported = self._unreported, []
        if self._evaluation.in_flight:
            with self._guard.reported():
                self._evaluation.drain()
        if not self._runner.in_flight:
            return unreported
        with self._guard.reported(), self._owned.used(), self._streams.step():
            unreported += self._end()
            if self._compares:
                self._weights.check_copies(f"after step {self._guard.steps - 1}")
        return unreported

    def settle(self) -> None:
        """End what is in flight; the next ``flush`` returns the steps. All workers call it."""
        self._unreported = self.flush()

    def end_steps(self) -> None:
        """End the steps in flight, within a call of all workers that goes on afterwards."""
        if self._runner.in_flight:
            self._unreported += self._end()

    def _end(self) -> list[Step]:
        call, began = CallReport(CallKind.FLUSH, self._guard.steps, follows=True), time.perf_counter()
        reports = self._runner.flush(call, partial(self._batches.compare, call))
        seconds = time.perf_counter() - began
        return [report.step_of(report.step, seconds / len(reports)) for report in reports]
