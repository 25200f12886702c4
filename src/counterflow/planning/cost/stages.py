"""A model's layers cut into stages, with each stage's cost according to a profile.

Invariant: stages are whole runs of layers; every layer is counted once. Costs are for one micro-batch of a
given number of samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import add
from typing import TypeVar

from counterflow.errors import ConfigError
from counterflow.schedule.cuts import balance, explicit, stage_layers
from counterflow.schedule.ir import OpKind, SkipLink
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import Saved
from counterflow.simulation.layer_cost import LayerCost
from counterflow.simulation.op_costs import StageBytes

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .stage_inputs import StageInputs
from .stage_memory import leaf_bytes, stage_bytes, stage_bytes_without_peaks
from .stage_ties import StageTie, stage_ties

_T = TypeVar("_T")


class Cutting(StrEnum):
    """Rule by which layers are cut into stages: by cost, or equally many of the most common kind in each."""

    BALANCED = "balanced"
    EVEN = "even"


Cuts = Cutting | tuple[int, ...]
"""A rule, or the layers at which each stage after the first begins."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage for one micro-batch: folds of its layers' costs, computed when they are read.

    Attributes:
        model: the layers.
        profile: costs of the layers.
        cuts: the layers at which each stage after the first begins.
        samples: samples of a micro-batch.
        residuals: True if gradients are summed in a smaller form, so that the rest of each waits for the next
            sum.
    """

    model: Model
    profile: Profile
    cuts: tuple[int, ...]
    samples: int
    residuals: bool = False

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @cached_property
    def _of_kind(self) -> dict[str, LayerProfile]:
        return {kind: self.profile.layer(kind) for kind in self.model.layers}

    @cached_property
    def _kinds(self) -> list[tuple[str, ...]]:
        layers = self.model.layers
        return [layers[run.start : run.stop] for run in stage_layers(self.cuts, len(layers))]

    @cached_property
    def _distinct(self) -> tuple[list[tuple[str, ...]], list[int]]:
        distinct = [*dict.fromkeys(self._kinds)]
        return distinct, [*map(distinct.index, self._kinds)]

    def _folded(self, fold: Callable[[Sequence[LayerProfile]], _T]) -> tuple[_T, ...]:
        distinct, which = self._distinct
        # Once for equal stages.
        results = [fold([self._of_kind[kind] for kind in kinds]) for kinds in distinct]
        return tuple([results[number] for number in which])

    def _total(self, of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        amounts = {kind: of(layer) for kind, layer in self._of_kind.items()}
        distinct, which = self._distinct
        sums = [sum(map(amounts.__getitem__, stage)) for stage in distinct]
        return tuple([sums[number] for number in which])

    # Seconds.

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Seconds of each stage."""
        costs = {id(layer): layer.cost() for layer in self._of_kind.values()}
        # A recomputation begins the op that needs it.
        overhead = {kind: self.profile.op_overhead_seconds for kind in OpKind if kind.makes}

        def fold(layers: Sequence[LayerProfile]) -> LayerCost:
            stage = [costs[id(layer)] for layer in layers]
            return LayerCost.fold(stage, self.samples, overhead, sliced=self.profile.positions > 0)

        return self._folded(fold)

    @cached_property
    def _distinct_layers(self) -> tuple[list[LayerCost], list[int]]:
        distinct = {id(layers): layers for layers in self.layers}
        numbers = {key: number for number, key in enumerate(distinct)}
        return [*distinct.values()], [numbers[id(layers)] for layers in self.layers]

    def seconds(self, kind: OpKind, samples: float | None = None, share: float = 1.0) -> list[float]:
        """Seconds of an op by stage, with its overhead; of a backward without recomputation.

        Args:
            kind: kind of the op.
            samples: samples that it computes at once; None: a micro-batch.
            share: number of times that it does; see ``LayerCost.seconds``.
        """
        size = self.samples if samples is None else samples
        layers, which = self._distinct_layers
        seconds = [stage.op_seconds(kind, size, share) for stage in layers]
        return [seconds[number] for number in which]

    @property
    def recomputation(self) -> list[float]:
        """Seconds of each stage's layers when a backward computes them again."""
        layers, which = self._distinct_layers
        seconds = [stage.seconds(OpKind.FORWARD, self.samples) for stage in layers]
        return [seconds[number] for number in which]

    # Messages.

    @cached_property
    def _skips(self) -> tuple[tuple[tuple[SkipLink, float], ...], list[float]]:
        return _skips(self.model, self.cuts, self.samples)

    @property
    def skips(self) -> tuple[tuple[SkipLink, float], ...]:
        """Skip connections past the next stage and values sent once per step, with their bytes, ascending."""
        return self._skips[0]

    @cached_property
    def output_bytes(self) -> tuple[float, ...]:
        """Bytes of the stage's output."""
        last = [self._of_kind[kinds[-1]].output_bytes for kinds in self._kinds]
        rows = zip(last, self._skips[1], strict=True)
        return tuple([size * self.samples + more for size, more in rows])

    @cached_property
    def message_bytes(self) -> tuple[float, ...]:
        """Bytes of the message that carries each stage's output."""
        share = self.model.message_share
        return tuple([share * size for size in self.output_bytes])

    @cached_property
    def skip_bytes(self) -> tuple[float, ...]:
        """Bytes of the message of each of the ``skips``."""
        share = self.model.message_share
        return tuple([share * size for _, size in self.skips])

    # Weights.

    @cached_property
    def _ties(self) -> tuple[tuple[StageTie, ...], list[tuple[float, float, float]]]:
        return stage_ties(self.model, self.cuts)

    @property
    def ties(self) -> tuple[StageTie, ...]:
        """Weights that several stages share."""
        return self._ties[0]

    def _once(self, of: Callable[[LayerProfile], float], column: int) -> tuple[float, ...]:
        """Bytes of weights, without further copies in layers of the same stage; ``column`` of ``_ties``."""
        return _less(self._total(of), [row[column] for row in self._ties[1]])

    def _of_unshared_weights(
        self, amounts: Sequence[float], of: Callable[[StageTie], float]
    ) -> tuple[float, ...]:
        tied = [0.0] * self.stages
        for tie in self.ties:
            for stage in tie.stages:
                tied[stage] += of(tie)
        return _less(amounts, tied)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Bytes of one version of the stage's weights."""
        return self._once(lambda layer: layer.weights_bytes, 0)

    @cached_property
    def casts(self) -> tuple[float, ...]:
        """Bytes of their casts to another precision."""
        return self._total(lambda layer: layer.cast_bytes)

    @cached_property
    def buffers(self) -> tuple[float, ...]:
        """Bytes of the buffers of its layers."""
        return self._total(lambda layer: layer.buffer_bytes)

    @cached_property
    def noted_buffers(self) -> tuple[float, ...]:
        """Bytes of the buffers whose contents may be noted in a step."""
        return self._total(lambda layer: layer.noted_buffer_bytes)

    @cached_property
    def trained(self) -> tuple[float, ...]:
        """Bytes of those that are trained."""
        return self._once(lambda layer: layer.trained_bytes, 1)

    @cached_property
    def optimizer(self) -> tuple[float, ...]:
        """Bytes of their optimiser state."""
        return tuple([self.model.optimizer_states * size for size in self.trained])

    @cached_property
    def _gradients(self) -> tuple[float, ...]:
        return self._once(lambda layer: layer.gradient_bytes, 2)

    @cached_property
    def gradients(self) -> tuple[float, ...]:
        """Bytes of their gradients; what is lost of them in a smaller form has their size."""
        return tuple([2 * size for size in self._gradients]) if self.residuals else self._gradients

    @cached_property
    def summed(self) -> tuple[float, ...]:
        """Bytes of trained weights that only copies of the stage contain, with sums of their own."""
        return self._of_unshared_weights(self.trained, lambda tie: tie.trained_bytes)

    @cached_property
    def synced(self) -> tuple[float, ...]:
        """Bytes of those gradients, as copies of the stage send them."""
        share = self.model.gradient_share
        sizes = self._once(lambda layer: layer.summed_bytes, 2)
        alone = self._of_unshared_weights(sizes, lambda tie: tie.gradient_bytes)
        return tuple([share * size for size in alone])

    @cached_property
    def position_sums(self) -> tuple[float, ...]:
        """Seconds in which the positions of a worker sum their gradients."""
        return self._total(lambda layer: layer.position_sum_seconds)

    @cached_property
    def update_peaks(self) -> tuple[float, ...]:
        """Memory that the optimiser needs while it updates a stage."""
        join = sum if self.profile.update_together else max
        return self._folded(lambda layers: float(join(layer.update_peak_bytes for layer in layers)))

    # Activations.

    @cached_property
    def measured(self) -> bool:
        """True if the profile contains the peaks of ops, so memory of messages is computed; otherwise there
        is an allowance for them.
        """
        return any(layer.forward_peak_bytes for layer in self._of_kind.values())

    @cached_property
    def _layer_inputs(self) -> list[tuple[float, ...]]:
        first, outputs = self.model.input_bytes, {k: x.output_bytes for k, x in self._of_kind.items()}
        sizes = first, *(outputs[kind] for kind in self.model.layers[:-1])  # the output of the layer before
        runs = stage_layers(self.cuts, len(sizes))
        return [tuple([size * self.samples for size in sizes[run.start : run.stop]]) for run in runs]

    @cached_property
    def tensors(self) -> list[StageInputs]:
        """Tensors between the layers of each stage."""
        rows, of_kind = zip(self._kinds, self._layer_inputs, strict=True), self._of_kind
        return [StageInputs.of([of_kind[kind] for kind in row], sizes, self.samples) for row, sizes in rows]

    @cached_property
    def _skipped(self) -> list[float]:
        links, following = self._skips
        rows = zip(range(self.stages), [0.0, *following[:-1]], strict=True)
        return [sum((size for link, size in links if link.target == s), 0.0) + more for s, more in rows]

    @property
    def inputs(self) -> list[float]:
        """Bytes of each stage's input, with skip connections."""
        rows = zip(self._layer_inputs, self._skipped, strict=True)
        return [sizes[0] + more for sizes, more in rows]

    def saved_inputs(self, recompute: Recompute) -> list[float]:
        """The part of each stage's input that its forward saves: all, if layers are computed again."""
        if recompute.recomputes:
            return self.inputs
        return [tensors.saved_input for tensors in self.tensors]

    def saved_outputs(self, recompute: Recompute) -> list[float]:
        """The part of each stage's output that its forward saves: none, if layers are computed again."""
        if recompute.recomputes:
            return [0.0] * self.stages
        return [tensors.saved_output for tensors in self.tensors]

    @cached_property
    def leaves(self) -> list[float]:
        """Bytes that each stage's forward leaves in addition if its backward is split."""
        rows = zip(self._kinds, self.tensors, strict=True)
        return [leaf_bytes([self._of_kind[kind] for kind in kinds], tensors) for kinds, tensors in rows]

    @cached_property
    def kept_output_gradients(self) -> list[float]:
        """Bytes of gradients of each stage's output that its weight gradients need."""
        return [self._of_kind[kinds[-1]].kept_output_gradient(self.samples) for kinds in self._kinds]

    @cached_property
    def _states(self) -> list[dict[Saved, float]]:
        if not self.profile.positions:
            return [{}] * self.stages
        growing, constant = (
            [size * self.samples for size in self._total(of)]
            for of in (lambda layer: layer.state_bytes, lambda layer: layer.slice_state_bytes)
        )
        if not any((*growing, *constant)):
            return [{}] * self.stages
        rows = zip(growing, constant, strict=True)
        return [
            {Saved.STATE: size, Saved.SLICE_STATE: alone, Saved.STATE_GRADIENTS: size} for size, alone in rows
        ]

    def table(self, recompute: Recompute) -> tuple[StageBytes, ...]:
        """Bytes of the stages, for the simulator."""
        if recompute not in self._tables:
            self._tables[recompute] = tuple(self._stage_bytes(recompute))
        return self._tables[recompute]

    @cached_property
    def _tables(self) -> dict[Recompute, tuple[StageBytes, ...]]:
        return {}

    def _stage_bytes(self, recompute: Recompute) -> Iterator[StageBytes]:
        of_stage = stage_bytes if self.measured else stage_bytes_without_peaks
        weights = map(add, self.weights, self.casts)
        gathered = self._folded(lambda layers: max(layer.gathered_bytes for layer in layers))
        fixed = map(sum, zip(self.gradients, self.optimizer, self.buffers, gathered, strict=True))
        known: dict[object, StageBytes] = {}
        rows = zip(
            *(weights, fixed, self._kinds, self._layer_inputs, self._skipped, self._states), strict=True
        )
        for stage_weights, stage_fixed, kinds, inputs, skipped, state in rows:
            key = stage_weights, stage_fixed, kinds, inputs, skipped
            if key not in known:
                layers = [self._of_kind[kind] for kind in kinds]
                tensors, space = of_stage(layers, inputs, self.samples, recompute, skipped)
                for saved, size in state.items():
                    if recompute.recomputes or saved is Saved.STATE_GRADIENTS:
                        tensors[saved] = size  # otherwise it is among the activations
                known[key] = StageBytes(stage_weights, stage_fixed, tensors, space)
            yield known[key]


