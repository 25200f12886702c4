"""Degrees of a mesh beyond replicas and pipeline: the positions of a worker, and the devices they are on.

A worker of a schedule is P = dp_shard · cp · tp devices. Every position contains a whole pipeline, and all of
them do the same at the same time, so a plan with P positions is a plan on a cluster of places of P devices
each. Positions are counted as in a mesh (dp_shard, cp, tp), the last one fastest; the experts of a layer are
divided over the last coordinates, those of tp first, and E divides their number, as in torchtitan's mesh.

Invariant: a place is a part of a node, or whole nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from counterflow.common.borrowed_positions import borrowed_positions
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from ..inputs.cluster import Cluster, Collective, Link, all_reduce, slowest


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism of a worker.

    Attributes:
        tensor_parallel: positions that share the work of each layer.
        context_parallel: positions that share the sequences of their samples.
        expert_parallel: positions that share the experts of each layer.
        dp_shard: positions with samples of their own. They and those of ``context_parallel`` shard weights.

    >>> Degrees(2, expert_parallel=4)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: expert_parallel=4: must divide the 2 positions of a worker (dp_shard 1 ·
    context_parallel 1 · tensor_parallel 2)
    >>> Degrees(2, 2, 4, 2).positions, Degrees(1, 2, 2, 4).expert_shards, Degrees(2, 2, 2, 4).expert_shards
    (8, 4, 8)
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    dp_shard: int = 1

    def __post_init__(self) -> None:
        for name in ("context_parallel", "expert_parallel", "dp_shard"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.positions % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel={self.expert_parallel}: must divide the {self.positions} positions of a "
                f"worker (dp_shard {self.dp_shard} · context_parallel {self.context_parallel} · "
                f"tensor_parallel {self.tensor_parallel})"
            )

    @property
    def positions(self) -> int:
        """P, devices of a worker."""
        return self.shards * self.tensor_parallel

    @property
    def shards(self) -> int:
        """Positions over which weights are sharded."""
        return self.dp_shard * self.context_parallel

    @property
    def token_shares(self) -> int:
        """Positions of tensor parallelism that divide experts: each sends a share of their tokens."""
        cp, tp = self.context_parallel, self.tensor_parallel
        return borrowed_positions(self.expert_parallel, cp=cp, tp=tp).tp

    @property
    def expert_shards(self) -> int:
        """Positions over which the weights of the same experts are sharded."""
        return self.shards * self.token_shares // self.expert_parallel

    @property
    def by_name(self) -> dict[str, int]:
        """Degrees above 1, by the names of the mesh's dimensions."""
        degrees = {
            "dp_shard": self.dp_shard,
            "cp": self.context_parallel,
            "tp": self.tensor_parallel,
            "ep": self.expert_parallel,
        }
        return {name: degree for name, degree in degrees.items() if degree > 1}

    def __str__(self) -> str:
        """Degrees as messages name them."""
        if self.shards == self.expert_parallel == 1:
            return f"tensor_parallel={self.tensor_parallel}"
        return ", ".join(f"{name} {degree}" for name, degree in self.by_name.items())


