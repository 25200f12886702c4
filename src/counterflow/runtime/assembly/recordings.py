"""Layers that were found by a recording, kept to the model as the user has it now.

Invariant: before a step or an evaluation runs anything, all workers have seen the same changes of the model,
and layers run a record of the model as it is; mini-batches in flight have ended before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from torch import nn

from counterflow.capture.guards import Environment
from counterflow.capture.layer import CapturedLayer
from counterflow.capture.recording import Recording, RecordSlot, recordings_of
from counterflow.errors import ConfigError

from ..messages.values import Keyworded
from ..mini_batch.agreement import agreed_call
from ..mini_batch.refusal import refusing
from ..mini_batch.step_report import CallKind, CallReport
from ..mini_batch.user_batch import UserBatch
from ..stages.precision import Precision
from ..transport.base import Transport
from .local_stages import LocalStages
from .partition import PartitionedModel

_MANY = 16
"""Number of changes after which a warning says that each costs a recording."""


class Recordings:
    """The recordings of a pipeline's layers on one worker.

    Args:
        all_layers: the layers of all stages, as the user has them; what they run is known on every worker.
        local_layers: this worker's layers, which may be copies.
        precision: precision in which these run.
        transport: way to the other workers.
        shared: whether workers are threads that were given one model.
        sharded: whether weights are sharded, in whose place modules have others at times.
    """

    def __init__(
        self,
        all_layers: Iterable[nn.Module],
        local_layers: Sequence[nn.Module],
        precision: Precision,
        transport: Transport,
        *,
        shared: bool,
        sharded: bool,
    ) -> None:
        self._shared, self._sharded = shared, sharded
        layers = {id(layer): layer for layer in (*all_layers, *local_layers)}
        self._layers = [layer for layer in layers.values() if isinstance(layer, CapturedLayer)]
        self._recordings = recordings_of(self._layers)
        self._precision, self._transport = precision, transport
        self._adopted = {id(recording): list(recording.current) for recording in self._recordings}
        self._changes = 0
        for layer in self._layers:
            layer.follows = True
        for recording in self._recordings:
            recording.settle()

    @classmethod
    def of(cls, model: PartitionedModel, local: LocalStages, transport: Transport) -> Recordings:
        """The recordings of a model in stages, of which this worker has some."""
        all_layers = [layer.module for layers in model.layers for layer in layers]
        precision = next(stage.precision for stage in local.stages.values())
        sharded = any(stage.module is not None for stage in local.stages.values())
        return cls(
            all_layers, local.owned.modules, precision, transport, shared=local.owned.shared, sharded=sharded
        )

    def follow(self, step: int, flush: Callable[[], object], *, training: bool) -> None:
        """Record a model again that has changed since it was recorded; all workers call it.

        Args:
            step: number of earlier steps.
            flush: ends what is in flight.
            training: whether a step follows; else an evaluation.

        Raises:
            ConfigError: the model cannot be recorded as it is, or workers have set other values.
        """
        if not self._recordings:
            return
        slot = RecordSlot.TRAINING if training else RecordSlot.EVALUATION
        with self._precision.computing():
            environment = Environment.current(self._transport.device.type)
            for recording in self._recordings:
                names = recording.stale(slot, environment, ignores_weights=self._sharded)
                if names or recording.current[slot] is not self._adopted[id(recording)][slot]:
                    digest = 0 if self._shared else recording.digest(slot, environment, names)
                    self._agree(step, digest, names)
                    flush()
                    with refusing():
                        self._adopt(recording, slot, environment, names)

    def refuse_lengths(self, user_batch: UserBatch, *, training: bool) -> UserBatch:
        """Return a mini-batch, if the model does for its sequences what was recorded.

        Args:
            user_batch: the mini-batch of this worker.
            training: whether a step follows; else an evaluation.

        Raises:
            ConfigError: the model does something else for their length.
        """
        if self._recordings and not any(layer.on_slices for layer in self._layers):
            slot = RecordSlot.TRAINING if training else RecordSlot.EVALUATION
            with self._precision.computing():
                environment = Environment.current(self._transport.device.type)
                for piece in user_batch.inputs or ():
                    inputs, kwargs = piece if type(piece) is Keyworded else (piece, {})
                    for recording in self._recordings:
                        recording.refuse_length(slot, environment, inputs, kwargs)
        return user_batch

    def _agree(self, step: int, digest: int, names: Sequence[str]) -> None:
        rows = agreed_call(CallReport(CallKind.RECORD, step, kind=digest), self._transport)
        differing = next((rank for rank, row in enumerate(rows) if row.kind != digest), None)
        if differing is not None:  # on all workers
            by_rank = cast("list[Sequence[str]]", self._transport.gather_objects(list(names[:3])))
            first, second = (
                f"rank {rank} ({', '.join(by_rank[rank])})" for rank in (self._transport.rank, differing)
            )
            raise ConfigError(
                f"the model has changed to other values on {first} than on {second}: between two steps, or "
                "in a forward that runs on one of them; set what the traced forwards read to the same values "
                "on all workers, and in no forward"
            )

    def _adopt(
        self, recording: Recording, slot: RecordSlot, environment: Environment, names: Sequence[str]
    ) -> None:
        recording.refresh(slot, environment, names)
        variant = self._adopted[id(recording)][slot] = recording.current[slot]
        for layer in self._layers:
            if layer.recording is recording:
                layer.adopt(variant, slot)
        self._changes += 1
        if self._changes == _MANY:
            logging.getLogger(__name__).warning(
                "the model was recorded again %d times, last because of %s; what changes at every step costs "
                "less in a buffer that is changed in place",
                _MANY,
                ", ".join(names[:3]),
            )
