"""Costs of a stage for one micro-batch, as they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .workspace import NO_WORKSPACE, Workspace


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one stage for one micro-batch.

    Attributes:
        forward_seconds: median seconds of a forward.
        backward_seconds: median seconds of a backward, without recomputation.
        activation_bytes: bytes that autograd saves for the backward, without recomputation.
        input_bytes: size of the stage's input, which is all that is saved with recomputation of the stage.
        layer_input_bytes: size of the inputs of all its layers, and of the loss's saved tensors: all that is
            saved with recomputation of layers.
        largest_layer_bytes: maximum bytes that a layer saves beyond its input, while layers are recomputed.
        layers: number of layers.
        weight_bytes: bytes of the parameters.
        cast_bytes: size of their casts to another precision, made once for all micro-batches in flight.
        kept_bytes: bytes that a split backward saves between input gradient and weight gradients.
        held_input_bytes: bytes of its input that the graph holds between them although no weight gradient
            needs it.
        input_gradient_seconds: median seconds of the first half of a split backward.
        weight_gradients_seconds: median seconds of the other half.
        beyond_input_bytes: bytes that autograd saves beyond the stage's input.
        output_bytes: bytes that the next stage takes, without skip connections.
        skips: values for later stages.
        workspace: memory of its ops while they run.
        attention_share: share of its seconds that is attention to earlier positions; 0 without slices, like
            the next two.
        fixed_share: share of them that a slice takes however short it is.
        state_bytes: size of what slices of a micro-batch leave to later ones, as far as it grows with them.
        slice_state_bytes: size of what each slice leaves however short it is.
    """

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    input_bytes: int
    layer_input_bytes: int
    largest_layer_bytes: int
    layers: int
    weight_bytes: int
    kept_bytes: int
    input_gradient_seconds: float
    weight_gradients_seconds: float
    beyond_input_bytes: int
    cast_bytes: int = 0
    held_input_bytes: int = 0
    output_bytes: int = 0
    skips: tuple[SkipCost, ...] = ()
    workspace: Workspace = NO_WORKSPACE
    attention_share: float = 0.0
    fixed_share: float = 0.0
    state_bytes: int = 0
    slice_state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SkipCost:
    """A value that a stage makes for later ones.

    Attributes:
        targets: the stages that use it.
        size_bytes: its size for one micro-batch.
        once: whether it is sent once per step.
    """

    targets: tuple[int, ...]
    size_bytes: int
    once: bool


def median_of(costs: Sequence[StageCost]) -> StageCost:
    """The costs of a stage over its copies: bytes are equal, times differ."""
    times = (
        "forward_seconds",
        "backward_seconds",
        "input_gradient_seconds",
        "weight_gradients_seconds",
        "attention_share",
        "fixed_share",
    )
    return replace(
        costs[0], **{name: statistics.median(getattr(cost, name) for cost in costs) for name in times}
    )
