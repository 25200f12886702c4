"""A layer whose weights are sharded over positions of the mesh, as ``fully_shard`` does.

Every op gathers the weights of a layer before it runs it. Gradients are whole, those of the experts of other
positions aside, until the last op of a step that makes them; then positions sum them, and each has its shard.
Copies of a stage sum shards.

Experts that are divided over E positions are sharded over those that have the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from typing_extensions import override

from counterflow.schedule.op import OpKind

from ..inputs.profile import LayerProfile
from .degrees import PositionGroups


@dataclass(frozen=True, slots=True)
class WholeWeights:
    """Sizes and times that belong to the whole weights of a sharded layer.

    Attributes:
        gradient_bytes: gradients of an op's weights.
        summed_bytes: shard of the summed gradients.
        gathered_bytes: weights that an op gathers.
        sum_seconds: time of the sum over positions.
    """

    gradient_bytes: float
    summed_bytes: float
    gathered_bytes: float
    sum_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayer(LayerProfile):
    """A position's shards of a layer; ``weights_bytes`` and what follows from it are of the shards.

    Attributes:
        of_whole: sizes and times of whole weights.
    """

    of_whole: WholeWeights

    @property
    @override
    def gradient_bytes(self) -> float:
        return self.of_whole.gradient_bytes

    @property
    @override
    def summed_bytes(self) -> float:
        return self.of_whole.summed_bytes

    @property
    @override
    def gathered_bytes(self) -> float:
        return self.of_whole.gathered_bytes

    @property
    @override
    def position_sum_seconds(self) -> float:
        return self.of_whole.sum_seconds


def sharded(layer: LayerProfile, groups: PositionGroups) -> LayerProfile:
    """The shards and experts of a layer at a position, and the time of its gathers and sums.

    Args:
        layer: the layer of a position, with all weights.
        groups: positions that shard them.
    """
    degrees = groups.degrees
    count = degrees.shards
    if count == degrees.ep == 1 or not layer.weights_bytes:
        return layer
    routed = 0.0 if layer.experts is None else layer.experts.weights_bytes / layer.weights_bytes
    gathered_share = 1 - routed + routed / degrees.ep
    share = (1 - routed) / count + routed / (degrees.ep * degrees.expert_shards)
    local = replace(
        layer,
        weights_bytes=layer.weights_bytes * share,
        frozen_bytes=layer.frozen_bytes * share,
        low_precision_bytes=layer.low_precision_bytes * share,
        cast_bytes=gathered_share * layer.cast_bytes,
        update_peak_bytes=layer.update_peak_bytes * share,
        parameter_bytes=(),
        experts=None,  # its bytes are of all experts
    )
    if count == 1:
        return local
    of_all, of_experts = groups.weight_gather(), groups.expert_gather()

    def collective_seconds(size: float) -> float:
        """Seconds of a gather, or of a sum, of weights that take this many bytes with all experts."""
        seconds = of_all.seconds((1 - routed) * size) if routed < 1 else 0.0
        if routed and degrees.expert_shards > 1:
            seconds += of_experts.seconds(routed * size / degrees.ep)
        return seconds

    gather, size = collective_seconds(layer.weights_bytes), layer.gradient_bytes
    gathered = (1 - routed) * layer.weights_bytes
    if degrees.expert_shards > 1:
        gathered += routed * layer.weights_bytes / degrees.ep
    lines = layer.lines()
    seconds = {kind: tuple(amount + gather for amount in lines[kind].amounts) for kind in lines}
    whole = WholeWeights(
        gradient_bytes=gathered_share * size,
        summed_bytes=size * share,
        gathered_bytes=gathered,
        sum_seconds=collective_seconds(size) if size else 0.0,
    )
    shards = replace(
        local,
        forward_seconds=seconds[OpKind.FORWARD],
        backward_seconds=seconds[OpKind.BACKWARD],
        input_gradient_seconds=seconds[OpKind.INPUT_GRADIENT],
        weight_gradients_seconds=seconds[OpKind.WEIGHT_GRADIENTS],
    )
    return ShardedLayer(**{key.name: getattr(shards, key.name) for key in fields(shards)}, of_whole=whole)
