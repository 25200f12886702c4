"""Expert parallelism: each position of a mesh dimension has some of the experts of a layer.

Invariant: a layer computes what it computes with all experts at hand. Tokens go to the positions of their
experts and back (``api/experts.py``), so these positions have samples of their own, and the gradient of an
expert's weight is complete at its position: it is summed over no dimension that divides the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from counterflow.api.experts import local_experts
from counterflow.api.token_shares import same_tokens
from counterflow.common.tensors.divided_modules import EXPERT_PARAMETERS, expert_modules
from counterflow.common.tensors.torch_fsdp import shard_placements
from counterflow.common.tensors.torch_private import flattened
from counterflow.errors import ConfigError

from .expert_forward import ExpertForward
from .mesh_function import DimNames, MeshFunction, as_names
from .parallel import ExpertWeight, StageModule
from .routed_forward import RoutedForward


class ExpertParallel(MeshFunction):
    """Function for ``parallelize=`` that divides the experts of a stage over a dimension of the mesh.

    Experts are found in two kinds of module:

    * A module whose ``forward`` takes (hidden states [T, width], choices [T, k], weights [T, k]), with the
      attribute ``num_experts`` and parameters [experts, ...], as those of transformers' models. Its forward
      runs on the tokens that were sent to this position.
    * A module with the attribute ``expert_parameters``, names of its own parameters [experts, ...], whose
      forward calls ``cf.dispatch`` and ``cf.combine``.

    The positions have samples of their own, except along ``tensor_dims``. With ``fully_shard``, all other
    weights are sharded as well, each layer and the rest of the stage by themselves; experts are sharded over
    those of its dimensions that do not divide them. Tensor parallelism of other modules goes before: call
    this function in one of your own.

    Args:
        dim: name of the mesh's dimension, or names of several over whose positions experts are divided.
        tensor_dims: those of ``dim`` whose positions have the same samples, as with tensor parallelism.
        fully_shard: names of the dimensions over which all other weights are sharded, ``dim`` among them or
            not; empty: they are the same at all positions.
        options: further arguments of ``fully_shard``, such as ``reshard_after_forward``.

    >>> ExpertParallel("ep", fully_shard=("shard", "ep"))
    ExpertParallel('ep', fully_shard=('shard', 'ep'))
    """

    divides_experts = True
    """Workers read experts of a model on the meta device after they are divided, each its own."""

    def __init__(
        self,
        dim: DimNames = "ep",
        *,
        tensor_dims: DimNames = (),
        fully_shard: DimNames = (),
        **options: Any,
    ) -> None:
        super().__init__(dim, fully_shard, options)
        self.tensor_dims = as_names(tensor_dims)
        if stray := {*self.tensor_dims} - {*self.dims}:
            raise ConfigError(f"tensor_dims: {', '.join(sorted(stray))} is none of {', '.join(self.dims)}")

    @override
    def _flags(self) -> list[str]:
        return [f"tensor_dims={self.tensor_dims}"] if self.tensor_dims else []

    def __call__(self, stage: StageModule, mesh: DeviceMesh) -> None:
        """Divide the experts of a stage, and shard the rest if that was asked for.

        Args:
            stage: the stage.
            mesh: further dimensions of the mesh.

        Raises:
            ConfigError: the mesh has no such dimension, or experts cannot be divided over it.
        """
        part = self._part(mesh)
        group = flattened(mesh, self.tensor_dims).get_group() if self.tensor_dims else None
        stage.divides_experts = True
        for layer in stage:
            for module, parameters in [*expert_modules(layer)]:
                _divide(stage, layer, module, parameters, part, group)
        self._shard_weights(stage, mesh, **self._expert_options(stage, mesh))

    def _expert_options(self, stage: StageModule, mesh: DeviceMesh) -> dict[str, Any]:
        from torch.distributed.tensor import Shard  # noqa: PLC0415 - see dtensors.py

        experts = {weight.module.get_parameter(weight.name) for weight in stage.expert_weights}
        rest = tuple(name for name in self.fully_shard if name not in self.dims)
        if not experts:
            return {}
        if not rest:
            if getattr(self.options.get("mp_policy"), "param_dtype", None) is not None:
                raise ConfigError(
                    f"{self!r}: mp_policy casts what fully_shard shards, and experts are not sharded over "
                    f"{', '.join(self.fully_shard)}, which divides them; let Pipeline(autocast=...) cast, or "
                    "shard over a further dimension"
                )
            return {"ignored_params": experts}
        part = flattened(mesh, rest)
        # Experts that are sharded over the dimensions of the other weights are gathered with these.
        shard = Shard if rest == self.fully_shard else shard_placements(part)
        return {"shard_placement_fn": partial(_placement, experts, part.size(), shard)}


def _placement(
    experts: Collection[nn.Parameter], size: int, shard: Callable[[int], Any], parameter: nn.Parameter
) -> Any:
    """Sharding of an expert's weight over the dimensions that do not divide experts; None: as the rest."""
    if parameter not in experts:
        return None
    shape = local_experts(parameter).shape
    return shard(1 if shape[0] % size and not shape[1] % size else 0)


