"""The user's ``parallelize``: what it is given, and what it made of the stages.

Invariant: the weights are made first, alike at all positions of the mesh, and sharded after that: what a run
starts with depends on no mesh. Gradients that FSDP sums are sums, as those of replicas are, not means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from counterflow.api.aux_loss import was_added
from counterflow.api.contexts import Context
from counterflow.api.skip import Carried
from counterflow.common.tensors.dtensors import is_dtensor, settled
from counterflow.common.tensors.torch_fsdp import fsdp_groups, whole_parameter
from counterflow.common.tensors.torch_private import children_of
from counterflow.common.trees import mapped
from counterflow.errors import ConfigError

from ..messages.values import Value
from ..stages.sample_rows import SampleRows
from ..stages.stage_wrappers import Run, StageWrapper
from ..transport.base import Transport
from .fsdp_order import FsdpOrder
from .fsdp_sum import FsdpGradientSum
from .rank_mesh import REPLICA, WORKER, Mesh, RankMesh
from .stage_weights import StageWeights

if TYPE_CHECKING:
    from ..stages.named_layer import NamedLayer


class ExpertWeight(NamedTuple):
    """Weight of experts.

    Attributes:
        module: module that has it.
        name: its name there.
        ranks: ranks among which the experts are divided.
        same_tokens: those of them that have the same tokens; empty: this one alone.
    """

    module: nn.Module
    name: str
    ranks: tuple[int, ...]
    same_tokens: tuple[int, ...]


class StageModule(nn.Module, StageWrapper):
    """A stage's layers, for ``parallelize``: iterate over it for the layers in their order.

    Each layer is a submodule named by its number in the model.

    Attributes:
        number: of the stage, from 0.
        sums_each_backward: set it in ``parallelize`` to let ``fully_shard`` sum gradients in the backward of
            every micro-batch, and not once a step: more messages, and no gradient of the whole stage.
        expert_weights: weights of which positions have other experts each.
        divides_experts: True if its experts, if it has any, are divided.
        divides_features: True if its modules with a plan of tensor parallelism, if it has any, are divided.
        context: positions that share its sequences; None: it is given whole ones.
        lengths: relative lengths of the slices in which its sequences run.
        stays_on_meta: True if it is rehearsed: its weights are on the meta device, and remain there.
    """

    sums_each_backward = False
    fsdp_sum: FsdpGradientSum | None = None
    """Sums once a step what ``fully_shard`` shards; None: it shards nothing, or sums in each backward."""

    fsdp_order: FsdpOrder | None = None
    """Order of the collectives of ``fully_shard``; None: it shards nothing."""

    def __init__(self, number: int, layers: Sequence[NamedLayer], lengths: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.number = number
        self.lengths = lengths
        self.stays_on_meta = False
        self.expert_weights: list[ExpertWeight] = []
        self.divides_experts = self.divides_features = False
        self.context: Context | None = None
        for layer in layers:
            self.add_module(str(layer.index), layer.module)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("dict[str, nn.Module]", children_of(self)).values())

    def __len__(self) -> int:
        return len(children_of(self))

    def forward(self, run: Callable[[Value], Any], value: Value) -> Any:
        """Output of ``run``, which runs the layers, for a value; hooks of the stage run around it."""
        return run(value)

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Hooks of the stage are around the run, and what it gives is there, and whole.

        Raises:
            ConfigError: a tensor is a DTensor.
        """
        skips: list[dict[int, Any]] = []

        def run_layers(value: Value) -> Any:
            output = run(value, step, rows)
            if type(output) is not Carried:
                return output
            skips.append(output.skips)
            return output.value

        # Hooks of fully_shard get no skips or states: a backward has the stage gathered for these.
        output = self(run_layers, value)
        if skips:
            output = Carried(output, *skips)
        if self.fsdp_sum is not None:
            self.fsdp_sum.prepare()
            self.fsdp_sum.gathers |= was_added()
        elif self.sums_each_backward and torch.is_grad_enabled() and was_added() and fsdp_modules(self):
            raise ConfigError(
                f"a layer of stage {self.number} adds to the loss, and fully_shard gathers weights when "
                "gradients of outputs are there; omit sums_each_backward, so that a backward has the "
                "whole stage gathered"
            )
        return mapped(self._plain, output)

    def sum_gradients(self) -> None:
        """Sum gradients that FSDP left whole, and compare its collectives; all positions call it.

        Raises:
            ConfigError: positions gathered weights in different orders.
        """
        if self.fsdp_sum is not None:
            self.fsdp_sum.sum()
        elif self.fsdp_order is not None:
            self.fsdp_order.end_mini_batch({})

    @override
    def breaks_block(self, layer: NamedLayer) -> str:
        """Layers have hooks of their own that see to their weights."""
        del layer
        return "its weights are sharded"

    def _plain(self, tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            raise ConfigError(
                f"stage {self.number} gives a DTensor of shape {tuple(tensor.shape)}, and stages pass on "
                "plain tensors; let parallelize() end the stage's last layer with use_local_output=True"
            )
        return settled(tensor)


Parallelize = Callable[[StageModule, DeviceMesh], None]
"""Sharding the weights of a stage over the further dimensions of the mesh, in place."""


def further_mesh(mesh: Mesh | None, parallelize: Parallelize | None, transport: Transport) -> Any:
    """The further dimensions of a mesh; None if there is nothing to shard.

    Raises:
        ConfigError: there is a mesh for it and no function, or the other way round.
    """
    further = isinstance(mesh, DeviceMesh) and mesh.mesh.dim() > 2
    if not further and parallelize is None:
        return None
    if not further or not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            "parallelize needs further dimensions of the mesh: give one of (replica, worker, ...), as "
            'init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "worker", "tp"))'
        )
    if parallelize is None:
        raise ConfigError(
            f"the mesh has shape {tuple(mesh.mesh.shape)}; say what its dimensions after (replica, worker) "
            "are for with parallelize=, or omit them"
        )
    if transport.shares_process:
        raise ConfigError(
            "workers that are threads have no collectives of torch's, which FSDP and tensor parallelism "
            "need; start processes, with transport gloo or nccl"
        )
    if not mesh.mesh_dim_names:
        raise ConfigError("the mesh has further dimensions without names; give it mesh_dim_names")
    return mesh[tuple(mesh.mesh_dim_names[2:])]


