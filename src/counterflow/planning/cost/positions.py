"""Model, costs and devices as one position of a worker sees them.

Between stages and replicas every position sends and sums by itself: its whole output, and the gradients of
its own weights. If the devices of a node share its way out, positions share it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterflow.common.parallel_degrees import Degrees, text_of
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.recompute_ops import recomputed_ahead

from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .context_parallel import context_model, of_context
from .degrees import PositionGroups, places
from .expert_parallel import of_experts
from .sharded_layer import sharded
from .tensor_parallel import of_position


def positioned(model: Model, profile: Profile, cluster: Cluster, degrees: Degrees) -> Profile:
    """The profile of one position; the seconds of its layers include its communication with the others.

    Args:
        model: the model whose layers are divided.
        profile: profile of whole layers.
        cluster: the devices, not ``places``: positions use the links inside a node.
        degrees: degrees of the worker.

    Raises:
        ConfigError: a layer cannot be divided so, optimiser state is sharded, or layers that share a weight
            would be divided.
    """
    if degrees.positions == 1:
        return profile
    if model.shards_state:
        raise ConfigError(
            f"{text_of(degrees)}: cannot be combined with pipeline.zero_stage = 1 of the profiled config; "
            "use only one of them"
        )
    if degrees.shards > 1 and model.gradient_share < 1:
        raise ConfigError(
            f"{text_of(degrees)}: cannot be combined with pipeline.gradient_compression of the profiled "
            "config; use only one of them"
        )
    if profile.positions % (2 * degrees.cp) and degrees.cp > 1:
        raise ConfigError(
            f"contexts={degrees.cp}: each position has a head and a tail of a sequence, whose "
            f"length is {profile.positions}; give a divisor of {profile.positions / 2:g}"
        )
    if degrees.shards > 1 and model.ties:
        raise ConfigError(f"{text_of(degrees)}: layers share a weight with others, which no plan shards")
    groups, layers = PositionGroups(cluster, degrees), dict(profile.layers)
    tied = {model.layers[i] for tie in model.ties for i in tie.layers}
    kinds = dict.fromkeys(model.layers)
    if degrees.ep > 1 and not any(profile.layer(kind).experts for kind in kinds):
        raise ConfigError(
            f"{text_of(degrees)}: profile {profile.name} has no experts; give a kind of layers an experts "
            "table"
        )
    for kind in kinds:
        layer = _divided(kind, profile.layer(kind), groups, is_tied=kind in tied)
        layer = of_context(layer, degrees.cp, groups.context_gather())
        if layer.experts is not None and degrees.ep > 1:
            if layer.experts.count % degrees.ep:
                raise ConfigError(
                    f"expert_parallel={degrees.ep}: must divide the {layer.experts.count} "
                    f"experts of layers of kind {kind!r}"
                )
            shares, gather = degrees.borrowed.tp, groups.token_gather()
            layer = of_experts(layer, layer.experts, groups.exchange(), shares=shares, gather=gather)
        layers[kind] = sharded(layer, groups)
    return replace(profile, layers=layers)


def _divided(kind: str, layer: LayerProfile, groups: PositionGroups, *, is_tied: bool) -> LayerProfile:
    positions, division = groups.degrees.tp, layer.tensor_parallel
    if positions == 1 or division is None:
        return layer
    if division.parts % positions:
        raise ConfigError(
            f"tensor_parallel={positions}: layers of kind {kind!r} are divided by their "
            f"{division.parts} parts, which it has to divide"
        )
    if division.weights and is_tied:
        raise ConfigError(
            f"tensor_parallel={positions}: layers of kind {kind!r} share a weight with others, which no "
            "plan divides; leave weights out of its tensor_parallel table"
        )
    if layer.experts is not None:
        rest = 1 - layer.experts.weights_bytes / layer.weights_bytes if layer.weights_bytes else 0.0
        if division.weights > rest * (1 + 1e-9):
            raise ConfigError(
                f"tensor_parallel={positions}: of layers of kind {kind!r} it divides {division.weights:g} of "
                f"the weights, but all but {rest:g} are of experts, which it leaves whole"
            )
    return of_position(layer, division, positions, groups.tensor_sum)


@dataclass(frozen=True)
class Inputs:
    """Model, costs and devices that a prediction reads, as one position of a worker sees them.

    Attributes:
        model: what is trained; inputs are those of a position.
        profile: costs of the layers of one position.
        cluster: the places of workers, see ``places``.
        whole_model: what is trained, with inputs of whole sequences.
        undivided: profile of undivided layers.
        devices: the cluster of all positions.
        degrees: degrees of the positions.
    """

    model: Model
    profile: Profile
    cluster: Cluster
    whole_model: Model
    undivided: Profile
    devices: Cluster
    degrees: Degrees

    @classmethod
    def at(cls, model: Model, profile: Profile, cluster: Cluster, degrees: Degrees) -> Inputs:
        """Divide a profile and a cluster among positions.

        Raises:
            ConfigError: the profile lacks a kind of layer, or the degrees do not divide the layers or the
                devices.
        """
        for kind in dict.fromkeys(model.layers):
            profile.layer(kind)
        position = places(cluster, degrees)
        divided = positioned(model, profile, cluster, degrees)
        of_position = context_model(model, degrees.cp)
        return cls(of_position, divided, position, model, profile, cluster, degrees)

    def recomputed(self, schedule: Schedule, recompute: Recompute) -> Schedule:
        """Add the recomputations that the system runs ahead of gradients to a schedule."""
        return recomputed_ahead(schedule, Recompute(recompute), ahead=self.cluster.recompute_ahead)
