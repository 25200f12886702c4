"""What a model is trained on: devices in nodes, their memory, and the links between them.

Invariant: numbers are per device or per link, in seconds and bytes; a message of L bytes takes
latency + L · seconds a byte. What a device computes in how long is the profile's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from counterflow.errors import ConfigError

FORM: Final = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic reads these data types from files: nothing unknown, nothing converted, finite numbers."""


MOST_DEVICES = 100_000
"""The largest cluster that is planned for."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of two devices.

    Attributes:
        latency_seconds: α, what a message takes whatever its size.
        seconds_per_byte: β, what each of its bytes adds.

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
        """How long a message of ``size`` bytes travels."""
        return self.latency_seconds + self.seconds_per_byte * size


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with equal devices on a network of two levels.

    Attributes:
        name: what to call it.
        nodes: how many nodes.
        devices: devices of a node.
        memory_bytes: memory of a device.
        inside: the link of two devices of one node; with one device a node it is not used.
        between: the link of two devices of different nodes.
        allreduce_inside: what an all-reduce among devices of one node finds; None: ``inside``.
        allreduce_between: what an all-reduce that spans nodes finds; None: ``between``.
        reserve_bytes: memory of a device that training cannot have: the runtime's, its libraries', what
            fragmentation loses.
        shared_adapter: whether the devices of a node share one way out, so that what several of them send to
            other nodes at one time takes so many times as long.
        overlap: whether a message travels while its sender computes on.
        sync_slowdown: share by which compute is slower beside an all-reduce, 0 or more.
        cores: processor cores of a node where the devices are workers on them; None for accelerators.
        sources: where a number comes from, by its name.

    Raises:
        ConfigError: a number out of its range.
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
    reserve_bytes: float = 0.0
    shared_adapter: bool = False
    overlap: bool = True
    sync_slowdown: float = 0.0
    cores: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "devices", "cores"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be 1 or more")
        if self.size > MOST_DEVICES:
            raise ConfigError(
                f"nodes={self.nodes} with devices={self.devices} each: at most {MOST_DEVICES:,} devices are "
                "planned for"
            )
        for name in ("memory_bytes", "reserve_bytes", "sync_slowdown"):
            require_number(name, getattr(self, name))
        if self.reserve_bytes >= self.memory_bytes:
            raise ConfigError(
                f"reserve_bytes={self.reserve_bytes:g}: leaves nothing of "
                f"memory_bytes={self.memory_bytes:g}; must be less"
            )

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    @property
    def usable_bytes(self) -> float:
        """Memory of a device without the reserve."""
        return self.memory_bytes - self.reserve_bytes

    @property
    def shares_cores(self) -> bool:
        """Whether workers of a node have to take turns on its cores."""
        return self.cores is not None and self.cores < self.devices

    def allreduce_link(self, *, spans_nodes: bool) -> Link:
        """The link that an all-reduce finds."""
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


def require_number(name: str, value: float) -> None:
    """Refuse what is no finite number, 0 or more.

    Raises:
        ConfigError: it is none.
    """
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name}={value}: must be a finite number, 0 or more")
