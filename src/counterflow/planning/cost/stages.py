"""A model's layers, cut into stages, with what a profile says that each stage costs.

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
from counterflow.schedule.ir import OpKind, Product, SkipLink
from counterflow.schedule.modes import Recompute
from counterflow.simulation import Piece
from counterflow.simulation.op_costs import StageBytes

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .stage_memory import StageMemory, stage_bytes, stage_memory, without_peaks


class Cutting(StrEnum):
    """How layers are cut into stages: by their cost, or with as many of the commonest kind in each."""

    BALANCED = "balanced"
    EVEN = "even"


Cuts = Cutting | tuple[int, ...]
"""A rule, or the layers at which each stage after the first begins."""


@dataclass(frozen=True)
class StageCosts:
    """What each stage costs for one micro-batch of ``samples`` samples.

    Attributes:
        samples: samples of a micro-batch.
        cuts: the layers at which each stage after the first begins.
        forward: seconds of a forward.
        again: seconds of its layers alone, as they run again in a backward that recomputes them.
        backward: seconds of a backward, without recomputation.
        doubled_forward: seconds of a forward of two micro-batches at once.
        doubled_in_turn: seconds of one that runs them one after the other, so that each has its own graph.
        halved_forward: seconds of a forward of a micro-batch half by half, so that each half has its own.
        half_backward: seconds of a backward of half a micro-batch.
        input_gradient: seconds of the first half of a split backward, without recomputation.
        weight_gradients: seconds of the other half.
        half_input_gradient: seconds of the first half, of half a micro-batch.
        half_weight_gradients: seconds of the other.
        output_bytes: bytes of the stage's output.
        weights: bytes of one version of the stage's weights.
        casts: of what that is cast to in another precision.
        gradients: of their gradients.
        optimizer: of their optimiser state.
        memory: what the stage's activations take, and its ops.
        measured: whether the profile has the peaks of ops, so that what a worker holds of messages is walked;
            else there is an allowance for them.
        skips: bytes of what goes past the next stage, or once a step, ascending.
        trained: bytes of the stage's weights that are trained.
        summed: of these, those that only copies of the stage have, so that their gradients are summed alone.
        synced: bytes of those gradients.
        ties: weights that several stages have.
        message_share: bytes of a message for each byte of what it carries: less than 1 if compressed.
        update_peaks: what the optimiser needs while it updates a stage.
    """

    samples: int
    cuts: tuple[int, ...]
    forward: tuple[float, ...]
    again: tuple[float, ...]
    backward: tuple[float, ...]
    doubled_forward: tuple[float, ...]
    doubled_in_turn: tuple[float, ...]
    halved_forward: tuple[float, ...]
    half_backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradients: tuple[float, ...]
    half_input_gradient: tuple[float, ...]
    half_weight_gradients: tuple[float, ...]
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

    @property
    def message_bytes(self) -> tuple[float, ...]:
        """Bytes in which each stage's output travels."""
        return tuple(self.message_share * size for size in self.output_bytes)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.memory)

    def held(self, recompute: Recompute) -> StageBytes:
        """What the stages' weights and activations take, in the simulator's terms."""
        if recompute not in self._held:
            weights = list(map(add, self.weights, self.casts))
            fixed = list(map(add, self.gradients, self.optimizer))
            self._held[recompute] = stage_bytes(self.memory, recompute, weights, fixed)
        return self._held[recompute]

    @cached_property
    def _held(self) -> dict[Recompute, StageBytes]:
        return {}


@dataclass(frozen=True, slots=True)
class StageTie:
    """Weights that several stages have, of which a worker keeps one copy.

    Attributes:
        stages: ascending.
        trained_bytes: of those that are trained.
        gradient_bytes: of their gradients.
        held_bytes: of all, with gradients and optimiser state.
    """

    stages: tuple[int, ...]
    trained_bytes: float
    gradient_bytes: float
    held_bytes: float


