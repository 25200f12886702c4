"""Tensor parallelism: positions of a mesh dimension share the work of a layer's matrices.

Invariant: positions have the same samples, and a layer gives the same output at each of them. A module whose
children are divided starts from whole inputs and ends with a sum over the positions, so modules that no plan
names compute the same at all positions. Its forward is compared with that of whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from counterflow.common.tensors.divided_modules import TENSOR_PARALLEL_PLAN
from counterflow.common.tensors.torch_private import children_of, parameters_of
from counterflow.errors import ConfigError

from .divided_forward import DividedForward
from .mesh_function import DimNames, MeshFunction
from .parallel import StageModule

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"

Plan = Mapping[str, str]


class TensorParallel(MeshFunction):
    """Function for ``parallelize=`` that divides matrices over a dimension of the mesh.

    Two kinds of module say how: one with the attribute ``tensor_parallel_plan``, as those of the built-in
    models; and one of transformers, by the ``base_model_tp_plan`` of its config. A module is divided if its
    plan divides outputs (``colwise``) and sums over inputs (``rowwise``); all others, embeddings and heads
    among them, are the same at all positions.

    Args:
        dim: name of the mesh's dimension.
        fully_shard: names of the dimensions over which weights are sharded after that; empty: none.
        options: further arguments of ``fully_shard``.

    >>> TensorParallel("tp")
    TensorParallel('tp')
    """

    def __init__(self, dim: DimNames = "tp", *, fully_shard: DimNames = (), **options: Any) -> None:
        super().__init__(dim, fully_shard, options)

    def __call__(self, stage: StageModule, mesh: DeviceMesh) -> None:
        """Divide the matrices of a stage, and shard its weights if that was asked for.

        Args:
            stage: the stage.
            mesh: further dimensions of the mesh.

        Raises:
            ConfigError: the mesh has no such dimension, or heads or features cannot be divided over it.
        """
        part = self._part(mesh)
        stage.divides_features = part.size() > 1
        for name, module, plan in [*divided_modules(stage)]:
            place = f"stage {stage.number}: {name}"
            refuse_undivided(place, module, plan, part.size())
            forward = DividedForward(place, module, plan)
            _divide(module, plan, part)
            if part.size() > 1:
                module.forward = cast("Any", forward)
        self._shard_weights(stage, mesh)


def divided_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, Plan]]:
    """Modules that tensor parallelism divides, with their names and their children's plan."""
    for name, module in root.named_modules():
        plan = getattr(module, TENSOR_PARALLEL_PLAN, None) or _transformers_plan(name, module)
        if ROWWISE in plan.values():
            yield name, module, plan


def _transformers_plan(name: str, module: nn.Module) -> Plan:
    entries: Mapping[str, str] = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
    parent = name.rpartition(".")[2]
    plan = {}
    for pattern, style in entries.items():
        *_, owner, child = ("", *pattern.split("."))
        if owner == parent and children_of(module).get(child) is not None:
            plan[child] = style
    return plan if {*plan.values()} <= {COLWISE, ROWWISE, SUMMED} else {}


def refuse_undivided(place: str, module: nn.Module, plan: Plan, size: int) -> None:
    """Refuse a module whose features, by whole heads, cannot be divided.

    Args:
        place: name of the module in the message.
        module: module with the attribute ``head_dim`` if it has heads.
        plan: style by child.
        size: number of positions.

    Raises:
        ConfigError: it is one.
    """
    width = getattr(module, "head_dim", 1)
    for name, style in plan.items():
        weight = getattr(module.get_submodule(name), "weight", None)
        if style == SUMMED or not isinstance(weight, Tensor):
            continue
        features = weight.shape[0 if style == COLWISE else 1]
        if features % (width * size):
            parts = f"{features // width} heads" if width > 1 else f"{features} features"
            raise ConfigError(
                f"{place} ({type(module).__name__}): {parts} of {name} cannot be divided among {size} "
                "positions of tensor parallelism; choose a divisor"
            )


def _divide(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - see dtensors.py
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles: Any = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}
    divided = {name: styles[style]() for name, style in plan.items() if style != SUMMED}
    # Weights are alike at all positions already; sending them again would need a collective per weight.
    parallelize_module(module, mesh, divided, src_data_rank=None)
    for name, style in plan.items():
        if style == SUMMED:
            _sum_gradients(module.get_submodule(name), mesh)


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let gradients of a module's weights, which are the same at all positions, be summed over these: each
    position applies them to its part of the heads.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: PLC0415 - see dtensors.py

    names = [name for name, _ in module.named_parameters(recurse=False)]
    for name in names:
        parameter = module.get_parameter(name)
        tensor = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(module, name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    module.forward = cast("Any", partial(_forward_on_part, module, module.forward, names))


def _forward_on_part(module: nn.Module, forward: Any, names: Iterable[str], *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.tensor import Partial  # noqa: PLC0415 - see dtensors.py

    table = parameters_of(module)
    replicated = {name: table[name] for name in names}
    table.update({name: weight.to_local(grad_placements=[Partial()]) for name, weight in replicated.items()})
    try:
        return forward(*args, **kwargs)
    finally:
        table.update(replicated)
