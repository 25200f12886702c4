"""Training steps of one worker: a mini-batch's batch, its run, what it reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from .assembly.local_stages import LocalStages
from .call_guard import CallGuard
from .execution.runner import Runner
from .execution.step import Step
from .footprint.first_step import FirstStep
from .inference import Inference
from .inspection import Inspection
from .intake import Intake
from .mini_batch.batches import Batches
from .mini_batch.step_report import CallKind
from .mini_batch.user_batch import UserBatch
from .parameters.weights import Weights
from .stages.randomness import RandomStreams
from .witness.witness import Witness


class TrainingSteps:
    """Steps of one worker; the number of the next one is the guard's.

    Args:
        guard: guard of the pipeline's calls, with the number of steps.
        intake: makes batches.
        runner: runner of the steps.
        schedule: schedule of the pipeline.
        batches: the worker's mini-batches.
        weights: the worker's weights.
        local: the worker's stages.
        streams: random streams.
        witness: comparison with the user's own forward.
        inference: outputs of a batch.
        inspection: log of what a step showed.
        counted_steps: first steps in which bytes are counted.
    """

    def __init__(
        self,
        guard: CallGuard,
        intake: Intake,
        runner: Runner,
        *,
        schedule: Schedule,
        batches: Batches,
        weights: Weights,
        local: LocalStages,
        streams: RandomStreams,
        witness: Witness,
        inference: Inference,
        inspection: Inspection,
        counted_steps: int,
    ) -> None:
        self._guard, self._intake, self._runner = guard, intake, runner
        self._schedule, self._batches, self._weights, self._local = schedule, batches, weights, local
        self._streams, self._witness = streams, witness
        self._inference, self._inspection = inference, inspection
        self.counted_steps = counted_steps
        self.first_step: FirstStep | None = None
        """Check of the first step's memory, until it is made."""

    def step(self, user_batch: Callable[[], UserBatch], *, update: bool, outputs: bool) -> Step:
        """Train on a mini-batch, as ``Pipeline.step``; ``user_batch`` reads the user's arguments."""
        began = time.perf_counter()

        def checked() -> UserBatch:
            self._refuse(update=update, outputs=outputs)
            return user_batch()

        guard, runner = self._guard, self._runner
        with guard.reported():
            with self._local.owned.used(), self._streams.step(), self._local.kept_buffers():
                batch = self._intake.batch(
                    checked, CallKind.STEP if update else CallKind.KEEP, outputs=outputs
                )
                if self._weights.owners is not None and batch.compared and not runner.in_flight:
                    # An update ends with the owners' weights everywhere, so that it hides differences.
                    self._weights.check_copies(f"before step {guard.steps}")
                first_step, self.first_step = self.first_step, None
                if first_step is not None:
                    first_step.check(batch)
                self._witness.find_state(batch)
                if self._witness.due(training=True):
                    self._witness.begin(batch, in_flight=runner.in_flight)
                runner.interpreter.saved.counting = guard.steps < self.counted_steps
                feeds = batch.feeds
                report = runner.step(batch, update=update)
                for feed in feeds:
                    feed.wait()
                self._batches.remember(batch)
                of_last = self._inference.outputs(batch) if outputs else None
                self._witness.end(in_flight=runner.in_flight)
            seconds = time.perf_counter() - began
            if report is None:
                step = Step(guard.steps, math.nan, math.nan, batch.total, seconds, None)
            else:
                step = report.step_of(guard.steps, seconds)
            if outputs:
                step = replace(step, outputs=of_last)
            self._inspection.log()
            guard.steps += 1
            if batch.compared and not runner.in_flight:  # else with what a later step gathers
                self._weights.check_copies(f"after step {step.number}")
        return step

    def _refuse(self, *, update: bool, outputs: bool) -> None:
        if outputs and not self._schedule.synchronous:
            raise ConfigError(
                f"{self._schedule.scheme} ends a mini-batch in later steps, so that a step has no outputs "
                "of its own; call evaluate(outputs=True) or predict, or take a synchronous scheme"
            )
        self._runner.refuse_no_update(update=update)
