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
from functools import cached_property, partial
from operator import add

from counterflow.errors import ConfigError
from counterflow.schedule.cuts import balance, explicit, stage_layers
from counterflow.schedule.ir import OpKind, SkipLink
from counterflow.schedule.modes import Recompute
from counterflow.simulation import Piece
from counterflow.simulation.op_costs import StageBytes

from ..inputs.model import Model
from ..inputs.profile import LayerProfile, Profile
from .slice_costs import SliceCost
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
        forward: seconds of a forward.
        again: seconds of its layers alone when a backward recomputes them.
        backward: seconds of a backward, without recomputation.
        doubled_forward: seconds of a forward of two micro-batches at once.
        doubled_in_turn: seconds of one that runs them one after the other, so each has its own graph.
        halved_forward: seconds of a forward of a micro-batch half by half, so each half has its own graph.
        half_backward: seconds of a backward of half a micro-batch.
        input_gradient: seconds of the first half of a split backward, without recomputation.
        weight_gradients: seconds of the other half.
        half_input_gradient: seconds of the first half for half a micro-batch.
        half_weight_gradients: seconds of the other half for half a micro-batch.
        output_bytes: bytes of the stage's output.
        weights: bytes of one version of the stage's weights.
        casts: bytes of their casts to another precision.
        gradients: bytes of their gradients.
        optimizer: bytes of their optimiser state.
        memory: memory of the stage's activations and ops.
        measured: whether the profile contains the peaks of ops, so memory of messages is computed; otherwise
            there is an allowance for them.
        skips: skip connections and values sent once per step, with their bytes, ascending.
        trained: bytes of the stage's weights that are trained.
        summed: the part of these that only copies of the stage contain, so their gradients are summed alone.
        synced: bytes of those gradients, as they are sent.
        ties: weights that several stages share.
        message_share: bytes of a message per byte of its content: less than 1 if compressed.
        update_peaks: memory that the optimiser needs while it updates a stage.
        slices: cost of slices of a micro-batch.
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
    slices: tuple[SliceCost, ...] = ()

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

    def seconds(self, kind: OpKind, *, half: bool = False) -> tuple[float, ...]:
        """Seconds of an op on a micro-batch, or of a backward or recomputation on half of one, by stage; of
        a backward without recomputation.
        """
        match kind:
            case OpKind.FORWARD:
                return self.forward
            case OpKind.BACKWARD:
                return self.half_backward if half else self.backward
            case OpKind.INPUT_GRADIENT:
                return self.half_input_gradient if half else self.input_gradient
            case OpKind.WEIGHT_GRADIENTS:
                return self.half_weight_gradients if half else self.weight_gradients
            case OpKind.RECOMPUTATION:
                return tuple(layers / 2 for layers in self.again) if half else self.again

    def of_slice(
        self, kind: OpKind, stage: int, share: Callable[[OpKind], float], *, recomputed: bool
    ) -> float:
        """Seconds of an op on a slice of a micro-batch.

        Args:
            kind: kind of the op.
            stage: its stage.
            share: share of a whole op's seconds, without its overhead, that the slice takes, by kind.
            recomputed: whether it computes its forward again.
        """
        layers = self.again[stage]
        if not kind.makes:
            return layers * share(kind)
        overhead = self.forward[stage] - layers
        seconds = (self.seconds(kind)[stage] - overhead) * share(kind) + overhead
        if recomputed and kind.again is not None:
            seconds += layers * share(kind.again)
        return seconds

    def held(self, recompute: Recompute) -> StageBytes:
        """Memory of the stages' weights and activations, for the simulator."""
        if recompute not in self._held:
            weights = list(map(add, self.weights, self.casts))
            fixed = list(map(add, self.gradients, self.optimizer))
            held = stage_bytes(self.memory, recompute, weights, fixed)
            if any(one.state_bytes or one.slice_state_bytes for one in self.slices):
                held = replace(
                    held,
                    state=[one.state_bytes for one in self.slices],
                    slice_state=[one.slice_state_bytes for one in self.slices],
                    recomputed=recompute is not Recompute.NONE,
                )
            self._held[recompute] = held
        return self._held[recompute]

    @cached_property
    def _held(self) -> dict[Recompute, StageBytes]:
        return {}


@dataclass(frozen=True, slots=True)
class StageTie:
    """Weights that several stages share; a worker holds one copy of them.

    Attributes:
        stages: the stages, ascending.
        trained_bytes: bytes of the trained ones.
        gradient_bytes: bytes of their gradients.
        held_bytes: bytes of all, with gradients and optimiser state.
    """

    stages: tuple[int, ...]
    trained_bytes: float
    gradient_bytes: float
    held_bytes: float


