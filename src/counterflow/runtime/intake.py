"""The begin of every call that runs a mini-batch: checks that it may run, changes of the model, its batch."""

from __future__ import annotations

from collections.abc import Callable

from .assembly.partition import PartitionedModel
from .assembly.recordings import Recordings
from .call_guard import CallGuard
from .cut_probe import CutProbe
from .drain import Drain
from .execution.runner import Runner
from .mini_batch.batch import Batch
from .mini_batch.batches import Batches
from .mini_batch.refusal import refusing
from .mini_batch.step_report import CallKind
from .mini_batch.user_batch import UserBatch
from .stages.listing import Listing


class Intake:
    """Mini-batches of one worker, from the user's arguments to the batch that a runner runs.

    Args:
        guard: guard of the pipeline's calls.
        model: the model in stages.
        listing: the user's listing of layers, which must not change.
        recordings: recordings of captured layers, which follow changes of the model.
        batches: the worker's mini-batches.
        runner: runner of the training steps.
        drain: what is in flight, which ends before the model is recorded again.
        cut_probe: check of how inputs are cut.
    """

    def __init__(
        self,
        guard: CallGuard,
        model: PartitionedModel,
        listing: Listing,
        recordings: Recordings,
        *,
        batches: Batches,
        runner: Runner,
        drain: Drain,
        cut_probe: CutProbe,
    ) -> None:
        self._guard, self._model, self._listing, self._recordings = guard, model, listing, recordings
        self._batches, self._runner, self._drain, self._cut_probe = batches, runner, drain, cut_probe

    def batch(self, user_batch: Callable[[], UserBatch], call: CallKind, *, outputs: bool = False) -> Batch:
        """The batch of a call, agreed upon and cut; all workers call it.

        Args:
            user_batch: reads the user's arguments.
            call: kind of the call.
            outputs: True to keep the outputs of the last layer.

        Raises:
            ConfigError: the call may not run now, or the mini-batch cannot be cut.
        """
        guard = self._guard
        with refusing():
            guard.require_exclusive()
            self._listing.refuse_changes()
            if call.trains:
                guard.require_original_weights("step")
                self._listing.refuse_other_weights()
                self._runner.weights.refuse_foreign_gradients()
            guard.require_sole_trainer(self._model)
        self._recordings.follow(guard.steps, self._drain.end_steps, training=call.trains)

        def read() -> UserBatch:
            worker_batch = self._recordings.refuse_lengths(user_batch(), training=call.trains)
            if call.trains:
                worker_batch.refuse_graphs()
            return worker_batch

        batch = self._batches.make(read, call, guard.steps, self._runner, outputs=outputs)
        self._cut_probe.check(batch)
        return batch
