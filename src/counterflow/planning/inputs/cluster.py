"""The cluster: devices in nodes, their memory, and the links between them.

Invariant: numbers are per device or per link, in seconds and bytes; a message of L bytes takes latency + L ·
seconds per byte. Compute times are in the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

FORM: Final = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic parses these data types from files: no unknown keys, no conversions, finite numbers."""


class AllReduce(StrEnum):
    """Algorithm of an all-reduce over several devices of several nodes.

    ``hierarchical``: reduce-scatter inside each node, all-reduce between nodes, of a part by each device,
    all-gather inside. ``ring``: one ring through all devices, node after node, as in Gloo.
    """

    HIERARCHICAL = "hierarchical"
    RING = "ring"


MOST_DEVICES = 100_000
"""Maximum number of devices of a cluster."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of two devices.

    Attributes:
        latency_seconds: α, the time of a message of any size.
        seconds_per_byte: β, the additional time of each byte.

    >>> Link(latency_seconds=1e-5, seconds_per_byte=1e-9).seconds(1e6)
    0.00101
    """

    __pydantic_config__ = FORM

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            require_number(name, getattr(self, name))

    def seconds(self, size: float) -> float:
        """Travel time of a message of ``size`` bytes."""
        return self.latency_seconds + self.seconds_per_byte * size


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Equal nodes of a cluster; the cluster's values replace None.

    Attributes:
        name: name of the kind.
        nodes: number of nodes.
        devices: devices of each.
        memory_bytes: memory of a device; the reserve is the cluster's.
        slowness: factor by which ops are slower on such a device than in the profile.
        cores: processor cores of each, if devices are workers on cores.
        inside: the link of two of its devices, for their all-reduces too.
        between: the link of one of its devices and another node's; the slower of both ends counts.
    """

    __pydantic_config__ = FORM

    name: str
    nodes: int
    devices: int | None = None
    memory_bytes: float | None = None
    slowness: float = 1.0
    cores: int | None = None
    inside: Link | None = None
    between: Link | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name: a kind of nodes needs one")
        _require_counts(self, "nodes", "devices", "cores")
        if self.memory_bytes is not None:
            require_number("memory_bytes", self.memory_bytes)
        require_number("slowness", self.slowness)
        if self.slowness == 0:
            raise ConfigError("slowness=0: must be more than 0; 2 is a device that takes twice as long")


@dataclass(frozen=True, slots=True)
class Node:
    """Properties of a node.

    Attributes:
        devices: number of devices.
        usable_bytes: memory of a device without the reserve.
        slowness: factor by which ops are slower on a device than in the profile.
        cores: processor cores, if devices are workers on cores.
        inside: the link of two of its devices.
        between: the link of messages to and from other nodes.
        allreduce_inside: the link of an all-reduce among its devices.
        allreduce_between: the link of an all-reduce with other nodes.
    """

    devices: int
    usable_bytes: float
    slowness: float
    cores: int | None
    inside: Link
    between: Link
    allreduce_inside: Link
    allreduce_between: Link

    @property
    def shares_cores(self) -> bool:
        """True if its workers share cores."""
        return self.cores is not None and self.cores < self.devices

    @property
    def fills_cores(self) -> bool:
        """True if its workers leave no core to threads that carry messages."""
        return self.cores is not None and self.cores <= self.devices


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes on a network of two levels, with equal devices unless there are kinds of nodes.

    Attributes:
        name: name of the cluster.
        nodes: number of nodes of all kinds.
        devices: devices of a node.
        memory_bytes: memory of a device.
        inside: the link of two devices of one node; with one device per node it is unused.
        between: the link of two devices of different nodes.
        allreduce_inside: the link of an all-reduce among devices of one node; None: ``inside``.
        allreduce_between: the link of an all-reduce that spans nodes; None: ``between``.
        allreduce: algorithm of all-reduces: ``hierarchical``, or one ``ring``.
        reserve_bytes: memory of a device that training cannot use: the runtime's, its libraries', and losses
            to fragmentation.
        communicator_bytes: memory of a device that each of its communicators takes; NCCL's take about 100 MB
            with the default number of channels.
        shared_adapter: whether the devices of a node share one way out, so simultaneous messages to other
            nodes slow each other down; otherwise each has a way of its own.
        overlap: whether a message travels while its sender computes.
        sync_slowdown: share by which compute is slower during an all-reduce, 0 or more.
        recompute_ahead: whether whole stages are computed again while their workers wait for gradients, as
            Counterflow does; otherwise in the backward, as other systems do.
        cores: processor cores of a node, if the devices are workers on cores; None for accelerators.
        sources: origins of numbers, by name.
        kinds: kinds of nodes, in the order in which nodes and devices are counted; empty: all are alike.

    Raises:
        ConfigError: a number is out of its range, or the kinds do not have as many nodes in total.
    """

    __pydantic_config__ = FORM

    name: str
    nodes: int
    devices: int
    memory_bytes: float
    inside: Link
    between: Link
    allreduce_inside: Link | None = None
    allreduce_between: Link | None = None
    allreduce: AllReduce = AllReduce.HIERARCHICAL
    reserve_bytes: float = 0.0
    communicator_bytes: float = 0.0
    shared_adapter: bool = False
    overlap: bool = True
    sync_slowdown: float = 0.0
    recompute_ahead: bool = True
    cores: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[NodeKind, ...] = ()

    def __post_init__(self) -> None:
        _require_counts(self, "nodes", "devices", "cores")
        self._require_kinds()
        if self.size > MOST_DEVICES:
            raise ConfigError(
                f"nodes={self.nodes} with devices={self.devices} each: at most {MOST_DEVICES:,} devices are "
                "supported; give fewer"
            )
        for name in ("memory_bytes", "reserve_bytes", "communicator_bytes", "sync_slowdown"):
            require_number(name, getattr(self, name))
        if self.reserve_bytes >= self.memory_bytes:
            raise ConfigError(
                f"reserve_bytes={self.reserve_bytes:g}: leaves nothing of "
                f"memory_bytes={self.memory_bytes:g}; must be less"
            )

    def _require_kinds(self) -> None:
        names = [kind.name for kind in self.kinds]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"kinds: {twice[0]!r} exists twice; give each kind a name of its own")
        count = sum(kind.nodes for kind in self.kinds)
        if self.kinds and count != self.nodes:
            raise ConfigError(
                f"nodes={self.nodes}: the kinds have {plural(count, 'node')} together; the numbers must "
                "be equal"
            )
        for kind in self.kinds:
            if kind.cores is not None and self.cores is None:
                raise ConfigError(
                    f"kinds: {kind.name}: cores={kind.cores}: the cluster has no cores, so its devices are "
                    "not workers on cores; give cores there too, or leave them out here"
                )
            if kind.memory_bytes is not None and self.reserve_bytes >= kind.memory_bytes:
                raise ConfigError(
                    f"kinds: {kind.name}: reserve_bytes={self.reserve_bytes:g}: leaves nothing of "
                    f"memory_bytes={kind.memory_bytes:g}; must be less"
                )

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        if self.kinds:
            return sum(kind.nodes * (kind.devices or self.devices) for kind in self.kinds)
        return self.nodes * self.devices

    @property
    def most_devices(self) -> int:
        """Number of devices of the largest node."""
        return max((kind.devices or self.devices for kind in self.kinds), default=self.devices)

    def node(self, kind: NodeKind | None = None) -> Node:
        """Properties of a node of a kind; None: of a cluster without kinds."""
        inside, between = self.allreduce_link(spans_nodes=False), self.allreduce_link(spans_nodes=True)
        usable = self.usable_bytes
        if kind is None:
            return Node(self.devices, usable, 1.0, self.cores, self.inside, self.between, inside, between)
        if kind.memory_bytes is not None:
            usable = kind.memory_bytes - self.reserve_bytes
        return Node(
            kind.devices or self.devices,
            usable,
            kind.slowness,
            kind.cores or self.cores,
            kind.inside or self.inside,
            kind.between or self.between,
            kind.inside or inside,
            kind.between or between,
        )

    def kinds_of_nodes(self) -> list[tuple[Node, int]]:
        """Properties of the nodes, in their order, and the number of each."""
        if not self.kinds:
            return [(self.node(), self.nodes)]
        return [(self.node(kind), kind.nodes) for kind in self.kinds]

    @property
    def usable_bytes(self) -> float:
        """Memory of a device without the reserve; the default of kinds of nodes."""
        return self.memory_bytes - self.reserve_bytes

    def allreduce_link(self, *, spans_nodes: bool) -> Link:
        """The link that an all-reduce uses."""
        if spans_nodes:
            return self.allreduce_between or self.between
        return self.allreduce_inside or self.inside


