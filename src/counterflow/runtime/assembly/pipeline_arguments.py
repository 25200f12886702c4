"""PipelineArguments of a pipeline: what they rule out alone, the transport they name, their model in stages.

Invariant: a worker that lacks the others' arguments stops before any weight is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from counterflow.common.tensors.source_descriptions import loss_details, model_details, versions
from counterflow.execution import Batching, Execution
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.schedule.ir import Schedule
from counterflow.schedule.recompute_ops import as_recomputed

from ..mesh.parallel import Parallelize
from ..mesh.rank_mesh import Mesh
from ..mini_batch.loss_output import LossFunction
from ..parameters.compressed_sums import refuse_uncompressed
from ..parameters.optimizers import MakeOptimizer, MakeScheduler
from ..parameters.sharded_updates import refuse_unsharded
from ..transport.base import Transport
from ..workers.arguments import check_same_arguments
from .defaults import captured_layers, transport_of
from .overlap import as_overlapped
from .partition import Model, PartitionedModel, partition_model


@dataclass(frozen=True, slots=True)
class PipelineArguments:
    """PipelineArguments of one worker's pipeline, as ``Pipeline`` documents them.

    Attributes:
        schedule: the schedule, by now no text.
        execution: options of the run, with those that were passed by name.
        batching: options of the mini-batches, with those that were passed by name.
    """

    model: Model
    loss_function: LossFunction | None
    schedule: Schedule
    execution: Execution
    batching: Batching
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None
    example: Any
    cuts: Sequence[int] | str | None
    costs: Sequence[float] | None
    mesh: Mesh | None
    parallelize: Parallelize | None
    transport: Transport | str | None
    device: torch.device | str | None

    def checked(self) -> PipelineArguments:
        """PipelineArguments that a worker can run, with the layers of ``example`` in its place.

        Raises:
            ConfigError: layers cannot be captured, or are listed as well; or the schedule cannot run, alone
                or with these options.
        """
        arguments = self._captured()
        parallelized = self.parallelize is not None
        refuse_what_cannot_run(self.schedule)
        refuse_unsharded(self.execution, self.schedule, parallelized=parallelized)
        refuse_uncompressed(self.execution, self.schedule, parallelized=parallelized)
        return arguments

    def _captured(self) -> PipelineArguments:
        if self.example is None:
            return self
        list_layers, costs = captured_layers(
            self.model,
            self.example,
            self.list_layers,
            self.costs,
            self.batching,
            stages=self.schedule.stages,
        )
        return replace(self, list_layers=list_layers, costs=costs, example=None)

    def open_transport(self) -> Transport:
        """Transport to the other workers, by default that of the launch."""
        return transport_of(self.transport, self.device, self.execution.timeout_seconds, self.schedule)

    def partition(self, transport: Transport) -> PartitionedModel:
        """The model in stages, with the schedule as it recomputes and overlaps; all workers call it.

        Raises:
            ConfigError: the model cannot be cut so, or another worker passed other arguments.
        """
        model = partition_model(
            self.model,
            self.loss_function,
            self.schedule,
            self.list_layers,
            cuts=self.cuts,
            costs=self.costs,
        )
        check_same_arguments(
            transport,
            model.schedule,
            {"model": model_details(self.model), "loss function": loss_details(self.loss_function)},
            **versions(),
            layers=model.layer_count,
            cuts=model.cuts,
            parallelize=self.parallelize is not None,
            **self.execution.agreed(),
            **self.batching.agreed(),
        )
        schedule = as_recomputed(model.schedule, self.execution.recompute)
        schedule = as_overlapped(schedule, self.execution, shares_process=transport.shares_process)
        return replace(model, schedule=schedule)