def cut(model: Model, profile: Profile, cuts: Cuts, stages: int, samples: int) -> tuple[int, ...]:
    """The cuts of a model's layers.

    Args:
        model: the layers.
        profile: costs of the layers.
        cuts: a rule, or the cuts themselves.
        stages: number of stages.
        samples: samples of a micro-batch; cuts minimise the most expensive stage at that size, backward
            included.

    Raises:
        ConfigError: there are fewer layers than stages, or the cuts make another number of stages.
    """
    if not isinstance(cuts, Cutting):
        return explicit(cuts, len(model.layers), stages)
    if cuts is Cutting.EVEN:
        commonest, count = _commonest(model)
        if not may_cut(model, cuts, stages):
            raise ConfigError(
                f"{stages} stages cannot have equally many layers: model {model.name} has {count} of kind "
                f"{commonest!r}; give {count} stages or fewer, or cuts=balanced"
            )
        return balance([float(kind == commonest) for kind in model.layers], stages)
    costs = {kind: _both(profile.layer(kind), samples) for kind in set(model.layers)}
    return balance([costs[kind] for kind in model.layers], stages)


def may_cut(model: Model, cuts: Cuts, stages: int) -> bool:
    """True if the rule, or the cuts, can make this number of stages of the model."""
    if not isinstance(cuts, Cutting):
        return len(cuts) == stages - 1
    return stages <= (_commonest(model)[1] if cuts is Cutting.EVEN else len(model.layers))


