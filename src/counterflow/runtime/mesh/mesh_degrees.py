"""Degrees of parallelism beside the pipeline's, and the device mesh that has them.

Invariant: experts borrow the positions of tensor parallelism, of the contexts and of the data's shards, so a
degree of experts adds no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from counterflow.common.parallel_degrees import Degrees
from counterflow.common.tensors.divided_modules import expert_modules
from counterflow.errors import ConfigError

from .context_parallel import ContextParallel
from .expert_parallel import ExpertParallel, refuse_uneven
from .mesh_function import shard_weights
from .parallel import StageModule
from .tensor_parallel import TensorParallel, divided_modules, refuse_undivided


@dataclass(frozen=True, slots=True)
class MeshDegrees(Degrees):
    """Degrees of parallelism inside of a stage; a function for ``parallelize=``.

    A stage is on ``dp_shard * cp * tp`` ranks. Its weights are sharded by ``fully_shard`` over ``dp_shard``
    and ``cp``; experts are divided among ``ep`` positions, those of ``tp`` first, then of ``cp`` and
    ``dp_shard``, and sharded over the rest of the latter two.

    Args:
        dp_shard: positions with samples of their own, over which weights are sharded.
        cp: positions that share each sequence.
        tp: positions of tensor parallelism, which share the work of a layer.
        ep: positions among which the experts of a layer are divided: a divisor of ``dp_shard * cp * tp``.
        ring: True if keys and values of contexts go around, False if they are gathered.

    Raises:
        ConfigError: a degree is below 1, or ``ep`` does not divide the positions.

    >>> degrees = MeshDegrees(dp_shard=4, cp=2, ep=4)
    >>> degrees.sizes, degrees.expert_dims
    ({'dp_shard': 2, 'dp_shard_ep': 2, 'cp': 2}, ('dp_shard_ep', 'cp'))
    >>> MeshDegrees(dp_shard=4, tp=2, ep=4).expert_dims
    ('dp_shard_ep', 'tp')
    >>> MeshDegrees(tp=2, ep=4)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: ep = 4: must divide dp_shard * cp * tp = 2
    """

    ring: bool = False

    def _dims(self) -> Iterator[tuple[str, int, bool]]:
        """Name and size of each dimension, and True if experts are divided over it.

        Experts borrow the last positions, which are closest: a dimension of which they borrow a part is two.
        """
        for name, part in self.borrowed._asdict().items():
            size: int = getattr(self, name)
            if 1 < part < size:
                yield name, size // part, False
                yield f"{name}_ep", part, True
            elif size > 1:
                yield name, size, part == size

    @property
    def sizes(self) -> dict[str, int]:
        """Names and sizes of the mesh's dimensions after (replica, worker); those of size 1 are omitted."""
        return {name: size for name, size, _ in self._dims()}

    @property
    def shard_dims(self) -> tuple[str, ...]:
        """Names of the dimensions over which ``fully_shard`` shards."""
        return tuple(name for name in self.sizes if not name.startswith("tp"))

    @property
    def context_dims(self) -> tuple[str, ...]:
        """Names of the dimensions whose positions share sequences."""
        return tuple(name for name in self.sizes if name.startswith("cp"))

    @property
    def tensor_dims(self) -> tuple[str, ...]:
        """Names of the dimensions of tensor parallelism."""
        return tuple(name for name in self.sizes if name.startswith("tp"))

    @property
    def expert_dims(self) -> tuple[str, ...]:
        """Names of the dimensions over which experts are divided."""
        return tuple(name for name, _, divides in self._dims() if divides)

    @property
    def divides_experts(self) -> bool:
        """True if workers read experts of a model on the meta device after they are divided."""
        return self.ep > 1

    def refuse_undivided(self, layers: Iterable[nn.Module]) -> None:
        """Refuse a model that these degrees do not divide, before any rank starts.

        Args:
            layers: layers of the model; on the meta device, say.

        Raises:
            ConfigError: it has nothing to divide, or heads, features or experts that are no multiple.
        """
        tensors = experts = 0
        for number, layer in enumerate(layers):
            if self.tp > 1:
                for name, module, plan in divided_modules(layer):
                    refuse_undivided(f"layer {number}: {name}", module, plan, self.tp)
                    tensors += 1
            if self.ep > 1:
                for module, names in expert_modules(layer):
                    refuse_uneven(f"layer {number}", module, names, self.ep)
                    experts += 1
        if self.tp > 1 and not tensors:
            raise ConfigError(
                f"tp = {self.tp}: no module of the model says how tensor parallelism divides it"
            )
        if self.ep > 1 and not experts:
            raise ConfigError(f"ep = {self.ep}: the model has no experts that can be divided")

    def device_mesh(
        self, replicas: int, workers: int, *, device: str = "cpu", ranks: Sequence[int] | None = None
    ) -> DeviceMesh:
        """Device mesh (replica, worker, …) with these degrees; all ranks call it.

        Args:
            replicas: copies of the pipeline.
            workers: workers of a copy.
            device: type of the devices, ``cpu`` or ``cuda``.
            ranks: rank by replica, worker and position, row by row; None: in ascending order.
        """
        shape = (replicas, workers, *self.sizes.values())
        count = math.prod(shape)
        order = torch.arange(count) if ranks is None else torch.tensor(list(ranks))
        return DeviceMesh(device, order.view(shape), mesh_dim_names=("replica", "worker", *self.sizes))

    def __call__(self, stage: StageModule, mesh: DeviceMesh) -> None:
        """Parallelize a stage: tensors, contexts, experts, then ``fully_shard``.

        Args:
            stage: the stage.
            mesh: dimensions after (replica, worker), those of ``sizes``.
        """
        if self.tp > 1:
            TensorParallel(self.tensor_dims)(stage, mesh)
        if self.cp > 1:
            ContextParallel(self.context_dims, ring=self.ring)(stage, mesh)
        if self.ep > 1:
            same_tokens = tuple(name for name in self.expert_dims if name in self.tensor_dims)
            experts = ExpertParallel(self.expert_dims, tensor_dims=same_tokens, fully_shard=self.shard_dims)
            experts(stage, mesh)
        elif self.shard_dims:
            shard_weights(stage, mesh, self.shard_dims)

    def options(self, replicas: int, workers: int, **mesh: Any) -> dict[str, Any]:
        """Arguments ``mesh`` and ``parallelize`` of a pipeline; empty if all degrees are 1.

        Args:
            replicas: copies of the pipeline.
            workers: workers of a copy.
            mesh: further arguments of ``device_mesh``.
        """
        if self.positions == 1:
            return {}
        return {"mesh": self.device_mesh(replicas, workers, **mesh), "parallelize": self}
