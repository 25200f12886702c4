"""Bytes that stages save for backwards, from a forward of all layers without memory.

Invariant: never more than a step saves: a storage counts once, weights and the mini-batch do not, and of
layers that are computed again only their inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.dtypes import dtype_of
from counterflow.common.tensors.fake_layers import fake_layers, saved_storages, shapes_alone, storages_of
from counterflow.common.trees import tensors_in
from counterflow.execution import Execution
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute

from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import called

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class SavedInStage:
    """Bytes of a micro-batch of a stage.

    Attributes:
        tensors: saved tensors.
        inputs: inputs of its layers, without the mini-batch.
        first_input: input of its first layer.
        largest_layer: saved tensors of the layer that saves most.
    """

    tensors: int = 0
    inputs: int = 0
    first_input: int = 0
    largest_layer: int = 0

    def in_flight(self, recompute: Recompute) -> int:
        """Bytes from the end of a forward to its backward."""
        if recompute is Recompute.NONE:
            return self.tensors
        return self.first_input if recompute is Recompute.STAGE else self.inputs

    def restored(self, recompute: Recompute) -> int:
        """Bytes of tensors that a backward computes again."""
        if recompute is Recompute.NONE:
            return 0
        return self.tensors if recompute is Recompute.STAGE else self.largest_layer


def saved_in_stages(
    stages: Sequence[Sequence[nn.Module]], inputs: Any, execution: Execution
) -> list[SavedInStage] | None:
    """Bytes of a micro-batch by stage; None: a layer needs the values of tensors.

    Args:
        stages: layers of each stage, on any device.
        inputs: the micro-batch's, as the first layer takes them.
        execution: options of the run.
    """
    layers = [layer for stage in stages for layer in stage]
    dtype = dtype_of(execution.compute_dtype)
    try:
        with shapes_alone(), added_losses():
            copies, value, weights = fake_layers(layers, inputs, torch.device("cpu"), dtype)
            seen = storages_of((*weights, *tensors_in(value)))
            results, first = [], 0
            for stage in stages:
                result = SavedInStage()
                for number, layer in enumerate(copies[first : first + len(stage)], first):
                    size = _bytes(storages_of(tensors_in(value))) if number else 0
                    result.inputs += size
                    result.first_input = result.first_input if number > first else size
                    with saved_storages() as storages:
                        value = called(layer, value, 0, SampleRows(0, 1, 0, 1))
                    size = _bytes({key: storages[key] for key in storages.keys() - seen.keys()})
                    seen |= storages  # they live as long, so no later one has the same identity
                    result.tensors += size
                    result.largest_layer = max(result.largest_layer, size)
                results.append(result)
                first += len(stage)
    except Exception as error:
        _LOG.debug("saved tensors are not known before the first step: %s", error)
        return None
    return results


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def saved_by_worker(schedule: Schedule, stages: Sequence[SavedInStage], recompute: Recompute) -> list[int]:
    """Maximum of the bytes that each worker saves at once.

    Args:
        schedule: the schedule.
        stages: bytes of a micro-batch by stage.
        recompute: what a backward computes again.
    """
    sizes = [stage.in_flight(recompute) for stage in stages]
    peaks = []
    for order in schedule.orders:
        live = most = 0.0
        for op in order:
            amount = sizes[op.stage] * schedule.workload.work(op)
            if op.kind.is_forward:
                live += amount
                restored = stages[op.stage].restored(recompute) * schedule.workload.work(op)
                most = max(most, live + restored)
            elif op.kind.takes is not None:
                live -= amount
        peaks.append(int(most))
    return peaks
