"""How each parameter is sharded over the further dimensions of the mesh, as all workers know it.

Invariant: copies of a stage that stand at the same position hold the same part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor

from counterflow.errors import ConfigError

from ..dtensors import is_dtensor, local
from ..transport.base import Transport
from .layout import REPLICA, WORKER, Layout


class How(NamedTuple):
    """How a parameter is sharded.

    Attributes:
        summed: the dimensions of the mesh over which FSDP sums its gradient.
        along: those along which each position has another part.
        placements: torch's description; None of a plain tensor.
    """

    summed: frozenset[int] = frozenset()
    along: frozenset[int] = frozenset()
    placements: str | None = None


WHOLE = How()


@dataclass(frozen=True, slots=True)
class Sharding:
    """How this rank's parameters are sharded.

    Attributes:
        layout: the places of all ranks.
        summed: by identity, parameters whose gradients FSDP sums, and the dimensions it sums them over.
    """

    layout: Layout
    summed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def along(self, tensor: Tensor, name: str = "a weight") -> frozenset[int]:
        """The dimensions of the mesh along which each position has another part of a tensor.

        Args:
            tensor: the tensor.
            name: its name, for messages.

        Raises:
            ConfigError: it is sharded over replicas or workers, or positions have to add up what they hold.
        """
        if not self.layout.further or not is_dtensor(tensor):
            return frozenset()
        found = frozenset[int]()
        known = cast("Any", tensor)
        for number, placement in enumerate(known.placements):
            if placement.is_partial():
                raise ConfigError(
                    f"{name} of shape {tuple(tensor.shape)} is laid out as {placement}; let parallelize() "
                    "lay weights out as Shard or Replicate"
                )
            if not placement.is_replicate():
                group = known.device_mesh.get_group(number)
                found |= self.layout.varying(dist.get_process_group_ranks(group))
        if found & {REPLICA, WORKER}:
            raise ConfigError(
                f"{name} of shape {tuple(tensor.shape)} is sharded over replicas or workers; let "
                "parallelize() use the mesh that it is given, or dimensions of it"
            )
        return found

    def agreed(self, parameters: Iterable[tuple[str, Tensor]], transport: Transport) -> dict[str, How]:
        """Sharding of each parameter of any stage by name, equal on all its holders.

        Args:
            parameters: parameters of this worker; a name occurs twice if several stages share it.
            transport: transport of the workers, all of which make the call.

        Raises:
            ConfigError: copies of a parameter are sharded differently.
        """
        if not self.layout.further:
            return {}
        mine: dict[str, tuple[How, tuple[int, ...]]] = {}
        first: dict[str, Tensor] = {}
        for name, parameter in parameters:
            placements = str(cast("Any", parameter).placements) if is_dtensor(parameter) else None
            if first.setdefault(name, parameter) is not parameter:
                placements = "several"
            summed = self.summed.get(id(parameter), frozenset())
            mine[name] = How(summed, self.along(parameter), placements), tuple(local(parameter).shape)
        rows = cast("list[dict[str, tuple[How, tuple[int, ...]]]]", transport.gather_objects(mine))
        known: dict[str, How] = {}
        shapes: dict[tuple[object, ...], tuple[int, ...]] = {}
        for rank, row in enumerate(rows):
            position = self.layout.place(rank)[2:]
            for name, (how, shape) in row.items():
                same = known.setdefault(name, how) == how
                if not same or shapes.setdefault((name, *position), shape) != shape:
                    raise ConfigError(
                        f"{name} is sharded in several ways by the workers that hold it (on rank {rank} "
                        f"as {shape}); let parallelize() do the same to all copies of a weight, tied ones too"
                    )
        return known
