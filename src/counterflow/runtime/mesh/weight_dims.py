"""Contents of weights along the further dimensions of the mesh, read of torch's DTensors once.

Invariant: holders of a stage at the same position hold the same part, and all workers know the parts of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from counterflow.common.tensors.dtensors import is_dtensor, local
from counterflow.errors import ConfigError

from ..transport.base import Transport
from .parallel_dims import REPLICATED, ParallelDims, WeightDims
from .rank_mesh import REPLICA, WORKER, RankMesh

_Row = dict[str, tuple[WeightDims, tuple[int, ...]]]
"""Content and local shape of each weight of a worker, by first name."""

_SEVERAL = "several"
"""In place of torch's placements: a worker has two tensors for one weight."""


def agreed_dims(
    mesh: RankMesh,
    tensors: Iterable[tuple[str, Tensor]],
    reduced: Mapping[int, frozenset[int]],
    transport: Transport,
    names: Sequence[str],
    *,
    experts: Mapping[int, frozenset[int]] = MappingProxyType({}),
    contexts: frozenset[int] = frozenset(),
    same_tokens: frozenset[int] = frozenset(),
) -> ParallelDims:
    """The record of all workers' weights; all workers call it.

    It decides as well which dimensions have samples of their own: those over which ``fully_shard`` sums,
    contexts are shared, or experts are divided that see other tokens at each position.

    Args:
        mesh: coordinates of all ranks.
        tensors: parameters and DTensor buffers of this worker by first name; a name occurs twice if several
            stages share the tensor.
        reduced: by identity, parameters whose gradients ``fully_shard`` sums, and the dimensions of the sums.
        transport: transport to the other workers.
        names: names of the mesh's further dimensions.
        experts: by identity, weights of experts, and the dimensions over which their experts are divided.
        contexts: dimensions whose positions share sequences.
        same_tokens: dimensions over which experts are divided though their positions have the same tokens.

    Raises:
        ConfigError: copies of a weight are sharded differently; a weight is sharded over replicas or workers,
            or along a dimension with samples that ``fully_shard`` does not gather it over; positions have the
            same tokens for some weights, and other ones for others.
    """
    local_weights: _Row = {}
    first: dict[str, Tensor] = {}
    for name, tensor in tensors:
        placements = str(cast("Any", tensor).placements) if is_dtensor(tensor) else None
        if first.setdefault(name, tensor) is not tensor:
            placements = _SEVERAL
        weight = WeightDims(
            shards=_shard_dims(mesh, name, tensor) - experts.get(id(tensor), frozenset()),
            experts=experts.get(id(tensor), frozenset()),
            reduced=reduced.get(id(tensor), frozenset()),
            placements=placements,
        )
        local_weights[name] = weight, tuple(local(tensor).shape)
    gathered = cast(
        "list[tuple[_Row, frozenset[int], frozenset[int]]]",
        transport.gather_objects((local_weights, contexts, same_tokens)),
    )
    if len({dims for _, dims, _ in gathered}) > 1:
        raise ConfigError("workers share sequences along other dimensions; give all the same parallelize")
    rows = [row for row, *_ in gathered]
    samples = frozenset({REPLICA}).union(
        contexts,
        *(
            weight.reduced | (weight.experts - same)
            for row, _, same in gathered
            for weight, _ in row.values()
        ),
    )
    if both := samples & frozenset[int]().union(*(same for *_, same in gathered)):
        raise ConfigError(
            f"positions along dimension {names[min(both) - 2]!r} of the mesh are said to have the same "
            "tokens (tensor_dims of cf.ExpertParallel), and samples of their own (fully_shard, "
            "cf.ContextParallel or another cf.ExpertParallel)"
        )
    weights: dict[str, WeightDims] = {}
    shapes: dict[tuple[object, ...], tuple[int, ...]] = {}
    for rank, row in enumerate(rows):
        position = mesh.along(rank, mesh.further)
        for name, (weight, shape) in row.items():
            _refuse_ungathered(name, weight, samples, names)
            same = weights.setdefault(name, weight) == weight
            if not same or shapes.setdefault((name, *position), shape) != shape:
                raise ConfigError(
                    f"{name} is sharded in several ways by the workers that hold it (on rank {rank} "
                    f"as {shape}); let parallelize() do the same to all copies of a weight, tied ones too"
                )
    return ParallelDims(
        mesh, samples, {name: weight for name, weight in weights.items() if weight != REPLICATED}, contexts
    )


def _shard_dims(mesh: RankMesh, name: str, tensor: Tensor) -> frozenset[int]:
    if not is_dtensor(tensor):
        return frozenset()
    dims = frozenset[int]()
    dtensor = cast("Any", tensor)
    for number, placement in enumerate(dtensor.placements):
        if placement.is_partial():
            raise ConfigError(
                f"{name} of shape {tuple(tensor.shape)} is laid out as {placement}; let parallelize() "
                "lay weights out as Shard or Replicate"
            )
        if not placement.is_replicate():
            group = dtensor.device_mesh.get_group(number)
            dims |= mesh.varying(dist.get_process_group_ranks(group))
    if dims & {REPLICA, WORKER}:
        raise ConfigError(
            f"{name} of shape {tuple(tensor.shape)} is sharded over replicas or workers; let "
            "parallelize() use the mesh that it is given, or dimensions of it"
        )
    return dims


def _refuse_ungathered(name: str, weight: WeightDims, samples: frozenset[int], names: Sequence[str]) -> None:
    if dims := (weight.shards - weight.reduced) & samples:
        raise ConfigError(
            f"{name} is sharded along dimension {names[min(dims) - 2]!r} of the mesh, whose positions have "
            "samples of their own (fully_shard or cf.ExpertParallel uses it), and nothing gathers it; divide "
            "experts by cf.ExpertParallel, and shard other weights by fully_shard or along another dimension"
        )
