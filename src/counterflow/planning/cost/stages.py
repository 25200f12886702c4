"""A model's layers cut into stages, with each stage's cost according to a profile.

Invariant: stages are whole runs of layers; every layer is counted once. Costs are for one micro-batch of a
given number of samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from operator import add

from counterflow.errors import ConfigError
from counterflow.schedule.cuts import balance, explicit, stage_layers
from counterflow.schedule.ir import OpKind, SkipLink
from counterflow.schedule.modes import Recompute
from counterflow.simulation.layer_cost import LayerCost
from counterflow.simulation.op_costs import StageBytes

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .stage_memory import StageMemory, stage_bytes, stage_memory, without_peaks


class Cutting(StrEnum):
    """Rule by which layers are cut into stages: by cost, or equally many of the most common kind in each."""

    BALANCED = "balanced"
    EVEN = "even"


Cuts = Cutting | tuple[int, ...]
"""A rule, or the layers at which each stage after the first begins."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage for one micro-batch of ``samples`` samples.

    Attributes:
        samples: samples of a micro-batch.
        cuts: the layers at which each stage after the first begins.
        layers: seconds of each stage, the fold of its layers' costs.
        output_bytes: bytes of the stage's output.
        weights: bytes of one version of the stage's weights.
        casts: bytes of their casts to another precision.
        gradients: bytes of their gradients.
        optimizer: bytes of their optimiser state.
        memory: memory of the stage's activations and ops.
        measured: True if the profile contains the peaks of ops, so memory of messages is computed; otherwise
            there is an allowance for them.
        skips: skip connections and values sent once per step, with their bytes, ascending.
        trained: bytes of the stage's weights that are trained.
        summed: the part of these that only copies of the stage contain, so their gradients are summed alone.
        synced: bytes of those gradients, as they are sent.
        ties: weights that several stages share.
        message_share: bytes of a message per byte of its content: less than 1 if compressed.
        update_peaks: memory that the optimiser needs while it updates a stage.
        states: bytes that slices leave to later ones, as far as they grow with them, and bytes that each
            leaves however short it is; empty: none.
    """

    samples: int
    cuts: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    output_bytes: tuple[float, ...]
    weights: tuple[float, ...]
    casts: tuple[float, ...]
    gradients: tuple[float, ...]
    optimizer: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    measured: bool = False
    skips: tuple[tuple[SkipLink, float], ...] = ()
    trained: tuple[float, ...] = ()
    summed: tuple[float, ...] = ()
    synced: tuple[float, ...] = ()
    ties: tuple[StageTie, ...] = ()
    message_share: float = 1.0
    update_peaks: tuple[float, ...] = ()
    states: tuple[tuple[float, float], ...] = ()

    def with_residuals(self) -> StageCosts:
        """The same if gradients are summed in a smaller form: what is lost of them has their size."""
        return replace(self, gradients=tuple(2 * size for size in self.gradients))

    @property
    def message_bytes(self) -> tuple[float, ...]:
        """Bytes of the message that carries each stage's output."""
        return tuple(self.message_share * size for size in self.output_bytes)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.memory)

    def seconds(self, kind: OpKind, samples: float | None = None, share: float = 1.0) -> list[float]:
        """Seconds of an op by stage, with its overhead; of a backward without recomputation.

        Args:
            kind: kind of the op.
            samples: samples that it computes at once; None: a micro-batch.
            share: number of times that it does; see ``LayerCost.seconds``.
        """
        size = self.samples if samples is None else samples
        return [layers.op_seconds(kind, size, share) for layers in self.layers]

    @property
    def recomputation(self) -> list[float]:
        """Seconds of each stage's layers when a backward computes them again."""
        return [layers.seconds(OpKind.FORWARD, self.samples) for layers in self.layers]

    def table(self, recompute: Recompute) -> StageBytes:
        """Memory of the stages' weights and activations, for the simulator."""
        if recompute not in self._tables:
            weights = list(map(add, self.weights, self.casts))
            fixed = list(map(add, self.gradients, self.optimizer))
            table = stage_bytes(self.memory, recompute, weights, fixed)
            if any(map(any, self.states)):
                table = replace(
                    table,
                    state=[grows for grows, _ in self.states],
                    slice_state=[fixed for _, fixed in self.states],
                    recomputed=recompute is not Recompute.NONE,
                )
            self._tables[recompute] = table
        return self._tables[recompute]

    @cached_property
    def _tables(self) -> dict[Recompute, StageBytes]:
        return {}


@dataclass(frozen=True, slots=True)
class StageTie:
    """Weights that several stages share; a worker holds one copy of them.

    Attributes:
        stages: the stages, ascending.
        trained_bytes: bytes of the trained ones.
        gradient_bytes: bytes of their gradients.
        copy_bytes: bytes of all, with gradients and optimiser state.
    """

    stages: tuple[int, ...]
    trained_bytes: float
    gradient_bytes: float
    copy_bytes: float


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


