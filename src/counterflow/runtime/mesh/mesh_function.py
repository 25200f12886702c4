"""What functions for ``parallelize=`` have in common that use a dimension of the mesh by its name."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from counterflow.common.tensors.torch_private import flattened
from counterflow.errors import ConfigError

from .parallel import StageModule


class MeshFunction:
    """Base of functions for ``parallelize=``: a dimension of the mesh, and those of ``fully_shard``.

    Args:
        dim: name of the mesh's dimension.
        fully_shard: names of the dimensions over which weights are sharded; empty: they are not sharded.
        options: further arguments of ``fully_shard``.
    """

    def __init__(self, dim: str, fully_shard: tuple[str, ...] | str, options: dict[str, Any]) -> None:
        self.dim = dim
        self.fully_shard = (fully_shard,) if isinstance(fully_shard, str) else tuple(fully_shard)
        self.options = options

    def __repr__(self) -> str:
        """Constructor call."""
        shards = [f"fully_shard={self.fully_shard}"] if self.fully_shard else []
        return f"{type(self).__name__}({', '.join([repr(self.dim), *self._flags(), *shards])})"

    def _flags(self) -> list[str]:
        return []

    def _refuse_unknown_dims(self, mesh: DeviceMesh) -> None:
        """Refuse a mesh without a dimension that is used.

        Raises:
            ConfigError: it is one.
        """
        names = mesh.mesh_dim_names or ()
        for name in (self.dim, *self.fully_shard):
            if name not in names:
                raise ConfigError(
                    f"{self!r}: the mesh has no dimension {name!r} after (replica, worker), but "
                    f"{', '.join(names)}"
                )

    def _shard_weights(self, stage: StageModule, mesh: DeviceMesh, **options: Any) -> None:
        """Shard each layer and the rest of the stage by themselves, if that was asked for.

        Args:
            stage: the stage.
            mesh: further dimensions of the mesh.
            options: arguments of ``fully_shard`` beside those of the constructor.
        """
        if not self.fully_shard:
            return
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - see dtensors.py

        shard_mesh = flattened(mesh, self.fully_shard)
        for module in (*stage, stage):
            fully_shard(module, mesh=shard_mesh, **self.options, **options)