def refuse_uneven(place: str, module: nn.Module, names: list[str], size: int) -> int:
    """Refuse a module whose experts cannot be divided evenly.

    Args:
        place: layer or stage of the module, in the message.
        module: module of experts.
        names: names of its parameters [experts, ...].
        size: number of positions.

    Returns:
        Number of experts.

    Raises:
        ConfigError: it is one.
    """
    kind = type(module).__name__
    counts = {module.get_parameter(name).shape[0] for name in names}
    if len(counts) != 1:
        raise ConfigError(
            f"{place}: the parameters {', '.join(names)} of {kind} have first dimensions of "
            f"{sorted(counts)}; give those that have one entry for each expert"
        )
    (count,) = counts
    if count % size:
        raise ConfigError(
            f"{place}: {count} experts of {kind} cannot be divided among {size} positions of the mesh; "
            "choose a divisor"
        )
    return count


def _divide(  # noqa: PLR0917
    stage: StageModule,
    layer: nn.Module,
    module: nn.Module,
    names: list[str],
    mesh: DeviceMesh,
    token_group: Any,
) -> None:
    """Leave a position its experts of a module's parameters; those on the meta device are read.

    Args:
        stage: stage of the layer.
        layer: layer of the module.
        module: module of experts.
        names: names of its parameters [experts, ...].
        mesh: positions that divide the experts.
        token_group: group of those of them that have the same tokens; None: only this one.

    Raises:
        ConfigError: their number cannot be divided.
    """
    count = refuse_uneven(f"stage {stage.number}", module, names, mesh.size())
    ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
    same = () if token_group is None else tuple(dist.get_process_group_ranks(token_group))
    for name in names:
        parameter = module.get_parameter(name)
        sharded = _divided(layer, parameter, mesh, reads=parameter.is_meta and not stage.stays_on_meta)
        setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        stage.expert_weights.append(ExpertWeight(module, name, ranks, same))
    place = f"stage {stage.number}"
    if not hasattr(module, EXPERT_PARAMETERS):
        module.forward = cast("Any", RoutedForward(place, module, names, count))
    elif mesh.size() > 1:
        forward = ExpertForward(place, module, names, count, mesh.size(), mesh.get_local_rank())
        module.forward = cast("Any", forward)
    if token_group is not None:
        module.forward = cast("Any", partial(_forward_of_share, module.forward, token_group))


def _divided(layer: nn.Module, parameter: nn.Parameter, mesh: DeviceMesh, *, reads: bool) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: PLC0415 - see dtensors.py

    if not reads:
        # Weights are alike at all positions already; sending them again would need a collective per weight.
        return distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
    name = next(name for name, known in layer.named_parameters() if known is parameter)
    count = parameter.shape[0] // mesh.size()
    rows = torch.empty(count, *parameter.shape[1:], dtype=parameter.dtype, device=mesh.device_type)
    cast("Any", layer).read_rows(name, rows, mesh.get_local_rank() * count)
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)


def _forward_of_share(forward: Callable[..., Any], token_group: Any, *args: Any, **kwargs: Any) -> Any:
    with same_tokens(token_group):
        return forward(*args, **kwargs)