@dataclass(frozen=True)
class PlannedOps:
    """Costs of ops by a profile, for the simulator.

    Attributes:
        stages: the stages' costs.
        recompute: what is computed again: only layers, in the same op or, whole stages, in one of its own.
        slowness: factor of seconds by worker; empty: all workers are alike.
    """

    stages: StageCosts
    recompute: Recompute
    slowness: tuple[float, ...] = ()

    def seconds(self, piece: Piece) -> float:
        """Duration of an op."""
        seconds = self._profiled(piece)
        return seconds * self.slowness[piece.worker] if self.slowness else seconds

    def _profiled(self, piece: Piece) -> float:
        stages, s = self.stages, piece.stage
        if piece.sliced:
            return self._of_slice(piece)
        if piece.kind.whole:
            if piece.micro_batches == 2:
                return doubled_forward(stages, self.recompute)[s]
            if piece.shares > piece.micro_batches:
                return halved_forward(stages, self.recompute)[s]
            return stages.forward[s] * piece.work
        if piece.work == 0.5:
            seconds = stages.seconds(piece.kind, half=True)[s]
        else:
            seconds = stages.seconds(piece.kind)[s] * piece.work
        if self._recomputes(piece):
            seconds += stages.again[s] * piece.work  # also if split
        return seconds

    def _of_slice(self, piece: Piece) -> float:
        stages, s = self.stages, piece.stage
        cost = stages.slices[s] if stages.slices else SliceCost()
        share = partial(cost.share, work=piece.work, attention=piece.attention)
        return stages.of_slice(piece.kind, s, share, recomputed=self._recomputes(piece))

    def _recomputes(self, piece: Piece) -> bool:
        """Whether an op computes its forward again before it does anything else."""
        return self.recompute is not Recompute.NONE and piece.repeats is not None

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """Bytes that an op adds to its worker's memory when it starts, and when it has ended."""
        return self.stages.held(self.recompute).of_piece(piece)


def doubled_forward(stages: StageCosts, recompute: Recompute) -> tuple[float, ...]:
    """Seconds of each stage's forward of two micro-batches.

    The runtime runs them at once if their graph is made later; otherwise each needs its own graph.
    """
    return stages.doubled_forward if recompute is Recompute.STAGE else stages.doubled_in_turn


def halved_forward(stages: StageCosts, recompute: Recompute) -> tuple[float, ...]:
    """Seconds of each stage's forward of a micro-batch whose backwards are halves; see
    ``doubled_forward``.
    """
    return stages.forward if recompute is Recompute.STAGE else stages.halved_forward


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
    """Whether the rule, or the cuts, can make this number of stages of the model."""
    if not isinstance(cuts, Cutting):
        return len(cuts) == stages - 1
    return stages <= (_commonest(model)[1] if cuts is Cutting.EVEN else len(model.layers))


def _commonest(model: Model) -> tuple[str, int]:
    """The most common kind of layer, and its number."""
    return Counter(model.layers).most_common(1)[0]


def _both(layer: LayerProfile, samples: float) -> float:
    return layer.forward(samples) + layer.backward(samples)


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
        each = {kind: of(layer) for kind, layer in of_kind.items()}
        sums = [sum(map(each.__getitem__, stage)) for stage in distinct]
        return tuple([sums[number] for number in which])

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
    made = {(kind, *into): (its, into) for kind, its, into in zip(kinds, stages, entering, strict=True)}
    known = {key: of_stage(*both, samples) for key, both in made.items()}
    memory = [known[kind, *into] for kind, into in zip(kinds, entering, strict=True)]
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
        synced=tuple(model.gradient_share * size for size in _less(gradients, own_gradients)),
        ties=ties,
        message_share=model.message_share,
        update_peaks=tuple(
            float((sum if profile.update_together else max)(layer.update_peak_bytes for layer in stage))
            for stage in stages
        ),
        slices=tuple(SliceCost.of(stage, samples) for stage in stages) if profile.positions else (),
    )


def _less(amounts: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, amount - part) for amount, part in zip(amounts, parts, strict=True))


def _ties(model: Model, cuts: Sequence[int]) -> tuple[tuple[StageTie, ...], list[tuple[float, float, float]]]:
    """Weights that several stages share, and for each stage the bytes that several of its layers share,
    without one copy.

    The bytes are those of all weights, of the trained ones, and of their gradients.
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
