"""Places of a cluster: the devices of a worker with several positions, and groups of positions.

Every position contains a whole pipeline, and all of them do the same at the same time, so a plan with P
positions is a plan on a cluster of places of P devices each.

Invariant: a place is a part of a node, or whole nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from counterflow.common.parallel_degrees import Degrees, text_of
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from ..inputs.cluster import Cluster, Collective, Link, all_reduce, slowest


def places(cluster: Cluster, degrees: Degrees) -> Cluster:
    """The cluster as one position sees it: a place for each worker.

    Its ``cores`` are those of a place's nodes, for the workers of all positions.

    Raises:
        ConfigError: positions of tensor parallelism do not fit a node, or places fit neither nodes nor whole
            ones.

    >>> server = Cluster("c", 2, 8, 1e9, Link(0, 1.0), Link(0, 2.0), shared_adapter=True)
    >>> here = places(server, Degrees(tp=4))
    >>> here.size, here.between.seconds_per_byte
    (4, 8.0)
    >>> places(server, Degrees(dp_shard=16, ep=16)).size
    1
    """
    positions, tensor_parallel = degrees.positions, degrees.tp
    sizes = [*{node.devices: None for node, _ in cluster.kinds_of_nodes()}]
    for devices in sizes:
        if devices % tensor_parallel:
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
                f"{text_of(degrees)}: a worker has {plural(positions, 'device')}, but its place has to be a "
                f"part of the {' or '.join(map(str, sizes))} of a node of cluster {cluster.name}, or whole "
                "nodes that divide the cluster"
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
        return all_reduce(self.cluster, [self.degrees.tp], nodes)

    def context_gather(self) -> Collective:
        """All-gather over positions that share sequences, in bytes of the whole; a reduce-scatter too."""
        return self._gather(self.degrees.tp, self.degrees.cp)

    def weight_gather(self) -> Collective:
        """All-gather over the positions that shard weights, in bytes of the whole; a reduce-scatter too."""
        return self._gather(self.degrees.tp, self.degrees.shards)

    def expert_gather(self) -> Collective:
        """The same over the positions that shard the weights of the same experts."""
        degrees = self.degrees
        stride = degrees.tp * degrees.ep // degrees.borrowed.tp
        return self._gather(stride, degrees.expert_shards)

    def token_gather(self) -> Collective:
        """All-gather over the positions that send shares of the same tokens, in bytes of all of these."""
        return self._gather(1, self.degrees.borrowed.tp)

    def exchange(self) -> Collective:
        """All-to-all over the positions that share experts, in bytes that each position sends, to itself too.

        Bytes to other nodes take the link between them, beside those that stay in the node.
        """
        members, cluster = self.degrees.ep, self.cluster
        if members == 1:
            return Collective()
        # Those that send shares of the same tokens are adjacent, and on one node.
        shares = self.degrees.borrowed.tp
        counts = [shares * n for n in self._members_by_node(self.degrees.tp, members // shares)]
        nodes = [node for node, _ in cluster.kinds_of_nodes()]
        inside = slowest(node.inside for node in nodes)
        within = inside.seconds_per_byte * (counts[0] - 1) / members
        if len(counts) == 1:
            return Collective(inside.latency_seconds, within)
        between = slowest(node.between for node in nodes)
        crowd = min(self.degrees.positions, cluster.devices) if cluster.shared_adapter else 1
        out = crowd * between.seconds_per_byte * (members - counts[0]) / members
        return Collective(between.latency_seconds, max(within, out))

    def _members_by_node(self, stride: int, members: int) -> list[int]:
        on_node = min(self.degrees.positions, self.cluster.most_devices)
        count = min(members, max(1, on_node // stride))
        return [count] * math.ceil(members / count)

    def _gather(self, stride: int, members: int) -> Collective:
        if members == 1:
            return Collective()
        counts = self._members_by_node(stride, members)
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
