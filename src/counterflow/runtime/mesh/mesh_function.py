"""Base of functions for ``parallelize=`` that use dimensions of the mesh by their names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from counterflow.common.tensors.torch_private import flattened
from counterflow.errors import ConfigError

from .parallel import StageModule

DimNames = tuple[str, ...] | str
"""Name of a dimension of the mesh, or names of several."""


class MeshFunction:
    """Base of functions for ``parallelize=``: dimensions of the mesh, and those of ``fully_shard``.

    Args:
        dim: name of the mesh's dimension; of several, all their positions count, in this order.
        fully_shard: names of the dimensions over which weights are sharded; empty: they are not sharded.
        options: further arguments of ``fully_shard``.
    """

    def __init__(self, dim: DimNames, fully_shard: DimNames, options: dict[str, Any]) -> None:
        self.dims = as_names(dim)
        self.fully_shard = as_names(fully_shard)
        self.options = options

    def __repr__(self) -> str:
        """Constructor call."""
        dims = self.dims[0] if len(self.dims) == 1 else self.dims
        shards = [f"fully_shard={self.fully_shard}"] if self.fully_shard else []
        return f"{type(self).__name__}({', '.join([repr(dims), *self._flags(), *shards])})"

    def _flags(self) -> list[str]:
        return []

    def _part(self, mesh: DeviceMesh) -> DeviceMesh:
        names = mesh.mesh_dim_names or ()
        for name in (*self.dims, *self.fully_shard):
            if name not in names:
                raise ConfigError(
                    f"{self!r}: the mesh has no dimension {name!r} after (replica, worker), but "
                    f"{', '.join(names)}"
                )
        part: DeviceMesh = flattened(mesh, self.dims)
        return part

    def _shard_weights(self, stage: StageModule, mesh: DeviceMesh, **options: Any) -> None:
        if self.fully_shard:
            shard_weights(stage, mesh, self.fully_shard, **self.options, **options)


def as_names(names: DimNames) -> tuple[str, ...]:
    """Names of dimensions as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def shard_weights(stage: StageModule, mesh: DeviceMesh, dims: tuple[str, ...], **options: Any) -> None:
    """Shard each layer of a stage and the rest of it by themselves, by ``fully_shard``.

    Args:
        stage: the stage.
        mesh: further dimensions of the mesh.
        dims: names of the dimensions over which weights are sharded.
        options: arguments of ``fully_shard``.

    Raises:
        ConfigError: a module has trained weights of several dtypes.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - see dtensors.py

    shard_mesh = flattened(mesh, dims)
    for layer in stage:
        for module in (*_modules_of_rare_dtypes(layer), layer):
            fully_shard(module, mesh=shard_mesh, **options)
    fully_shard(stage, mesh=shard_mesh, **options)


def _modules_of_rare_dtypes(layer: nn.Module) -> list[nn.Module]:
    numbers = Counter[torch.dtype]()
    for parameter in layer.parameters():
        numbers[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
    modules = []
    for name, module in layer.named_modules() if len(numbers) > 1 else ():
        dtypes = {weight.dtype for weight in module.parameters(recurse=False) if weight.requires_grad}
        if len(dtypes) > 1:
            kinds = " and ".join(sorted(map(str, dtypes)))
            raise ConfigError(
                f"{name or 'a layer'} ({type(module).__name__}) has weights of {kinds}, and fully_shard "
                "gathers weights of one dtype together; make them one dtype, or modules of their own"
            )
        if dtypes and dtypes != {max(numbers, key=numbers.__getitem__)}:
            modules.append(module)
    return [] if modules == [layer] else modules
