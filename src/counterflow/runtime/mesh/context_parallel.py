"""Context parallelism: positions of a mesh dimension share the sequences of their samples.

Invariant: a weight is the same at these positions, and each has other tokens, so its gradient is summed over
them as over replicas. Attention sees the whole sequence (``api/attention.py``); all other layers treat each
position of a sequence for itself, which the first step checks (``stages/context_guard.py``).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from counterflow.api.carry import Carry
from counterflow.api.contexts import Context, Share
from counterflow.common.tensors.torch_private import flattened
from counterflow.errors import ConfigError

from .parallel import StageModule


class ContextParallel:
    """Function for ``parallelize=`` that shares sequences over a dimension of the mesh.

    Each position is given the head and the tail of its samples' sequences, by ``cf.share_sequence``. Layers
    whose attention is ``cf.attend`` see whole sequences: the built-in GPT, and decoders of transformers.

    Args:
        dim: name of the mesh's dimension.
        ring: True if keys and values go around, so that no position holds all of them; False if they are
            gathered.
        fully_shard: names of the dimensions over which weights are sharded, ``dim`` among them or not; empty:
            they are the same at all positions.
        options: further arguments of ``fully_shard``, such as ``reshard_after_forward``.

    >>> ContextParallel("cp", fully_shard=("shard", "cp"))
    ContextParallel('cp', fully_shard=('shard', 'cp'))
    """

    def __init__(
        self, dim: str = "cp", *, ring: bool = False, fully_shard: tuple[str, ...] | str = (), **options: Any
    ) -> None:
        self.dim, self.ring = dim, ring
        self.fully_shard = (fully_shard,) if isinstance(fully_shard, str) else tuple(fully_shard)
        self.options = options

    def __repr__(self) -> str:
        """Constructor call."""
        ring = ", ring=True" if self.ring else ""
        shards = f", fully_shard={self.fully_shard}" if self.fully_shard else ""
        return f"{type(self).__name__}({self.dim!r}{ring}{shards})"

    def __call__(self, stage: StageModule, mesh: DeviceMesh) -> None:
        """Share the sequences of a stage, and shard its weights if that was asked for.

        Args:
            stage: the stage.
            mesh: further dimensions of the mesh.

        Raises:
            ConfigError: the mesh has no such dimension.
        """
        names = mesh.mesh_dim_names or ()
        for name in (self.dim, *self.fully_shard):
            if name not in names:
                raise ConfigError(
                    f"{self!r}: the mesh has no dimension {name!r} after (replica, worker), but "
                    f"{', '.join(names)}"
                )
        part = mesh[self.dim]
        group = part.get_group()
        share = Share(part.get_local_rank(), part.size())
        stage.context = Context(share, group, ring=self.ring)
        stage.context_ranks = tuple(dist.get_process_group_ranks(group))
        for module in stage.modules():
            if isinstance(module, Carry):
                module.context = stage.context
        if self.fully_shard:
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - see dtensors.py

            shard_mesh = flattened(mesh, self.fully_shard)
            for module in (*stage, stage):
                fully_shard(module, mesh=shard_mesh, **self.options)