def _commonest(model: Model) -> tuple[str, int]:
    return Counter(model.layers).most_common(1)[0]


def _both(layer: LayerProfile, samples: float) -> float:
    return layer.seconds(OpKind.FORWARD, samples) + layer.seconds(OpKind.BACKWARD, samples)


def stage_costs(
    model: Model, profile: Profile, cuts: Sequence[int], samples: int, *, residuals: bool = False
) -> StageCosts:
    """The costs of each stage; an op costs its layers and the profile's overhead per op.

    Raises:
        ConfigError: the cuts make no stages.
    """
    cuts = explicit(tuple(cuts), len(model.layers), len(cuts) + 1)
    return StageCosts(model, profile, cuts, samples, residuals)


def _less(amounts: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, amount - part) for amount, part in zip(amounts, parts, strict=True))


def _skips(
    model: Model, cuts: Sequence[int], samples: int
) -> tuple[tuple[tuple[SkipLink, float], ...], list[float]]:
    """Skip connections past the next stage by their ends, and bytes sent together with stages' outputs."""
    links: dict[SkipLink, float] = {}
    following = [0.0] * (len(cuts) + 1)
    for skip in model.skips:
        source = bisect_right(cuts, skip.source)
        size = skip.size_bytes * (1 if skip.once else samples)
        for target in sorted({bisect_right(cuts, layer) for layer in skip.targets} - {source}):
            if target > source + 1 or skip.once:
                link = SkipLink(source, target, skip.once)
                links[link] = links.get(link, 0.0) + size
            else:
                following[source] += size
    return tuple(sorted(links.items())), following
