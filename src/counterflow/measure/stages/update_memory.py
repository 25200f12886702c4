"""Memory of updates and of gradient norms, in allocated bytes (``allocations.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.common.tensors.optimizer_state import state_tensors
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.stage import LocalStage

from .allocations import allocated


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Memory of the optimiser and of the gradient norm.

    Attributes:
        layers: bytes that the optimiser needs while it updates a layer alone, in addition to its state.
        together: whether it updates all layers at once, so their memory adds up.
        states: bytes of state per byte of trained weights.
        norm_bytes_per_byte: memory of the norm per byte of gradients, up to ``norm_peak_bytes``.
        norm_peak_bytes: maximum memory of the norm.
    """

    layers: tuple[int, ...]
    together: bool
    states: float
    norm_bytes_per_byte: float
    norm_peak_bytes: int


def measure_update(whole: Pipeline, layers: Pipeline) -> UpdateMemory:
    """Run updates and norms of zero gradients.

    Args:
        whole: the model as one stage.
        layers: the model with each layer as a stage of this worker.
    """
    (together,) = _updates(whole)
    found = _updates(layers)
    norms = {stage: _norm(layers, stage) for stage in layers.stages}
    trained = {stage: _trained(copy) for stage, copy in layers.stages.items()}
    states = [
        value.nbytes
        for optimizer in whole.weights.optimizers.values()
        for value in state_tensors(optimizer)
        if value.dim()  # without counts of steps
    ]
    return UpdateMemory(
        layers=tuple(found),
        # If updated at once, the memory is the sum; one after another, the largest: which is nearer?
        together=together > (sum(found) + max(found)) / 2 and len(found) > 1,
        states=sum(states) / max(1, sum(trained.values())),
        norm_bytes_per_byte=max((norms[s] / size for s, size in trained.items() if size), default=0.0),
        norm_peak_bytes=_norm(whole, 0),
    )


def _trained(copy: LocalStage) -> int:
    return sum(p.nbytes for p in copy.parameters() if p.requires_grad)


def _updates(pipeline: Pipeline) -> list[int]:
    found = []
    pipeline.weights.attach()
    for stage in pipeline.stages:
        optimizer = pipeline.weights.optimizers.get(stage)
        with allocated(pipeline.device) as update:
            if optimizer is not None:
                optimizer.step()
        found.append(update.peak)
    pipeline.weights.detach()
    return found


def _norm(pipeline: Pipeline, stage: int) -> int:
    pipeline.weights.attach()
    with allocated(pipeline.device) as norm:
        pipeline.weights.clip(stage, None, None)
    pipeline.weights.clear()
    pipeline.weights.detach()
    return norm.peak
