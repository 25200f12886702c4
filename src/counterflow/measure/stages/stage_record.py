"""Costs of a stage for one micro-batch, as they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from counterflow.planning.inputs.model import LayerSkip
from counterflow.planning.inputs.profile import LayerProfile


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one stage for one micro-batch.

    Attributes:
        profile: its costs as those of one layer, of a micro-batch as the only sample. Without slices there
            are no shares of attention and of fixed seconds.
        input_bytes: size of the stage's input, which is all that is saved with recomputation of the stage.
        layer_input_bytes: size of the inputs of all its layers, and of the loss's saved tensors: all that is
            saved with recomputation of layers.
        largest_layer_bytes: maximum bytes that a layer saves beyond its input, while layers are recomputed.
        layers: number of layers.
        skips: values for later stages, by numbers of stages; bytes of a micro-batch.
    """

    profile: LayerProfile
    input_bytes: int
    layer_input_bytes: int
    largest_layer_bytes: int
    layers: int
    skips: tuple[LayerSkip, ...] = ()

    @property
    def forward_seconds(self) -> float:
        """Median seconds of a forward."""
        return self.profile.forward_seconds[0]

    @property
    def backward_seconds(self) -> float:
        """Median seconds of a backward, without recomputation."""
        return self.profile.backward_seconds[0]

    @property
    def input_gradient_seconds(self) -> float:
        """Median seconds of the first half of a split backward."""
        return self.profile.input_gradient_seconds[0]

    @property
    def weight_gradients_seconds(self) -> float:
        """Median seconds of the other half."""
        return self.profile.weight_gradients_seconds[0]

    @property
    def activation_bytes(self) -> float:
        """Bytes that autograd saves for the backward, without recomputation."""
        return self.profile.saved_bytes[0]

    @property
    def kept_bytes(self) -> float:
        """Bytes that a split backward saves between input gradient and weight gradients."""
        return self.profile.kept_bytes[0]

    @property
    def beyond_input_bytes(self) -> float:
        """Bytes that autograd saves beyond the stage's input."""
        return self.activation_bytes - self.profile.kept_input_bytes[0]


def median_of(costs: Sequence[StageCost]) -> StageCost:
    """The costs of a stage over its copies: bytes are equal, times differ."""
    first = costs[0].profile
    seconds = "forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradients_seconds"
    medians: dict[str, Any] = {
        name: (statistics.median(getattr(cost.profile, name)[0] for cost in costs),) for name in seconds
    }
    medians |= {
        name: statistics.median(getattr(cost.profile, name) for cost in costs)
        for name in ("attention_share", "fixed_share")
    }
    return replace(costs[0], profile=replace(first, **medians))