def allreduce_seconds(link: Link, size: float, copies: int) -> float:
    """2·log2(r)·α + 2·(r−1)·β·L/r: Rabenseifner's all-reduce of L bytes over r copies.

    Args:
        link: the slowest link between two of the copies.
        size: L, bytes of one copy, 0 or more.
        copies: r, 1 or more.

    Source: Chimera, section 3.4.

    >>> allreduce_seconds(Link(0.5, 0.25), size=8, copies=4)
    5.0
    """
    steps = 2 * math.log2(copies) * link.latency_seconds
    return steps + 2 * (copies - 1) * link.seconds_per_byte * size / copies


@dataclass(frozen=True, slots=True)
class Collective:
    """Cost of an all-reduce among some copies.

    Attributes:
        latency_seconds: time for any size.
        seconds_per_byte: additional time of each byte of one copy.
        crossing_seconds_per_byte: the part of it on the single way out that the devices of a node share; 0 if
            nothing is shared.
    """

    latency_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    crossing_seconds_per_byte: float = 0.0

    def seconds(self, size: float) -> float:
        """Duration alone, for copies of this many bytes."""
        return self.latency_seconds + self.seconds_per_byte * size


def all_reduce(cluster: Cluster, copies: Sequence[int], nodes: Sequence[Node] = ()) -> Collective:
    """The all-reduce of copies, with their number on each node.

    With r copies on one node, or one on each of r nodes, it is Rabenseifner's (``allreduce_seconds``), or a
    ring of 2(r−1) steps, in which each copy sends 2(r−1)/r of its bytes as well.

    Args:
        cluster: the cluster with its links.
        copies: number of copies on each node that has any.
        nodes: properties of these nodes, whose slowest links count; empty: all are alike.

    >>> servers = Cluster("c", 2, 8, 1e9, Link(0, 1 / 100), Link(0, 1 / 10), shared_adapter=True)
    >>> round(all_reduce(servers, [8, 8]).seconds(1000), 9)  # 2·7/8·10 s inside, 2·1/2·100 s between
    117.5
    >>> from dataclasses import replace
    >>> all_reduce(replace(servers, allreduce=AllReduce.RING), [8, 8]).seconds(1000)  # 2·15/16·100 s
    187.5
    """
    count = sum(copies)
    nodes = nodes or (cluster.node(),)
    inside = slowest(node.allreduce_inside for node in nodes)
    if len(copies) < 2:
        return _one_level(cluster, inside, count)
    between = slowest(node.allreduce_between for node in nodes)
    shared = cluster.shared_adapter and any(node.devices > 1 for node in nodes)
    if cluster.allreduce is AllReduce.RING or max(copies) == 1:
        link = between if max(copies) == 1 else slowest((inside, between))
        ring = _one_level(cluster, link, count)
        crossing = _one_level(cluster, between, count).seconds_per_byte
        return replace(ring, crossing_seconds_per_byte=crossing if shared else 0.0)
    inside_nodes = _one_level(cluster, inside, max(copies))
    between_nodes = _one_level(cluster, between, len(copies))
    # Each device has a part of the bytes, and all parts leave the node.
    out = between_nodes.seconds_per_byte if shared else between_nodes.seconds_per_byte / min(copies)
    return Collective(
        inside_nodes.latency_seconds + between_nodes.latency_seconds,
        inside_nodes.seconds_per_byte + out,
        out if shared else 0.0,
    )