@dataclass(frozen=True)
class PlannedOps:
    """What ops cost by a profile, for the simulator.

    Attributes:
        stages: the stages' costs.
        recompute: what a backward computes again; its layers alone, in the same op.
        slowness: what seconds are multiplied by, by worker; empty: all workers are alike.
    """

    stages: StageCosts
    recompute: Recompute
    slowness: tuple[float, ...] = ()

    def seconds(self, piece: Piece) -> float:
        """How long an op takes."""
        seconds = self._profiled(piece)
        return seconds * self.slowness[piece.worker] if self.slowness else seconds

    def _profiled(self, piece: Piece) -> float:
        stages, s = self.stages, piece.stage
        if piece.kind.whole:
            if piece.micro_batches == 2:
                return doubled_forward(stages, self.recompute)[s]
            if piece.shares > piece.micro_batches:
                return halved_forward(stages, self.recompute)[s]
            return stages.forward[s] * piece.work
        whole, half = self._backwards(piece.kind)
        seconds = half[s] if piece.work == 0.5 else whole[s] * piece.work
        if self.recompute is not Recompute.NONE and piece.kind.gives is Product.INPUT_GRADIENT:
            seconds += stages.again[s] * piece.work  # split, too
        return seconds

    def _backwards(self, kind: OpKind) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of a kind of backward, of a whole micro-batch and of half of one, by stage."""
        stages = self.stages
        if kind is OpKind.INPUT_GRADIENT:
            return stages.input_gradient, stages.half_input_gradient
        if kind is OpKind.WEIGHT_GRADIENTS:
            return stages.weight_gradients, stages.half_weight_gradients
        return stages.backward, stages.half_backward

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """What it adds to its worker's memory when it starts, and when it has ended."""
        at_start, at_end = self.stages.held(self.recompute).changes(piece.kind, piece.stage)
        return at_start * piece.work, at_end * piece.work


def doubled_forward(stages: StageCosts, recompute: Recompute) -> tuple[float, ...]:
    """Seconds of each stage's forward of two micro-batches.

    The engine runs them at once where their graph is made later; else each needs a graph of its own.
    """
    return stages.doubled_forward if recompute is Recompute.STAGE else stages.doubled_in_turn


def halved_forward(stages: StageCosts, recompute: Recompute) -> tuple[float, ...]:
    """Seconds of each stage's forward of a micro-batch whose backwards are halves, likewise."""
    return stages.forward if recompute is Recompute.STAGE else stages.halved_forward


def cut(model: Model, profile: Profile, cuts: Cuts, stages: int, samples: int) -> tuple[int, ...]:
    """Where the layers are cut.

    Args:
        model: the layers.
        profile: what they cost.
        cuts: a rule, or the cuts themselves.
        stages: how many.
        samples: of a micro-batch; cuts minimise the most expensive stage at that size, backward included.

    Raises:
        ConfigError: fewer layers than stages; cuts that do not make the stages.
    """
    if not isinstance(cuts, Cutting):
        return explicit(cuts, len(model.layers), stages)
    if cuts is Cutting.EVEN:
        commonest, count = _commonest(model)
        if not may_cut(model, cuts, stages):
            raise ConfigError(
                f"{stages} stages cannot have as many layers each: model {model.name} has {count} of kind "
                f"{commonest!r}; give {count} stages or fewer, or cuts=balanced"
            )
        return balance([float(kind == commonest) for kind in model.layers], stages)
    costs = {kind: _both(profile.layer(kind), samples) for kind in set(model.layers)}
    return balance([costs[kind] for kind in model.layers], stages)


def may_cut(model: Model, cuts: Cuts, stages: int) -> bool:
    """Whether the rule, or the cuts, can make that many stages of the model."""
    if not isinstance(cuts, Cutting):
        return len(cuts) == stages - 1
    return stages <= (_commonest(model)[1] if cuts is Cutting.EVEN else len(model.layers))


def _commonest(model: Model) -> tuple[str, int]:
    """The kind of layer that there are most of, and how many."""
    return Counter(model.layers).most_common(1)[0]


def _both(layer: LayerProfile, samples: float) -> float:
    return layer.forward(samples) + layer.backward(samples)


