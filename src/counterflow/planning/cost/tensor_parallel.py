"""Tensor parallelism in a plan: each of T positions as a device of its own, on a cluster of such places.

T adjacent devices of a node share the work of each layer. Every position contains a whole pipeline, and all
of them do the same at the same time, so a plan with T is a plan on a cluster whose nodes have devices/T
places, with the layers of one position: its share of what is divided (``Division``) and all of the rest.
All-reduces over the positions happen within an op, and compute waits for them.

Between stages and replicas every position sends and sums by itself: the whole output, and its own weights'
gradients. If the devices of a node share its way out, positions share it too.

If nodes differ, the slowest links inside one count, and on a slow device all-reduces are as slow as ops.

Not modelled: which all-reduces a second forward omits, norms and digests over the positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind
from counterflow.schedule.recompute_ops import recomputed_ahead
from counterflow.simulation.layer_cost import Line

from ..inputs.cluster import Cluster, Collective, Link, all_reduce
from ..inputs.model import Model
from ..inputs.profile import Division, LayerProfile, Profile


def places(cluster: Cluster, positions: int) -> Cluster:
    """The cluster as one position sees it: a place for each worker, of ``positions`` devices.

    Its ``cores`` are still those of the node, for the workers of all positions.

    Raises:
        ConfigError: the number of positions does not fit a node.

    >>> server = Cluster("c", 2, 8, 1e9, Link(0, 1.0), Link(0, 2.0), shared_adapter=True)
    >>> here = places(server, 4)
    >>> here.size, here.between.seconds_per_byte
    (4, 8.0)
    """
    for devices in {node.devices: None for node, _ in cluster.kinds_of_nodes()}:
        if positions < 1 or devices % positions:
            raise ConfigError(
                f"tensor_parallel={positions}: must divide the {devices} "
                f"device{'s' if devices > 1 else ''} of a node of cluster {cluster.name}"
            )
    if positions == 1:
        return cluster
    crowd = positions if cluster.shared_adapter else 1
    sums = cluster.allreduce_between
    return replace(
        cluster,
        devices=cluster.devices // positions,
        between=_shared(cluster.between, crowd),
        allreduce_between=sums and _shared(sums, crowd),
        kinds=tuple(
            replace(
                kind,
                devices=kind.devices and kind.devices // positions,
                between=kind.between and _shared(kind.between, crowd),
            )
            for kind in cluster.kinds
        ),
    )


def _shared(link: Link, users: int) -> Link:
    return Link(link.latency_seconds, link.seconds_per_byte * users)


def positioned(model: Model, profile: Profile, cluster: Cluster, positions: int) -> Profile:
    """The profile of one position; the seconds of its layers include all-reduces over the other positions.

    Args:
        model: the model whose layers are divided.
        profile: profile of whole layers.
        cluster: the devices, not ``places``: positions use the links inside a node.
        positions: T, 1 or more.

    Raises:
        ConfigError: a layer cannot be divided by T, optimiser state is sharded, or layers that share a weight
            would be divided.
    """
    if positions == 1:
        return profile
    if model.shards_state:
        raise ConfigError(
            f"tensor_parallel={positions}: cannot be combined with pipeline.zero_stage = 1 of the profiled "
            "config; "
            "use only one of them"
        )
    tied = {model.layers[i]: tie for tie in model.ties for i in tie.layers}
    layers = dict(profile.layers)
    collective = all_reduce(cluster, [positions], [node for node, _ in cluster.kinds_of_nodes()])
    for kind in dict.fromkeys(model.layers):
        layer = profile.layer(kind)
        division = layer.tensor_parallel
        if division is None:
            continue
        if division.parts % positions:
            raise ConfigError(
                f"tensor_parallel={positions}: layers of kind {kind!r} are divided by their "
                f"{division.parts} parts, which it has to divide"
            )
        if division.weights and kind in tied:
            raise ConfigError(
                f"tensor_parallel={positions}: layers of kind {kind!r} share a weight with others, which no "
                "plan divides; leave weights out of its tensor_parallel table"
            )
        layers[kind] = of_position(layer, division, positions, collective)
    return replace(profile, layers=layers)


def of_position(
    layer: LayerProfile, division: Division, positions: int, collective: Collective
) -> LayerProfile:
    """The layer of one position.

    Args:
        layer: the whole layer.
        division: the parts of it that are divided.
        positions: T.
        collective: cost of an all-reduce over the positions.

    >>> whole = LayerProfile((1.0,), (8.0,), (16.0,), (100.0,), weights_bytes=40.0, output_bytes=10.0)
    >>> half = Division(weights=1.0, forward=0.5, backward=0.5, saved=0.4, forward_sums=2, backward_sums=2)
    >>> one = of_position(whole, half, 2, Collective(latency_seconds=1.0, seconds_per_byte=0.1))
    >>> one.forward_seconds, one.backward_seconds, one.saved(1), one.weights_bytes  # 6 + 2·(1 + 1), 12 + 4
    ((10.0,), (16.0,), 80.0, 20.0)
    """

    def remaining(share: float) -> float:
        return 1 - share + share / positions

    def shrunk(values: tuple[float, ...], share: float) -> tuple[float, ...]:
        return tuple(remaining(share) * value for value in values)

    lines = layer.lines()

    def seconds(kind: OpKind, share: float, sums: int = 0, more: float = 0.0) -> tuple[float, ...]:
        line = lines[kind]
        return tuple(
            (1 - share) * line.at(n) + share * _of_fewer(line, n / positions) + sums * communication + more
            for n, communication in zip(layer.samples, sum_seconds, strict=True)
        )

    size = layer.output_bytes if division.sum_bytes is None else division.sum_bytes
    sum_seconds = [collective.seconds(size * samples) for samples in layer.samples]

    weights, more = remaining(division.weights), division.overhead_seconds
    return replace(
        layer,
        forward_seconds=seconds(OpKind.FORWARD, division.forward, division.forward_sums, more),
        backward_seconds=seconds(OpKind.BACKWARD, division.backward, division.backward_sums, more),
        input_gradient_seconds=seconds(
            OpKind.INPUT_GRADIENT, division.backward, division.backward_sums, more
        ),
        weight_gradients_seconds=seconds(OpKind.WEIGHT_GRADIENTS, division.backward),
        saved_bytes=shrunk(layer.saved_bytes, division.saved),
        kept_bytes=shrunk(layer.kept_bytes, division.saved),
        kept_gradient_bytes=shrunk(layer.kept_gradient_bytes, division.saved),
        forward_peak_bytes=shrunk(layer.forward_peak_bytes, division.peaks),
        backward_peak_bytes=shrunk(layer.backward_peak_bytes, division.peaks),
        input_gradient_peak_bytes=shrunk(layer.input_gradient_peak_bytes, division.peaks),
        weight_gradients_peak_bytes=shrunk(layer.weight_gradients_peak_bytes, division.peaks),
        weights_bytes=weights * layer.weights_bytes,
        frozen_bytes=weights * layer.frozen_bytes,
        low_precision_bytes=weights * layer.low_precision_bytes,
        cast_bytes=weights * layer.cast_bytes,
        state_bytes=remaining(division.saved) * layer.state_bytes,
        slice_state_bytes=remaining(division.saved) * layer.slice_state_bytes,
        update_peak_bytes=weights * layer.update_peak_bytes,
        parameter_bytes=(),  # unknown which of them are divided
    )


def _of_fewer(line: Line, samples: float) -> float:
    """Seconds for this few samples; below the smallest size on the line through the first two.

    They are at least proportional. Micro-batches have whole samples, so a profile's curves are constant below
    the smallest size, but parts of a layer can be smaller.
    """
    sizes, seconds = line
    if samples >= sizes[0]:
        return line.at(samples)
    first, rate = seconds[0], seconds[0] / sizes[0]
    if len(sizes) > 1:
        rate = (seconds[1] - first) / (sizes[1] - sizes[0])
    return min(first, max(first - rate * (sizes[0] - samples), first * samples / sizes[0]))


@dataclass(frozen=True)
class Inputs:
    """Model, costs and devices that a prediction reads, as one position of tensor parallelism sees them.

    Attributes:
        model: what is trained.
        profile: costs of the layers of one position.
        cluster: the places of workers, see ``places``.
        undivided: profile of undivided layers.
        devices: the cluster of all positions.
        degree: T, number of positions.
    """

    model: Model
    profile: Profile
    cluster: Cluster
    undivided: Profile
    devices: Cluster
    degree: int = 1

    @classmethod
    def at(cls, model: Model, profile: Profile, cluster: Cluster, degree: int) -> Inputs:
        """Divide a profile and a cluster among ``degree`` positions.

        Raises:
            ConfigError: the profile lacks a kind of layer, or the degree does not divide the layers or the
                devices of a node.
        """
        for kind in dict.fromkeys(model.layers):
            profile.layer(kind)
        position = places(cluster, degree)
        divided = positioned(model, profile, cluster, degree)
        return cls(model, divided, position, profile, cluster, degree)

    def recomputed(self, schedule: Schedule, recompute: Recompute) -> Schedule:
        """Add the recomputations that the system runs ahead of gradients to a schedule."""
        return recomputed_ahead(schedule, Recompute(recompute), ahead=self.cluster.recompute_ahead)
