"""The user's model, cut into stages: what all workers know alike before any of them makes its own.

Invariant: nothing is made or moved here, so that the same model gives the same record on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from counterflow.capture.estimates import estimated_costs
from counterflow.capture.layer import CapturedLayer
from counterflow.capture.model_layers import aliases_of, layers_of, state_names
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.program.actions import Program
from counterflow.schedule.cuts import balance, explicit
from counterflow.schedule.ir import Schedule

from ..mini_batch.loss_output import LossFunction
from ..parameters.extra_state import ExtraState
from ..parameters.names import Names
from ..parameters.shared_buffers import SharedBuffer, shared_buffers
from ..stages.carrying import add_carries
from ..stages.materialization import have_statistics
from ..stages.named_layer import NamedLayer, loss_layer, place_of
from ..stages.sharing.watch import SharedObjects, shared_objects
from ..stages.skip_links import StageSkips, links_of, stage_skips

Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True, slots=True)
class PartitionedModel:
    """A model in stages.

    Attributes:
        schedule: what runs it, with the model's skip connections.
        layers: by stage.
        loss: the loss function, if it is a module with weights or buffers.
        cuts: the numbers of the layers with which stages 1, 2, ... begin.
        skips: by stage, what it saves for others and loads of them; None: nothing.
        names: of parameters, by stage.
        aliases: of tensors with several names: by the first one, all names.
        extra_state: what is in no layer.
        order: the names in the model's ``state_dict``; none of a list of layers.
        holders: by stage, the workers of a group that hold it.
        shared_buffers: buffers that several stages have.
        shared_objects: Python objects that several stages reach.
    """

    schedule: Schedule
    layers: tuple[tuple[NamedLayer, ...], ...]
    loss: NamedLayer | None
    cuts: tuple[int, ...]
    skips: tuple[StageSkips | None, ...]
    names: Names
    aliases: dict[str, tuple[str, ...]]
    extra_state: ExtraState
    order: tuple[str, ...]
    holders: tuple[tuple[int, ...], ...]
    shared_buffers: tuple[SharedBuffer, ...]
    shared_objects: SharedObjects

    @property
    def runs_in_order(self) -> bool:
        """True if one worker runs all stages, and a mini-batch's forwards in the order of the layers."""
        workload = self.schedule.workload
        alone = self.schedule.placement.workers == 1
        return self.schedule.synchronous and alone and workload.micro_batches == workload.slices == 1

    @property
    def layer_count(self) -> int:
        """Layers of all stages."""
        return sum(map(len, self.layers))

    def layer_in_common(self, reference: PartitionedModel) -> str | None:
        """The first layer of which another model has a module with weights, as in messages."""
        modules = {
            id(child) for of_stage in reference.layers for x in of_stage for child in x.module.modules()
        }
        for layer in (layer for of_stage in self.layers for layer in of_stage):
            owners = (m for m in layer.module.modules() if next(m.parameters(), None) is not None)
            if any(id(module) in modules for module in owners):
                return place_of(layer)
        return None

    @property
    def statistics(self) -> tuple[int, ...]:
        """The stages with running statistics of batch norms."""
        return tuple(stage for stage, layers in enumerate(self.layers) if have_statistics(layers))

    def modules(self, model: Model) -> list[nn.Module]:
        """All modules of the user's: of the model, of layers that wrap parts of it, and of the loss."""
        roots = [layer.module for layers in self.layers for layer in layers]
        roots += [model] if isinstance(model, nn.Module) else []
        roots += [] if self.loss is None else [self.loss.module]
        return list({id(module): module for root in roots for module in root.modules()}.values())


def partition_model(
    model: Model,
    loss_function: LossFunction | None,
    schedule: Schedule,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None,
    *,
    cuts: Sequence[int] | str | None,
    costs: Sequence[float] | None,
) -> PartitionedModel:
    """Cut a model into the stages of a schedule; arguments as of ``Pipeline``.

    Raises:
        ConfigError: it cannot be cut so.
    """
    loss = loss_layer(loss_function)
    modules = layers_of(model, list_layers)
    _refuse_too_few_layers(modules, schedule)
    names_of = state_names(model, list_layers)
    all_layers = [NamedLayer(i, n, m) for i, (n, m) in enumerate(zip(names_of, modules, strict=True))]
    stages = schedule.stages
    if cuts is not None:
        cuts_of_stages = explicit(cuts, len(modules), stages)
    else:
        cuts_of_stages = balance(estimated_costs(modules) if costs is None else list(costs), stages)
    edges = (0, *cuts_of_stages, len(modules))
    layers = tuple(tuple(all_layers[edges[stage] : edges[stage + 1]]) for stage in range(stages))
    if schedule.workload.slices > 1:
        add_carries(modules)
    skips = stage_skips(modules, edges, sliced=schedule.workload.slices > 1)
    schedule = schedule.with_skips(links_of(skips))
    program = Program(schedule, ())
    return PartitionedModel(
        schedule,
        layers,
        loss,
        tuple(cuts_of_stages),
        tuple(skips),
        _names_of(layers, loss),
        aliases_of(model),
        ExtraState(model, [layer.names for layer in all_layers]),
        tuple(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else (),
        tuple(program.holders(stage) for stage in range(stages)),
        tuple(shared_buffers(layers, loss)),
        shared_objects(layers, loss, loss_function),
    )


def _refuse_too_few_layers(modules: Sequence[nn.Module], schedule: Schedule) -> None:
    if len(modules) >= schedule.stages or not isinstance(modules[0], CapturedLayer):
        return
    for path, why in modules[0].closed.items():
        raise ConfigError(
            f"{plural(len(modules), 'layer')} for {plural(schedule.stages, 'stage')}: the module {path!r} "
            f"could not be looked into, because its forward {why}; change that, or choose fewer stages"
        )


def _names_of(layers: Sequence[Sequence[NamedLayer]], loss: NamedLayer | None) -> Names:
    first: dict[int, str] = {}
    names_by_stage: list[list[tuple[str, str]]] = []
    for stage, stage_layers in enumerate(layers):
        names = []
        for layer in (*stage_layers, loss) if loss is not None and stage == len(layers) - 1 else stage_layers:
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                full = layer.names[name]
                names.append((full, first.setdefault(id(parameter), full)))
        names_by_stage.append(names)
    return names_by_stage