def stage_costs(model: Model, profile: Profile, cuts: Sequence[int], samples: int) -> StageCosts:
    """The costs of each stage; an op is its layers and the profile's overhead of an op.

    Raises:
        ConfigError: the profile has no layers of a kind; cuts that do not make stages.
    """
    cuts = explicit(tuple(cuts), len(model.layers), len(cuts) + 1)
    of_kind = {kind: profile.layer(kind) for kind in model.layers}
    layers = [of_kind[kind] for kind in model.layers]
    # What each layer takes is what the one before it gives.
    inputs = [model.input_bytes * samples, *(layer.output_bytes * samples for layer in layers[:-1])]
    runs = stage_layers(cuts, len(layers))
    stages = [layers[run.start : run.stop] for run in runs]
    entering = [inputs[run.start : run.stop] for run in runs]
    kinds = [model.layers[run.start : run.stop] for run in runs]

    def total(of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        each = {kind: of(layer) for kind, layer in of_kind.items()}
        return tuple(sum(map(each.__getitem__, stage)) for stage in kinds)

    def op(of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        return tuple(seconds + profile.op_overhead_seconds for seconds in total(of))

    links, following = _skips(model, cuts, samples)
    came = [sum((b for link, b in links if link.target == stage), 0.0) for stage in range(len(stages))]
    came = [own + beside for own, beside in zip(came, [0.0, *following[:-1]], strict=True)]
    ties, within = _ties(model, cuts)
    own, own_gradients = [0.0] * len(stages), [0.0] * len(stages)
    for tie in ties:
        for stage in tie.stages:
            own[stage] += tie.trained_bytes
            own_gradients[stage] += tie.gradient_bytes
    weights = _less(total(lambda layer: layer.weights_bytes), [row[0] for row in within])
    trained = _less(total(lambda layer: layer.trained_bytes), [row[1] for row in within])
    gradients = _less(total(lambda layer: layer.gradient_bytes), [row[2] for row in within])
    measured = any(layer.forward_peak_bytes for layer in of_kind.values())
    of_stage = stage_memory if measured else without_peaks
    memory = [of_stage(stage, into, samples) for stage, into in zip(stages, entering, strict=True)]
    if links or any(came):
        memory = [
            replace(one, inputs=one.inputs + more, layer_inputs=one.layer_inputs + more)
            for one, more in zip(memory, came, strict=True)
        ]
    return StageCosts(
        samples=samples,
        cuts=cuts,
        forward=op(lambda layer: layer.forward(samples)),
        again=total(lambda layer: layer.forward(samples)),
        backward=op(lambda layer: layer.backward(samples)),
        doubled_forward=op(lambda layer: layer.forward(2 * samples)),
        doubled_in_turn=op(lambda layer: 2 * layer.forward(samples)),
        halved_forward=op(lambda layer: 2 * layer.forward(samples / 2)),
        half_backward=op(lambda layer: layer.backward(samples / 2)),
        input_gradient=op(lambda layer: layer.input_gradient(samples)),
        weight_gradients=op(lambda layer: layer.weight_gradients(samples)),
        half_input_gradient=op(lambda layer: layer.input_gradient(samples / 2)),
        half_weight_gradients=op(lambda layer: layer.weight_gradients(samples / 2)),
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
        summed=_less(trained, own),
        synced=_less(gradients, own_gradients),
        ties=ties,
        message_share=model.message_share,
        update_peaks=tuple(
            float((sum if profile.update_together else max)(layer.update_peak_bytes for layer in stage))
            for stage in stages
        ),
    )


def _less(amounts: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, amount - part) for amount, part in zip(amounts, parts, strict=True))


def _ties(model: Model, cuts: Sequence[int]) -> tuple[tuple[StageTie, ...], list[tuple[float, float, float]]]:
    """What several stages share, and of each stage the bytes that several of its layers have, but for one.

    These are all, those that are trained, and the gradients of these.
    """
    found: dict[tuple[int, ...], tuple[float, float, float]] = {}
    within = [(0.0, 0.0, 0.0)] * (len(cuts) + 1)
    for tie in model.ties:
        on = [bisect_right(cuts, layer) for layer in tie.layers]
        trained, gradient = tie.size_bytes if tie.trained else 0.0, tie.gradient_bytes
        for stage, layers in Counter(on).items():
            more = ((layers - 1) * size for size in (tie.size_bytes, trained, gradient))
            whole, part, its = (one + other for one, other in zip(within[stage], more, strict=True))
            within[stage] = whole, part, its
        if len(stages := tuple(sorted({*on}))) > 1:
            summed, gradients, held = found.get(stages, (0.0, 0.0, 0.0))
            held += tie.size_bytes + gradient + trained * model.optimizer_states
            found[stages] = summed + trained, gradients + gradient, held
    return tuple(StageTie(stages, *row) for stages, row in sorted(found.items())), within


def _skips(
    model: Model, cuts: Sequence[int], samples: int
) -> tuple[tuple[tuple[SkipLink, float], ...], list[float]]:
    """What goes past the next stage by where it leads, and what goes beside each stage's output."""
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