def parallelize_stages(
    stages: Sequence[StageModule], parallelize: Parallelize, further: DeviceMesh, mesh: RankMesh
) -> dict[int, frozenset[int]]:
    """Shard this worker's stages by the user's function; all workers call it.

    Returns:
        By identity, the parameters whose gradients ``fully_shard`` sums, and the dimensions of these sums.

    Raises:
        ConfigError: the function replaces modules, shards over replicas or workers, or makes several weights
            of one, or one whose hooks are not called.
    """
    reduced: dict[int, frozenset[int]] = {}
    for stage in stages:
        modules, weights = list(stage), StageWeights(stage, stage.number)
        result = cast("Callable[..., object]", parallelize)(stage, further)
        if result not in (None, stage) or [*map(id, stage)] != [*map(id, modules)]:
            raise ConfigError(
                f"parallelize() gave other modules for stage {stage.number}; let it change the stage's "
                "layers in place, as fully_shard and parallelize_module do"
            )
        fsdp = fsdp_modules(stage)
        for module in fsdp:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # not every backend has another
            module.set_requires_gradient_sync(True)
        if fsdp:
            names = {name: module for name, module in stage.named_modules() if module in fsdp}
            sums_each_backward = stage.sums_each_backward
            stage.fsdp_order = FsdpOrder(stage.number, names, sums_each_backward=sums_each_backward)
            if not sums_each_backward:
                stage.fsdp_sum = FsdpGradientSum(fsdp, stage.fsdp_order)
        for group in _fsdp_groups(stage):
            dims = frozenset[int]()
            for process_group in _process_groups(group.mesh_info):
                dims |= mesh.varying(dist.get_process_group_ranks(process_group))
            if dims & {REPLICA, WORKER}:
                raise ConfigError(
                    f"stage {stage.number} is sharded over replicas or workers; give fully_shard the mesh "
                    "that parallelize() is given, or dimensions of it"
                )
            reduced |= {id(each.sharded_param): dims for each in group.fsdp_params}
        weights.preserve(reduced)
    return reduced


