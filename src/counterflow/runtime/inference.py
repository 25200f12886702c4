"""What a pipeline computes without training: evaluations, predictions, and samples of a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.execution import Batching
from counterflow.schedule.ir import Schedule

from .assembly.recordings import Recordings
from .cut_probe import CutProbe
from .execution.evaluation import Outcome, PendingEvaluation
from .execution.step import Evaluation
from .generation import GenerationCheck, Sampling, generated
from .messages.values import Unit
from .mini_batch.batch import Batch
from .mini_batch.given import Given
from .mini_batch.refusal import refusing
from .mini_batch.samples import joined, moved
from .mini_batch.told import Call, Told
from .stages.listing import Listing
from .state_dicts import States
from .witness.witness import Witness


class Forwards(States):
    """The part of ``Pipeline`` that runs forwards alone."""

    schedule: Schedule
    batching: Batching
    device: torch.device
    replica: int
    _generation_check: GenerationCheck
    _listing: Listing
    _cut_probe: CutProbe
    _witness: Witness
    _recordings: Recordings

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
        outputs: bool = False,
    ) -> Evaluation:
        """Compute a mini-batch's loss, metrics and, if asked for, outputs; no gradients, evaluation mode.

        The pipeline is flushed first. Arguments and errors are those of ``step``.
        """
        self._untold = self.flush()
        given = partial(self._batches.given, inputs, targets, kwargs, micro_batches, samples)
        pending, batch = self._start_evaluation(given, outputs=outputs)
        with self._reported():
            self._evaluation.drain()
            of_last = self._outputs(batch) if outputs else None
        return replace(pending.result(), outputs=of_last)

    def start_evaluation(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
    ) -> PendingEvaluation:
        """``evaluate``, of which the result is asked for later: further evaluations and steps follow.

        A worker runs its forwards after its last step, with the weights after that, and may go on before the
        others have. Only asynchronous schemes are flushed first. The first evaluation waits for its result,
        as workers learn the names of its metrics. All workers call it; arguments and errors are those of
        ``step``.
        """
        learns = not self._evaluation.named
        if learns or not self.schedule.synchronous:
            self._untold = self.flush()
        given = partial(self._batches.given, inputs, targets, kwargs, micro_batches, samples)
        pending, _ = self._start_evaluation(given)
        if learns:
            with self._reported():
                self._evaluation.drain()
        return pending

    def _start_evaluation(
        self, given: Callable[[], Given], *, outputs: bool = False
    ) -> tuple[PendingEvaluation, Batch]:
        with self._reported(), self._held.owned.used():
            batch = self._batch(given, Call.EVALUATE, outputs=outputs)
            feeds = batch.feeds
            witnessed = self._witness.due(training=False)
            if witnessed:
                self._witness.begin(batch, in_flight=False)
            pending = self._evaluation.start(batch, self._read_evaluation)
            if witnessed:
                self._witness.end(in_flight=False)
            for feed in feeds:
                feed.wait()
            self._batches.remember(batch)
        return pending, batch

    def _read_evaluation(self, last: Outcome) -> None:
        with self._reported():
            self._evaluation.read(last)

    def predict(self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None) -> Any:
        """What the last layer gives for the replica's samples, in their order, on every worker.

        No gradients, evaluation mode. Tensors and numbers are put together as ``output_dims`` says. Flushes
        first what is in flight.

        Args:
            inputs: as in ``step``.
            kwargs: as in ``step``.

        Raises:
            ConfigError: the inputs are missing or cannot be cut, or the outputs cannot be put together.
            WorkerError: a worker failed.
        """
        self._untold = self.flush()
        with self._reported(), self._held.owned.used(), torch.no_grad():
            witnessed = self._witness.due(training=False)
            batch = self._predicted(inputs, kwargs, witnessed=witnessed)
            return self._outputs(batch, everywhere=True)

    def _predicted(
        self, inputs: Any, kwargs: Mapping[str, Any] | None = None, *, witnessed: bool = False
    ) -> Batch:
        given = partial(self._batches.given, inputs, None, kwargs)
        batch = self._batch(given, Call.PREDICT, outputs=True)
        batch.has_loss = False
        if witnessed:
            self._witness.begin(batch, in_flight=False)
        self._evaluation.run(batch)
        if witnessed:
            self._witness.end(in_flight=False)
        self._evaluation.drain()
        self._batches.remember(batch)
        return batch

    def generate(
        self,
        prompt: Tensor | None = None,
        *,
        tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Add tokens to prompts, each chosen of the logits after all before it; for a look at samples.

        The prompt runs once, and then each token alone: layers that look at earlier positions hold a
        ``cf.Carry``, as the built-in GPT's and those of ``hf.layers`` do, and keep their keys and values. No
        gradients, evaluation mode. Flushes first what is in flight; all workers call it.

        Args:
            prompt: [samples, positions], int64, as the model's input; read on workers with the first stage.
            tokens: how many are added.
            temperature: divisor of the logits; 0 chooses the most likely token, the default.
            top_k: how many of the most likely tokens are drawn from; None: all.
            seed: of the draws, which do not depend on the schedule.
            end: token after which a sample has ended, and is filled with it; None: there is none.

        Returns:
            The prompt and what was added, [samples, positions + tokens], on the CPU of every worker.

        Raises:
            ConfigError: a number is out of range; the output has no logits; or a layer looks at earlier
                positions without a ``cf.Carry`` that has all it needs, which is seen when the first, second,
                fourth, eighth … and last token after a prompt first runs alone.
            WorkerError: a worker failed.
        """
        sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, end=end)
        self._untold = self.flush()
        with self._reported(), self._held.owned.used(), torch.no_grad():
            return generated(self, prompt, sampling, self._predicted, self._generation_check)

    def _outputs(self, batch: Batch, *, everywhere: bool = False) -> Any:
        """The replica's outputs in the samples' order, on workers with the last stage or on all."""
        last = self.schedule.stages - 1
        by_unit = cast("dict[Unit, Any]", batch.outputs)
        if everywhere or len(self._model.holders[last]) > 1:
            mine = moved(by_unit, torch.device("cpu"))
            rows = cast("list[dict[Unit, Any]]", self.transport.gather_objects(mine))
            ours = [rows[rank] for rank in self.ranks[self.replica]]
            by_unit = {unit: output for outputs in ours for unit, output in outputs.items()}
        if not everywhere and last not in self.stages:
            return None
        units, sizes = sorted(by_unit), batch.samples
        counts = [rows.stop - rows.start for rows in (unit.rows(sizes[unit.micro_batch]) for unit in units)]
        found = joined([by_unit[unit] for unit in units], self.batching.output_dims, "outputs", counts)
        return moved(found, self.device)

    def _end_in_flight(self) -> None:
        """End what is in flight, within a call of all workers that goes on afterwards."""
        if self._run.in_flight:
            told = Told(Call.FLUSH, self.steps, follows=True)
            found = self._run.flush(told, partial(self._batches.compare, told))
            self._untold += [each.step_of(each.step, 0.0) for each in found]

    def _batch(self, given: Callable[[], Given], call: Call, *, outputs: bool = False) -> Batch:
        with refusing():
            self._calls.require_exclusive()
            self._listing.refuse_changes()
            if call.trains:
                self._calls.require_original_weights("step")
            self._calls.require_sole_trainer(self._model)
        self._recordings.follow(self.steps, self._end_in_flight, training=call.trains)
        batch = self._batches.made(given, call, self.steps, self._run, outputs=outputs)
        self._cut_probe.check(batch)
        return batch
