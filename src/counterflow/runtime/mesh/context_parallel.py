"""Context parallelism: positions of a mesh dimension share the sequences of their samples.

Invariant: a weight is the same at these positions, and each has other tokens, so its gradient is summed over
them as over replicas. Attention sees the whole sequence (``api/attention.py``); all other layers treat each
position of a sequence for itself, which the first step checks (``stages/context_guard.py``).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from counterflow.api.carry import Carry
from counterflow.api.contexts import Context, Share

from .mesh_function import DimNames, MeshFunction
from .parallel import StageModule


class ContextParallel(MeshFunction):
    """Function for ``parallelize=`` that shares sequences over a dimension of the mesh.

    Each position is given the head and the tail of its samples' sequences, by ``cf.share_sequence``. Layers
    whose attention is ``cf.attend`` see whole sequences: the built-in GPT, and decoders of transformers.

    Args:
        dim: name of the mesh's dimension, or names of several whose positions share sequences together.
        ring: True if keys and values go around, so that no position holds all of them; False if they are
            gathered.
        fully_shard: names of the dimensions over which weights are sharded, ``dim`` among them or not; empty:
            they are the same at all positions.
        options: further arguments of ``fully_shard``, such as ``reshard_after_forward``.

    >>> ContextParallel("cp", fully_shard=("shard", "cp"))
    ContextParallel('cp', fully_shard=('shard', 'cp'))
    """

    def __init__(
        self, dim: DimNames = "cp", *, ring: bool = False, fully_shard: DimNames = (), **options: Any
    ) -> None:
        super().__init__(dim, fully_shard, options)
        self.ring = ring

    @override
    def _flags(self) -> list[str]:
        return ["ring=True"] if self.ring else []

    def __call__(self, stage: StageModule, mesh: DeviceMesh) -> None:
        """Share the sequences of a stage, and shard its weights if that was asked for.

        One position has whole sequences.

        Args:
            stage: the stage.
            mesh: further dimensions of the mesh.

        Raises:
            ConfigError: the mesh has no such dimension.
        """
        part = self._part(mesh)
        if part.size() > 1:
            share = Share(part.get_local_rank(), part.size(), stage.lengths)
            stage.context = Context(share, part.get_group(), ring=self.ring)
            for module in stage.modules():
                if isinstance(module, Carry):
                    module.context = stage.context
        self._shard_weights(stage, mesh)