def expert_dims(stages: Sequence[StageModule], mesh: RankMesh) -> dict[int, frozenset[int]]:
    """Dimensions over which experts are divided, by the identity of each weight of experts."""
    weights = (weight for stage in stages for weight in stage.expert_weights)
    return {id(weight.module.get_parameter(weight.name)): mesh.varying(weight.ranks) for weight in weights}


def same_token_dims(stages: Sequence[StageModule], mesh: RankMesh) -> frozenset[int]:
    """Dimensions over which experts are divided though their positions have the same tokens."""
    weights = (weight for stage in stages for weight in stage.expert_weights)
    return frozenset[int]().union(*(mesh.varying(w.same_tokens) for w in weights if w.same_tokens))


def context_dims(stages: Sequence[StageModule], mesh: RankMesh) -> frozenset[int]:
    """Dimensions whose positions share the sequences of a worker's stages.

    Raises:
        ConfigError: some of the stages share them, and others do not.
    """
    groups = [() if s.context is None else dist.get_process_group_ranks(s.context.group) for s in stages]
    dims = {mesh.varying(ranks) if ranks else frozenset() for ranks in groups}
    if len(dims) > 1:
        raise ConfigError(
            "some stages share sequences and others do not; call cf.ContextParallel in parallelize() for each"
        )
    return next(iter(dims), frozenset())


def refuse_sharded(model: nn.Module | Sequence[nn.Module]) -> None:
    """Refuse a model that the user has sharded, or wrapped for data parallelism, before the pipeline is made.

    Args:
        model: the model, or its layers.

    Raises:
        ConfigError: there is such a module.
    """
    roots = (
        {"": model} if isinstance(model, nn.Module) else {f"layer {n}": each for n, each in enumerate(model)}
    )
    for prefix, root in roots.items():
        for name, module in root.named_modules(prefix=prefix) if isinstance(root, nn.Module) else ():
            place = f"{name or 'the model'} ({type(module).__name__})"
            group = getattr(module, "process_group", None) if type(module).__name__ in _WRAPPERS else None
            if group is not None and group.size() > 1:
                raise ConfigError(
                    f"{place} synchronises replicas by itself, as a pipeline does; give the module that it "
                    "wraps, and shard it with parallelize="
                )
            for weight, parameter in module.named_parameters(recurse=False):
                if is_dtensor(parameter):
                    raise ConfigError(
                        f"{weight} of {place} is a DTensor: it was sharded (fully_shard, parallelize_module) "
                        "before the pipeline was made, which makes weights alike first; give plain modules, "
                        "and shard each stage in parallelize="
                    )


_WRAPPERS = "DistributedDataParallel", "FullyShardedDataParallel"


def fsdp_modules(stage: nn.Module) -> list[Any]:
    """The modules of a stage that FSDP shards."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - see dtensors.py

    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def gathered_parameters(stage: nn.Module) -> list[Tensor]:
    """The whole parameters that FSDP computes with in place of its shards, as far as it has gathered any."""
    found = [whole_parameter(one) for group in _fsdp_groups(stage) for one in group.fsdp_params]
    return [parameter for parameter in found if parameter is not None]


def _fsdp_groups(stage: nn.Module) -> list[Any]:
    return [group for module in fsdp_modules(stage) for group in fsdp_groups(module)]


def _process_groups(mesh_info: Any) -> list[Any]:
    names = "shard_process_group", "replicate_process_group"
    return [getattr(mesh_info, name) for name in names if hasattr(mesh_info, name)]
