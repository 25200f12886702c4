"""Holders of parameters: a worker's parameters, grouped by the set of workers that hold them.

Invariant: every worker goes through all stages and all shared parameters of the model in one order, as making
a group for collectives needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from torch import nn

from counterflow.errors import ConfigError

from ..mesh.parallel_dims import REPLICATED, ParallelDims, WeightDims
from ..mesh.rank_mesh import WORKER
from ..stages.stage import LocalStage
from ..transport.base import Group, Transport
from .compressed_sums import SumCompression
from .gradients import GradientGroup
from .names import Names, named_parameters, shared_names


class ParameterPlacement:
    """Parameters of one worker, and the groups that sum their gradients; all workers make theirs together.

    Args:
        stages: the worker's.
        names: of the parameters of all stages of the model.
        holders: by stage, the workers of a group that hold a copy.
        dims: record of the parallel dimensions.
        transport: how to reach the others.
        compression: form in which gradients are summed; None: in full.

    Attributes:
        groups: by stage, those who hold copies of it; None: nobody else.
        created: all groups that were made.
        by_stage: by stage, its parameters that no other stage shares.
        tied: by the stages that share them, such parameters.
        split_ties: by stage, a weight that others update with another stage, and the stages that share it.
        split_tied: such weights, by name.

    Raises:
        ConfigError: a shared parameter is two on one worker.
    """

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        names: Names,
        holders: Sequence[Sequence[int]],
        dims: ParallelDims,
        transport: Transport,
        *,
        compression: SumCompression | None = None,
    ) -> None:
        self._compression = compression
        self._stages, self._names, self._holders = stages, names, holders
        self._dims, self._transport = dims, transport
        self.groups: dict[int, Group | None] = {}
        self.created: list[Group] = []
        self.by_stage: dict[int, list[GradientGroup]] = {}
        self.tied: dict[tuple[int, ...], list[GradientGroup]] = {}
        self.split_ties: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.split_tied: dict[str, nn.Parameter] = {}
        self._by_ranks: dict[tuple[int, ...], Group] = {}
        self._make()
        self._all_gradients = (
            *chain.from_iterable(self.tied.values()),
            *chain.from_iterable(self.by_stage.values()),
        )
        self._updated: dict[int, list[GradientGroup]] = defaultdict(list)
        for gradients in self._all_gradients:
            self._updated[gradients.stage].append(gradients)

    @property
    def worker(self) -> int:
        """The worker's number in its pipeline."""
        return self._dims.mesh.coordinates(self._transport.rank)[WORKER]

    def all_gradients(self) -> Sequence[GradientGroup]:
        """All of the worker's parameters."""
        return self._all_gradients

    def updated_with(self, stage: int) -> Sequence[GradientGroup]:
        """The parameters that the update of a stage updates."""
        return self._updated.get(stage, ())

    def _make(self) -> None:
        grouped: set[int] = set()
        parameters = {
            stage: named_parameters(local_stage, self._names) for stage, local_stage in self._stages.items()
        }
        for name, stages in shared_names(self._names).items():
            weight = self._dims.weight(name)
            holders = sorted({worker for stage in stages for worker in self._holders[stage]})
            if weight.placements is not None and len(holders) < sum(len(self._holders[s]) for s in stages):
                raise ConfigError(
                    f"{name} is a weight of stages {stages[0]} and {stages[-1]}, which one worker holds, and "
                    "parallelize() made two of it there; leave it whole, or do not tie it"
                )
            group = self._group(holders, weight)
            local = [stage for stage in stages if stage in self._stages]
            if not local:
                continue
            if len({next(s for s in stages if worker in self._holders[s]) for worker in holders}) > 1:
                self.split_ties.setdefault(local[0], (name, tuple(stages)))
                self.split_tied[name] = parameters[local[0]][name]
            tied = unique([(name, parameters[local[0]][name])], grouped)
            self.tied.setdefault(tuple(stages), []).append(
                self._gradients(tied, group, weight, holders, stage=local[0])
            )
        for stage, copies in enumerate(self._holders):
            groups = self._groups_of(stage, copies)
            if stage in self._stages:
                self.groups[stage] = groups[self._dims.sum_dims()]
                parts: dict[tuple[object, ...], dict[str, nn.Parameter]] = defaultdict(dict)
                for name, parameter in unique(parameters[stage].items(), grouped).items():
                    weight = self._dims.weight(name)
                    parts[self._dims.sum_dims(weight), weight.distinct][name] = parameter
                self.by_stage[stage] = []
                for part in parts.values():  # in one order, as the sums of all copies are
                    weight = self._dims.weight(next(iter(part)))
                    group = groups[self._dims.sum_dims(weight)]
                    self.by_stage[stage].append(self._gradients(part, group, weight, copies, stage=stage))

    def _groups_of(self, stage: int, copies: Sequence[int]) -> dict[frozenset[int], Group | None]:
        """Groups that sum a stage's gradients, by the dimensions of the sum; made in one order everywhere."""
        weights = [REPLICATED, *(self._dims.weight(first) for _, first in self._names[stage])]
        by_dims = {self._dims.sum_dims(weight): weight for weight in weights}
        order = sorted(by_dims, key=lambda dims: sorted(self._dims.samples - dims))
        return {dims: self._group(copies, by_dims[dims]) for dims in order}

    def _gradients(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group | None,
        weight: WeightDims,
        holders: Sequence[int],
        *,
        stage: int,
    ) -> GradientGroup:
        counted = self._dims.counts_in_norm(self._transport.rank, holders, weight)
        return GradientGroup(parameters, group, counted=counted, stage=stage, compression=self._compression)

    def _group(self, holders: Collection[int], weight: WeightDims) -> Group | None:
        """The group of those who hold the same as this worker; the workers of all positions make the call.

        One for all that the same ranks hold: the checker proves that they begin their sums in one order.
        """
        local = None
        for ranks in self._dims.sum_groups(holders, weight):
            if len(ranks) > 1:
                group = self._by_ranks.get(tuple(ranks))
                if group is None:
                    group = self._by_ranks[tuple(ranks)] = self._transport.group(ranks)
                    self.created.append(group)
                if self._transport.rank in ranks:
                    local = group
        return local


def unique(parameters: Iterable[tuple[str, nn.Parameter]], seen: set[int]) -> dict[str, nn.Parameter]:
    """Trainable parameters that are not in ``seen`` (by identity), to which they are added."""
    parameters_by_name = {}
    for name, parameter in parameters:
        if (parameter.is_floating_point() or parameter.is_complex()) and id(parameter) not in seen:
            seen.add(id(parameter))
            parameters_by_name[name] = parameter
    return parameters_by_name
