"""Forwards without training: evaluations, predictions, and tokens that a language model adds to prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule

from .call_guard import CallGuard
from .drain import Drain
from .execution.evaluation import EvaluationRunner, Outcome, PendingEvaluation
from .execution.step import Evaluation, Workers
from .generation import GenerationCheck, Sampling, generated
from .intake import Intake
from .messages.values import Unit
from .mini_batch.batch import Batch
from .mini_batch.batches import Batches
from .mini_batch.samples import joined, moved
from .mini_batch.step_report import CallKind
from .mini_batch.user_batch import UserBatch
from .stages.ownership import ThreadLocalModules
from .stages.stage import LocalStage
from .witness.witness import Witness


class Inference:
    """Forwards of one worker, in evaluation mode and without gradients.

    Args:
        guard: guard of the pipeline's calls.
        drain: what is in flight, which ends first.
        intake: makes batches.
        evaluation: runner of the forwards.
        schedule: schedule of the pipeline.
        batches: the worker's mini-batches.
        stages: the worker's stages.
        last_holders: workers of a group that hold the last stage.
        workers: ranks of the pipeline, and this worker among them.
        owned: the modules that the worker trains.
        witness: comparison with the user's own forward.
        output_dims: dimensions of the samples in the outputs.
    """

    def __init__(
        self,
        guard: CallGuard,
        drain: Drain,
        intake: Intake,
        evaluation: EvaluationRunner,
        *,
        schedule: Schedule,
        batches: Batches,
        stages: Mapping[int, LocalStage],
        last_holders: int,
        workers: Workers,
        owned: ThreadLocalModules,
        witness: Witness,
        output_dims: Any,
    ) -> None:
        self._guard, self._drain, self._intake, self._evaluation = guard, drain, intake, evaluation
        self._schedule, self._batches, self._stages, self._workers = schedule, batches, stages, workers
        self._last_holders, self._owned, self._witness = last_holders, owned, witness
        self._output_dims = output_dims
        self._generation_check = GenerationCheck()

    def evaluate(self, user_batch: Callable[[], UserBatch], *, outputs: bool) -> Evaluation:
        """Loss, metrics and, with ``outputs``, outputs of a mini-batch."""
        self._drain.settle()
        pending, batch = self._start(user_batch, outputs=outputs)
        with self._guard.reported():
            self._evaluation.drain()
            of_last = self.outputs(batch) if outputs else None
        return replace(pending.result(), outputs=of_last)

    def start_evaluation(self, user_batch: Callable[[], UserBatch]) -> PendingEvaluation:
        """An evaluation whose result is read later."""
        learns = not self._evaluation.named
        if learns or not self._schedule.synchronous:
            self._drain.settle()
        pending, _ = self._start(user_batch)
        if learns:
            with self._guard.reported():
                self._evaluation.drain()
        return pending

    def _start(
        self, user_batch: Callable[[], UserBatch], *, outputs: bool = False
    ) -> tuple[PendingEvaluation, Batch]:
        with self._guard.reported(), self._owned.used():
            batch = self._intake.batch(user_batch, CallKind.EVALUATE, outputs=outputs)
            feeds = batch.feeds
            witnessed = self._witness.due(training=False)
            if witnessed:
                self._witness.begin(batch, in_flight=False)
            pending = self._evaluation.start(batch, self._read)
            if witnessed:
                self._witness.end(in_flight=False)
            for feed in feeds:
                feed.wait()
            self._batches.remember(batch)
        return pending, batch

    def _read(self, last: Outcome) -> None:
        with self._guard.reported():
            self._evaluation.read(last)

    def predict(self, inputs: Any, kwargs: Mapping[str, Any] | None) -> Any:
        """Outputs of the last layer for the replica's samples, on every worker."""
        self._drain.settle()
        with self._guard.reported(), self._owned.used(), torch.no_grad():
            witnessed = self._witness.due(training=False)
            batch = self._predicted(inputs, kwargs, witnessed=witnessed)
            return self.outputs(batch, everywhere=True)

    def _predicted(
        self,
        inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        call: CallKind = CallKind.PREDICT,
        *,
        witnessed: bool = False,
    ) -> Batch:
        batch = self._intake.batch(
            partial(self._batches.user_batch, inputs, None, kwargs), call, outputs=True
        )
        batch.has_loss = False
        if witnessed:
            self._witness.begin(batch, in_flight=False)
        self._evaluation.run(batch)
        if witnessed:
            self._witness.end(in_flight=False)
        self._evaluation.drain()
        self._batches.remember(batch)
        return batch

    def generate(self, prompt: Tensor | None, sampling: Sampling) -> Tensor:
        """Prompts and the tokens that follow them, on every worker.

        Raises:
            ConfigError: positions share sequences, so that none has the keys of all earlier tokens.
        """
        if any(stage.context_guard is not None for stage in self._stages.values()):
            raise ConfigError(
                "generate adds token after token to a whole sequence, and cf.ContextParallel shares "
                "sequences; load the weights in a pipeline without it"
            )
        self._drain.settle()
        with self._guard.reported(), self._owned.used(), torch.no_grad():
            return generated(
                prompt,
                sampling,
                lambda tokens, call: self._predicted(tokens, call=call),
                self._generation_check,
                stages=self._stages,
                workers=self._workers,
            )

    def outputs(self, batch: Batch, *, everywhere: bool = False) -> Any:
        """The replica's outputs in the samples' order, on workers with the last stage or on all."""
        last, workers = self._schedule.stages - 1, self._workers
        by_unit = cast("dict[Unit, Any]", batch.outputs)
        if everywhere or self._last_holders > 1:
            on_host = moved(by_unit, torch.device("cpu"))
            rows = cast("list[dict[Unit, Any]]", workers.transport.gather_objects(on_host))
            by_unit = {}
            for rank in workers.ranks[workers.replica]:
                by_unit |= rows[rank]
        if not everywhere and last not in self._stages:
            return None
        units, sizes = sorted(by_unit), batch.samples
        counts = [rows.stop - rows.start for rows in (unit.rows(sizes[unit.micro_batch]) for unit in units)]
        outputs = joined([by_unit[unit] for unit in units], self._output_dims, "outputs", counts)
        return moved(outputs, workers.transport.device)