def _one_level(cluster: Cluster, link: Link, copies: int) -> Collective:
    if copies == 1:
        return Collective()
    steps = copies - 1 if cluster.allreduce is AllReduce.RING else math.log2(copies)
    return Collective(2 * steps * link.latency_seconds, 2 * (copies - 1) / copies * link.seconds_per_byte)


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """Cost of sending bytes from one copy after another to all others.

    Attributes:
        once_seconds: time until the last copy has received the last broadcast.
        start_seconds: start-up time of each broadcast.
        seconds_per_byte: additional time of each byte.
        crossing_seconds_per_byte: the part of it on the single way out that the devices of a node share; 0 if
            nothing is shared.
    """

    once_seconds: float = 0.0
    start_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    crossing_seconds_per_byte: float = 0.0

    def seconds(self, size: float, count: int) -> float:
        """Duration of ``count`` broadcasts with this many bytes in total."""
        return self.once_seconds + count * self.start_seconds + self.seconds_per_byte * size


def broadcasts(cluster: Cluster, copies: Sequence[int], nodes: Sequence[Node] = ()) -> Broadcasts:
    """Broadcasts among copies, with their number on each node, over the links of messages.

    With ``hierarchical`` all-reduces, as in NCCL: along a chain through all copies, node after node, in small
    pieces, so each byte takes its time on the slowest link; the next copy sends when the first pieces have
    passed it. With a ``ring``, as in Gloo: a binomial tree of ⌈log2 r⌉ (α + β·L), whose last levels are
    between nodes; all copies of a node send there at once.

    Args:
        cluster: the cluster with its links.
        copies: number of copies on each node that has any.
        nodes: properties of these nodes, whose slowest links count; empty: all are alike.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.3, for the tree; NCCL's and Gloo's sources.

    >>> servers = Cluster("c", 2, 4, 1e9, Link(1, 1 / 128), Link(2, 1 / 8), allreduce=AllReduce.RING)
    >>> broadcasts(servers, [4, 4]).seconds(1024, 1)  # 2 levels of 1 + 8 s inside, 1 of 2 + 128 s between
    148.0
    >>> from dataclasses import replace
    >>> chain = broadcasts(replace(servers, allreduce=AllReduce.HIERARCHICAL), [4, 4])
    >>> chain.seconds(1024, 1)  # 6 links inside and 1 between, 128 s, 2 s to start
    138.0
    """
    most, several = max(copies), len(copies)
    nodes = nodes or (cluster.node(),)
    inside, between = slowest(node.inside for node in nodes), slowest(node.between for node in nodes)
    shared = cluster.shared_adapter and several > 1 and any(node.devices > 1 for node in nodes)
    if cluster.allreduce is AllReduce.RING:
        levels, further = (math.ceil(math.log2(count)) for count in (most, several))
        out = further * between.seconds_per_byte * (most if shared else 1)
        start = levels * inside.latency_seconds + further * between.latency_seconds
        return Broadcasts(0.0, start, levels * inside.seconds_per_byte + out, out if shared else 0.0)
    links = [*([inside] if most > 1 else ()), *([between] if several > 1 else ())]
    once = (sum(copies) - several) * inside.latency_seconds + (several - 1) * between.latency_seconds
    return Broadcasts(
        once,
        max((link.latency_seconds for link in links), default=0.0),
        max((link.seconds_per_byte for link in links), default=0.0),
        between.seconds_per_byte if shared else 0.0,
    )


def slowest(links: Iterable[Link]) -> Link:
    """A link with the maximum latency and the maximum seconds per byte of all."""
    choices = list(links)
    if len(choices) == 1:
        return choices[0]
    return Link(max(link.latency_seconds for link in choices), max(link.seconds_per_byte for link in choices))


def _require_counts(of: Cluster | NodeKind, *names: str) -> None:
    for name in names:
        value = getattr(of, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be 1 or more")


def require_number(name: str, value: float) -> None:
    """Refuse anything but a finite number, 0 or more.

    Raises:
        ConfigError: the value is not such a number.
    """
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name}={value}: must be a finite number, 0 or more")
