"""Layers that keep state between forwards, where such a state differs from that of one process.

Copies of a stage on several workers have a state each, and a stage that computes parts of micro-batches, or
several at once, calls its layers at other times. So in the first step the layers run twice on one unit, with
the same random draws and buffers. What else they keep must not change their outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from counterflow.api.aux_loss import added_losses
from counterflow.common.mappings import register_mapping_classes
from counterflow.common.tensors.torch_private import buffers_of
from counterflow.common.trees import version_of
from counterflow.schedule.ir import Schedule
from counterflow.verification.diagnosis.comparison import difference
from counterflow.verification.diagnosis.tolerances import MODELS

from ..messages.values import Value
from ..stages.named_layer import NamedLayer, place_of
from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import Run, StageWrapper
from ..transport.rng_lock import RandomStates
from .rounds import packed, unpacked


def other_calls(schedule: Schedule, replicas: int) -> str:
    """Reason why layers are called otherwise than in one process; empty: once by micro-batch, as there.

    Args:
        schedule: schedule of the pipeline.
        replicas: number of replicas.
    """
    if replicas > 1:
        return f"each of {replicas} replicas has its own"
    workers: dict[int, set[int]] = {}
    for worker, order in enumerate(schedule.orders):
        for op in order:
            workers.setdefault(op.stage, set()).add(worker)
            if op.kind.is_forward and (op.parts > 1 or len(op.micro_batches) > 1):
                return "the schedule computes parts of micro-batches, or several at once"
    most = max(map(len, workers.values()))
    return f"each of {most} workers with a copy of the layer has its own" if most > 1 else ""


def refusal_of_state(layer: str, why: str) -> str:
    """Sentence that refuses a layer.

    Args:
        layer: the layer, for messages.
        why: reason why its calls are not those of one process.
    """
    return (
        f"{layer} gives other values when it runs again on the same input: it keeps state between forwards, "
        f"and {why}; pass the state on through inputs and outputs, or take one replica and a schedule in "
        "which each stage is on one worker"
    )


class Repeats(StageWrapper):
    """Runs each layer twice, and names the first one whose second output differs.

    Args:
        device: device of the worker.
        least: minimum of the relative difference that counts as rounding.
    """

    def __init__(self, device: torch.device, least: float) -> None:
        self._device, self._least = device, least
        self.layer = ""
        """The layer, for messages; empty: there is none."""

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if self.layer:
            return run(value, step, rows)
        copies = unpacked(packed(value), self._device)
        before, versions = RandomStates.now(), _versions(layer)
        buffers = [
            (buffers_of(module), name, tensor, tensor.detach().clone())
            for module in layer.module.modules()
            for name, tensor in buffers_of(module).items()
            if tensor is not None
        ]
        output = run(value, step, rows)
        if _versions(layer) != versions:
            return output  # a forward that changes weights is refused by the step
        after = RandomStates.now()
        before.restore()
        for table, name, tensor, contents in buffers:  # copies that change buffers are refused by the step
            table[name] = tensor
            with torch.no_grad():
                tensor.copy_(contents)
        try:
            with added_losses():
                second = run(copies, step, rows)
        finally:
            after.restore()
        register_mapping_classes(output)
        dtypes = [
            t.dtype for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()
        ]
        limit = max(map(MODELS.of, dtypes), default=0.0)
        if difference(output, second) > max(limit, self._least):
            self.layer = place_of(layer)
        return output


def _versions(layer: NamedLayer) -> list[int]:
    return [version_of(parameter) for parameter in layer.module.parameters()]