def places(cluster: Cluster, degrees: Degrees) -> Cluster:
    """The cluster as one position sees it: a place for each worker.

    Its ``cores`` are those of a place's nodes, for the workers of all positions.

    Raises:
        ConfigError: positions of tensor parallelism do not fit a node, or places fit neither nodes nor whole
            ones.

    >>> server = Cluster("c", 2, 8, 1e9, Link(0, 1.0), Link(0, 2.0), shared_adapter=True)
    >>> here = places(server, Degrees(tensor_parallel=4))
    >>> here.size, here.between.seconds_per_byte
    (4, 8.0)
    >>> places(server, Degrees(expert_parallel=16, dp_shard=16)).size
    1
    """
    positions, tensor_parallel = degrees.positions, degrees.tensor_parallel
    sizes = [*{node.devices: None for node, _ in cluster.kinds_of_nodes()}]
    for devices in sizes:
        if tensor_parallel < 1 or devices % tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={tensor_parallel}: must divide the {devices} "
                f"device{'s' if devices > 1 else ''} of a node of cluster {cluster.name}"
            )
    if positions == 1:
        return cluster
    nodes = 1
    if any(devices % positions for devices in sizes):
        nodes, rest = divmod(positions, sizes[0])
        if cluster.kinds or rest or not nodes or cluster.nodes % nodes:
            raise ConfigError(
                f"{degrees}: a worker has {plural(positions, 'device')}, but its place has to be a part "
                "of the "
                f"{' or '.join(map(str, sizes))} of a node of cluster {cluster.name}, or whole nodes that "
                "divide the cluster"
            )
    crowd = min(positions, cluster.most_devices) if cluster.shared_adapter else 1
    sums = cluster.allreduce_between
    return replace(
        cluster,
        nodes=cluster.nodes // nodes,
        devices=max(1, cluster.devices // positions),
        cores=cluster.cores and cluster.cores * nodes,
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


@dataclass(frozen=True, slots=True)
class PositionGroups:
    """Groups of the positions of a worker, and the costs of their collectives.

    All groups of a kind communicate at one time; with ``shared_adapter`` those of a node share its way out.

    Attributes:
        cluster: the devices, not places.
        degrees: degrees of the worker.
    """

    cluster: Cluster
    degrees: Degrees

    @property
    def tensor_sum(self) -> Collective:
        """All-reduce over the positions of tensor parallelism."""
        nodes = [node for node, _ in self.cluster.kinds_of_nodes()]
        return all_reduce(self.cluster, [self.degrees.tensor_parallel], nodes)

    def context_gather(self) -> Collective:
        """All-gather over positions that share sequences, in bytes of the whole; a reduce-scatter too."""
        return self._gather(self.degrees.tensor_parallel, self.degrees.context_parallel)

    def weight_gather(self) -> Collective:
        """All-gather over the positions that shard weights, in bytes of the whole; a reduce-scatter too."""
        return self._gather(self.degrees.tensor_parallel, self.degrees.shards)

    def expert_gather(self) -> Collective:
        """The same over the positions that shard the weights of the same experts."""
        degrees = self.degrees
        stride = degrees.tensor_parallel * degrees.expert_parallel // degrees.token_shares
        return self._gather(stride, degrees.expert_shards)

    def token_gather(self) -> Collective:
        """All-gather over the positions that send shares of the same tokens, in bytes of all of these."""
        return self._gather(1, self.degrees.token_shares)

    def exchange(self) -> Collective:
        """All-to-all over the positions that share experts, in bytes that each position sends, to itself too.

        Bytes to other nodes take the link between them, beside those that stay in the node.
        """
        members, cluster = self.degrees.expert_parallel, self.cluster
        if members == 1:
            return Collective()
        # Those that send shares of the same tokens are adjacent, and on one node.
        shares = self.degrees.token_shares
        counts = [shares * n for n in self._counts(self.degrees.tensor_parallel, members // shares)]
        nodes = [node for node, _ in cluster.kinds_of_nodes()]
        inside = slowest(node.inside for node in nodes)
        within = inside.seconds_per_byte * (counts[0] - 1) / members
        if len(counts) == 1:
            return Collective(inside.latency_seconds, within)
        between = slowest(node.between for node in nodes)
        crowd = min(self.degrees.positions, cluster.devices) if cluster.shared_adapter else 1
        out = crowd * between.seconds_per_byte * (members - counts[0]) / members
        return Collective(between.latency_seconds, max(within, out))

    def _counts(self, stride: int, members: int) -> list[int]:
        """Members of a group on each of its nodes, of positions that are ``stride`` apart."""
        on_node = min(self.degrees.positions, self.cluster.most_devices)
        count = min(members, max(1, on_node // stride))
        return [count] * math.ceil(members / count)

    def _gather(self, stride: int, members: int) -> Collective:
        if members == 1:
            return Collective()
        counts = self._counts(stride, members)
        on_node = min(self.degrees.positions, self.cluster.most_devices)
        crowd = on_node // counts[0] if self.cluster.shared_adapter else 1
        nodes = [
            replace(node, allreduce_between=_shared(node.allreduce_between, crowd))
            for node, _ in self.cluster.kinds_of_nodes()
        ]
        # A reduce-scatter, or an all-gather of as many bytes, is half of an all-reduce.
        both = all_reduce(self.cluster, counts, nodes)
        return Collective(both.latency_seconds / 2, both.seconds_per_byte / 2)


def expert_degrees(count: int) -> Iterator[int]:
    """Degrees of expert parallelism that a search tries for this number of experts: powers of two."""
    degree = 1
    while not count % degree:
        yield degree
        degree *= 2