def stage_costs(model: Model, profile: Profile, cuts: Sequence[int], samples: int) -> StageCosts:
    """The costs of each stage; an op costs its layers and the profile's overhead per op.

    Raises:
        ConfigError: the profile does not contain a kind of layer, or the cuts make no stages.
    """
    cuts = explicit(tuple(cuts), len(model.layers), len(cuts) + 1)
    of_kind = {kind: profile.layer(kind) for kind in model.layers}
    layers = [of_kind[kind] for kind in model.layers]
    # The input of each layer is the output of the one before.
    inputs = [model.input_bytes * samples, *(layer.output_bytes * samples for layer in layers[:-1])]
    runs = stage_layers(cuts, len(layers))
    stages = [layers[run.start : run.stop] for run in runs]
    entering = [inputs[run.start : run.stop] for run in runs]
    kinds = [model.layers[run.start : run.stop] for run in runs]
    distinct = [*dict.fromkeys(kinds)]
    which = [*map(distinct.index, kinds)]

    def total(of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        amounts = {kind: of(layer) for kind, layer in of_kind.items()}
        sums = [sum(map(amounts.__getitem__, stage)) for stage in distinct]
        return tuple([sums[number] for number in which])

    costs = {kind: layer.cost() for kind, layer in of_kind.items()}
    # A recomputation begins the op that needs it.
    overhead = {kind: profile.op_overhead_seconds for kind in OpKind if kind.makes}
    folded = [
        LayerCost.fold([costs[kind] for kind in stage], samples, overhead, sliced=profile.positions > 0)
        for stage in distinct
    ]

    links, following = _skips(model, cuts, samples)
    skip_bytes = [sum((b for link, b in links if link.target == stage), 0.0) for stage in range(len(stages))]
    skip_bytes = [
        tied_bytes + followed for tied_bytes, followed in zip(skip_bytes, [0.0, *following[:-1]], strict=True)
    ]
    ties, within = _ties(model, cuts)
    tied_bytes, tied_gradients = [0.0] * len(stages), [0.0] * len(stages)
    for tie in ties:
        for stage in tie.stages:
            tied_bytes[stage] += tie.trained_bytes
            tied_gradients[stage] += tie.gradient_bytes
    weights = _less(total(lambda layer: layer.weights_bytes), [row[0] for row in within])
    trained = _less(total(lambda layer: layer.trained_bytes), [row[1] for row in within])
    gradients = _less(total(lambda layer: layer.gradient_bytes), [row[2] for row in within])
    measured = any(layer.forward_peak_bytes for layer in of_kind.values())
    of_stage = stage_memory if measured else without_peaks
    distinct_stages = {
        (kind, *into): (members, into) for kind, members, into in zip(kinds, stages, entering, strict=True)
    }
    known = {key: of_stage(*both, samples) for key, both in distinct_stages.items()}
    memory = [known[kind, *into] for kind, into in zip(kinds, entering, strict=True)]
    if links or any(skip_bytes):
        memory = [
            replace(
                stage_memory_,
                inputs=stage_memory_.inputs + more,
                layer_inputs=stage_memory_.layer_inputs + more,
            )
            for stage_memory_, more in zip(memory, skip_bytes, strict=True)
        ]
    return StageCosts(
        samples=samples,
        cuts=cuts,
        layers=tuple([folded[number] for number in which]),
        output_bytes=tuple(
            stage[-1].output_bytes * samples + more for stage, more in zip(stages, following, strict=True)
        ),
        weights=weights,
        casts=total(lambda layer: layer.cast_bytes),
        gradients=gradients,
        optimizer=tuple(model.optimizer_states * w for w in trained),
        memory=tuple(memory),
        measured=measured,
        skips=links,
        trained=trained,
        summed=_less(trained, tied_bytes),
        synced=tuple(model.gradient_share * size for size in _less(gradients, tied_gradients)),
        ties=ties,
        message_share=model.message_share,
        update_peaks=tuple(
            float((sum if profile.update_together else max)(layer.update_peak_bytes for layer in stage))
            for stage in stages
        ),
        states=tuple(
            (
                sum(layer.state_bytes for layer in stage) * samples,
                sum(layer.slice_state_bytes for layer in stage) * samples,
            )
            for stage in stages
        )
        if profile.positions
        else (),
    )


def _less(amounts: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, amount - part) for amount, part in zip(amounts, parts, strict=True))


def _ties(model: Model, cuts: Sequence[int]) -> tuple[tuple[StageTie, ...], list[tuple[float, float, float]]]:
    """Weights that several stages share, and for each stage the bytes that several of its layers share,
    without one copy.

    The bytes are those of all weights, of the trained ones, and of their gradients.
    """
    ties: dict[tuple[int, ...], tuple[float, float, float]] = {}
    within = [(0.0, 0.0, 0.0)] * (len(cuts) + 1)
    for tie in model.ties:
        on = [bisect_right(cuts, layer) for layer in tie.layers]
        trained, gradient = tie.size_bytes if tie.trained else 0.0, tie.gradient_bytes
        for stage, layers in Counter(on).items():
            more = ((layers - 1) * size for size in (tie.size_bytes, trained, gradient))
            all_bytes, trained_bytes, gradient_bytes = (
                amount + added for amount, added in zip(within[stage], more, strict=True)
            )
            within[stage] = all_bytes, trained_bytes, gradient_bytes
        if len(stages := tuple(sorted({*on}))) > 1:
            summed, gradients, total = ties.get(stages, (0.0, 0.0, 0.0))
            total += tie.size_bytes + gradient + trained * model.optimizer_states
            ties[stages] = summed + trained, gradients + gradient, total
    return tuple(StageTie(stages, *row) for stages, row in sorted(ties.items())), within


def _skips(
    model: Model, cuts: Sequence[int], samples: int
) -> tuple[tuple[tuple[SkipLink, float], ...], list[float]]:
    """Skip connections past the next stage by their ends, and the bytes sent together with each stage's
    output.
    """
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
