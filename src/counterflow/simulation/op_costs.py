"""Costs of single ops: seconds, and the bytes that they add to their worker's memory.

The simulator asks once for each distinct piece of work, so any object can provide the costs (``OpCosts``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import add, mul
from typing import TYPE_CHECKING, Protocol

from counterflow.common.cli_fields import cli_field
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, Workload
from counterflow.schedule.modes import Recompute

if TYPE_CHECKING:
    from .costs import Costs

PerStage = float | Sequence[float]
"""One number for every stage, or one number per stage."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The properties of an op on which its cost may depend: ops that are the same piece cost the same.

    Attributes:
        kind: kind of the op.
        stage: its stage.
        worker: its worker.
        micro_batches: number of micro-batches computed together.
        parts: number of parts of the micro-batch, of which the op computes one.
        shares: for a forward, number of backwards that differentiate it; each may need a graph of its own.
        part: number of its slice; 0 if it is none.
        lengths: relative lengths of the slices of a micro-batch; one: it is whole.
        recomputed: whether stages are computed again by ops of their own, so that no backward does it.
    """

    kind: OpKind
    stage: int
    worker: int
    micro_batches: int = 1
    parts: int = 1
    shares: int = 1
    part: int = 0
    lengths: tuple[int, ...] = (1,)
    recomputed: bool = False
    work: float = field(init=False, compare=False)
    """Work in micro-batches: 2 for a doubled forward, 0.5 for a half backward, its share of the sequence for
    a slice.
    """
    attention: float = field(init=False, compare=False)
    """Attention to all positions up to its own, in micro-batches: for the slice from a share b of the
    sequence to e it is e² - b².
    """
    before: float = field(init=False, compare=False)
    """Share of the sequence that is before its slice; 0 if it is none."""

    def __post_init__(self) -> None:
        work = attention = self.micro_batches / self.parts
        before = 0.0
        if self.sliced:
            whole, begin = sum(self.lengths), sum(self.lengths[: self.part])
            end = begin + self.lengths[self.part]
            work = self.micro_batches * (end - begin) / whole
            attention = self.micro_batches * (end**2 - begin**2) / whole**2
            before = begin / whole
        object.__setattr__(self, "work", work)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "before", before)

    @property
    def sliced(self) -> bool:
        """Whether it is of one of several slices."""
        return len(self.lengths) > 1

    @property
    def repeats(self) -> OpKind | None:
        """The kind whose work a backward does again if outputs are recomputed, unless a recomputation has
        done it; None: of no other kind.
        """
        return None if self.recomputed or not self.kind.makes else self.kind.again

    @classmethod
    def of(cls, op: Op, worker: int, workload: Workload) -> Piece:
        """The piece of an op on a worker."""
        part = op.part if workload.slices > 1 else 0
        return cls(
            op.kind,
            op.stage,
            worker,
            len(op.micro_batches),
            op.parts,
            part=part,
            lengths=workload.lengths,
            recomputed=workload.recomputes,
        )


class OpCosts(Protocol):
    """Costs of ops, including recomputation, on each worker's device."""

    def seconds(self, piece: Piece) -> float:
        """Duration of an op."""

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """Bytes that it adds to its worker's memory when it starts, and when it has ended (negative:
        freed).
        """


MOST_COST = 1e30
"""The largest cost: sums of as many as there are ops stay numbers."""


def refuse_negative(name: str, value: PerStage, unit: str = "seconds") -> None:
    """Refuse a cost that is below 0, infinite, or so large that sums of it are.

    Raises:
        ConfigError: one of its numbers is.
    """
    for number in [value] if isinstance(value, (int, float)) else value:
        if not math.isfinite(number) or number < 0:
            raise ConfigError(f"{name}={number}: must be a finite number of {unit}, 0 or more")
        if number > MOST_COST:
            raise ConfigError(f"{name}={number:g}: must be {MOST_COST:g} {unit} or less")


@dataclass(frozen=True, slots=True)
class ByteCosts:
    """Bytes of one stage; each a number for all stages or one per stage.

    Attributes:
        weights: one version of one copy of the stage's weights.
        gradients: gradients of one copy; None means as many as the weights.
        optimizer: optimiser state of one copy.
        activations: bytes that a forward saves for its backward, for one micro-batch, without recomputation.
        kept_for_weights: the part of it that weight gradients still need after the input gradient, if the
            backward is split; None means all of it.
        inputs: the stage's input for one micro-batch: all that is saved with ``recompute="stage"``. If the
            backward needs it, it is a part of ``activations``.
        casts: casts of one version of the weights to another precision, made once for all micro-batches.
        beyond_inputs: bytes that a forward saves beyond its input while the stage is computed again; None
            means ``activations`` less ``inputs``.
        layers: number of layers in the stage; with ``recompute="layer"`` one input per layer is saved.
        layer_inputs: those inputs together; None means ``layers`` times ``inputs``.
        largest_layer: maximum bytes that a layer saves beyond its input, for one micro-batch; None means that
            all layers of the stage save the same.
        state: bytes of one micro-batch that a stage leaves to later slices, such as keys and values: a part
            of ``activations`` that is saved in any case. Its gradient waits for the slice that made it.
        slice_state: bytes of it that each slice leaves, however short it is, such as a recurrent state.
        state_gradients: bytes of these gradients; None: as many as of the state.
    """

    weights: PerStage = cli_field(
        0.0, "Bytes of one version of the weights.", metavar="BYTES", name="weight_bytes", divided=0.0
    )
    gradients: PerStage | None = cli_field(
        None,
        "Bytes of gradients. Default: those of the weights.",
        metavar="BYTES",
        name="gradient_bytes",
        divided=0.0,
    )
    optimizer: PerStage = cli_field(
        0.0, "Bytes of optimiser state.", metavar="BYTES", name="optimizer_bytes", divided=0.0
    )
    activations: PerStage = cli_field(
        0.0,
        "What a forward of one micro-batch saves for its backward.",
        metavar="BYTES",
        name="activation_bytes",
        divided=0.0,
    )
    inputs: PerStage = cli_field(
        0.0,
        "Input of one micro-batch: what --recompute stage saves.",
        metavar="BYTES",
        name="input_bytes",
    )
    kept_for_weights: PerStage | None = cli_field(
        None,
        "What a split backward keeps from the input gradient to the weight gradients. Default: all of "
        "--activation-bytes.",
        metavar="BYTES",
        divided=0.0,
    )
    layers: PerStage = cli_field(
        1.0, "Number of layers: --recompute layer saves the input of each.", metavar="NUMBER", divided=1.0
    )
    layer_inputs: PerStage | None = None
    largest_layer: PerStage | None = None
    beyond_inputs: PerStage | None = None
    casts: PerStage = 0.0
    state: PerStage = cli_field(
        0.0,
        "What slices of one micro-batch leave to later ones (keys and values), a part of --activation-bytes.",
        metavar="BYTES",
        name="state_bytes",
        divided=0.0,
    )
    slice_state: PerStage = cli_field(
        0.0,
        "What each slice of a micro-batch leaves to the next one however short it is (a recurrent state).",
        metavar="BYTES",
        name="slice_state_bytes",
        divided=0.0,
    )
    state_gradients: PerStage | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                refuse_negative(each.name, value, "layers" if each.name == "layers" else "bytes")


def per_stage(name: str, value: PerStage, stages: int) -> list[float]:
    """``value`` for each of ``stages`` stages.

    Raises:
        ConfigError: the list has another length.
    """
    if isinstance(value, (int, float)):
        return [float(value)] * stages
    if len(value) != stages:
        raise ConfigError(
            f"{name}: {len(value)} numbers for {stages} stages; give one number, or one per stage"
        )
    return [float(v) for v in value]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes by stage, after recomputation.

    Attributes:
        weights: one version of the weights, and its casts.
        fixed: gradients and optimiser state.
        stash: bytes of one micro-batch that are saved from its forward to its backward.
        between: bytes that are saved from input gradient to weight gradients, if the backward is split.
        space: for each kind of op, additional bytes while it runs; of a backward without those of a
            recomputation.
        again: bytes that a recomputation leaves until the backward has ended; empty: none.
        state: bytes of one micro-batch that slices leave to later ones.
        slice_state: bytes of it that each slice leaves however short it is, in addition; empty: none.
        state_gradients: gradients of ``state``; empty: as many.
        recomputed: whether ``stash`` is without them, because the rest is computed again.
    """

    weights: list[float]
    fixed: list[float]
    stash: list[float]
    between: list[float]
    space: Mapping[OpKind, list[float]]
    again: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)
    slice_state: list[float] = field(default_factory=list)
    state_gradients: list[float] = field(default_factory=list)
    recomputed: bool = False

    def of_piece(self, piece: Piece) -> tuple[float, float]:
        """Bytes that an op adds when it starts and when it has ended."""
        each = self.changes(piece.kind, piece.stage, recomputed=piece.recomputed)
        at_start, at_end = (amount * piece.work for amount in each)
        state_at_start, state_at_end = self.state_changes(piece)
        return at_start + state_at_start, at_end + state_at_end

    def state_changes(self, piece: Piece) -> tuple[float, float]:
        """The part of them that is the state of slices, as far as it is not in ``stash``.

        The state of a slice is an input of all later ones, and of itself it is an output that is computed
        again: it exists from its forward until the next slice's backward has ended. Its gradient exists from
        the last slice's backward until its own.
        """
        at_start = at_end = 0.0
        if not self.state or not piece.sliced:
            return at_start, at_end
        state = self.state[piece.stage] * piece.micro_batches
        alone = self.slice_state[piece.stage] * piece.micro_batches if self.slice_state else 0.0
        gradients = self.state_gradients[piece.stage] * piece.micro_batches if self.state_gradients else state
        share = [length / sum(piece.lengths) for length in piece.lengths]
        last = piece.part == len(share) - 1
        if self.recomputed and piece.kind.whole and not last:
            at_start += state * share[piece.part] + alone
        if piece.kind.carries < 0:
            at_end -= state * share[piece.part - 1] + alone if self.recomputed and piece.part else 0.0
            at_start += gradients * piece.before if last else 0.0
            at_end -= 0.0 if last else gradients * share[piece.part]
        return at_start, at_end

    def changes(self, kind: OpKind, stage: int, *, recomputed: bool) -> tuple[float, float]:
        """Bytes that an op on one micro-batch adds when it starts and when it has ended.

        Args:
            kind: kind of the op.
            stage: its stage.
            recomputed: whether a recomputation precedes each backward; otherwise the backward recomputes.
        """
        stash, between, space = self.stash[stage], self.between[stage], self.space[kind][stage]
        again = self.again[stage] if self.again else 0.0
        alone = max(self.space[OpKind.RECOMPUTATION][stage], again)
        if kind.again is not None and kind.makes and not recomputed:
            again, space = 0.0, max(alone, again + space)
        match kind:
            case OpKind.FORWARD:
                return stash + space, -space
            case OpKind.RECOMPUTATION:
                return alone, again - alone
            case OpKind.BACKWARD:
                return space, -stash - again - space
            case OpKind.INPUT_GRADIENT:
                return space, between - stash - again - space
            case OpKind.WEIGHT_GRADIENTS:
                return space, -between - space


def stage_bytes(costs: ByteCosts | StageBytes, recompute: Recompute, stages: int) -> StageBytes:
    """Byte costs after a kind of recomputation; ``StageBytes`` are already made for one."""
    if isinstance(costs, StageBytes):
        return costs

    def each(name: str, instead: PerStage = 0.0) -> list[float]:
        value = getattr(costs, name)
        return per_stage(name, instead if value is None else value, stages)

    stash = full = each("activations")
    inputs, layers, none = each("inputs"), each("layers"), [0.0] * stages
    again = layer = none
    if recompute is Recompute.STAGE:  # the input exists already
        stash = inputs
        again = each("beyond_inputs", [max(f - i, 0.0) for f, i in zip(full, inputs, strict=True)])
    elif recompute is Recompute.LAYER:
        stash = [i * n for i, n in zip(inputs, layers, strict=True)]
        layer = [max(f - s, 0.0) / n for f, s, n in zip(full, stash, layers, strict=True)]
        stash, layer = each("layer_inputs", stash), each("largest_layer", layer)
    return StageBytes(
        weights=list(map(add, each("weights"), each("casts"))),
        fixed=list(map(add, each("gradients", costs.weights), each("optimizer"))),
        stash=stash,
        between=each("kept_for_weights", full),
        space=dict(zip(OpKind, (none, layer, layer, none, again), strict=True)),
        again=again,
        state=each("state"),
        slice_state=each("slice_state"),
        state_gradients=each("state_gradients", costs.state),
        recomputed=recompute is not Recompute.NONE,
    )


@dataclass(frozen=True, slots=True)
class StageOps:
    """Costs by stage, in proportion to the work; the same on every worker.

    Attributes:
        table: seconds of each kind of op, by stage, for one micro-batch.
        attention: the seconds of these that are attention to earlier positions, in the same form.
        overhead: seconds that each op takes in addition, by stage, however small its part is.
        held: bytes by stage; None: not counted.
        again: whether a backward computes its forward again, unless a recomputation has done it.
    """

    table: dict[OpKind, list[float]]
    held: StageBytes | None
    attention: dict[OpKind, list[float]]
    overhead: list[float]
    again: bool = False

    @classmethod
    def of(cls, costs: Costs, stages: int) -> StageOps:
        """Costs by stage. A recomputation happens once, before or with the input gradient.

        Attention has no weights, so that a split backward has all of it in the input gradient.
        """
        forward = per_stage("forward", costs.forward, stages)
        backward = per_stage("backward", costs.backward, stages)
        shares = per_stage("attention", costs.attention, stages)
        seen, seen_back = (list(map(mul, shares, times)) for times in (forward, backward))
        inputs = [b / 2 + s / 2 for b, s in zip(backward, seen_back, strict=True)]
        if costs.input_gradient is not None:
            inputs = per_stage("input_gradient", costs.input_gradient, stages)
        weights = [max(0.0, b - i) for b, i in zip(backward, inputs, strict=True)]
        if costs.weight_gradients is not None:
            weights = per_stage("weight_gradients", costs.weight_gradients, stages)
        halved = list(map(min, seen_back, inputs))
        recompute = Recompute(costs.recompute)
        table = dict(zip(OpKind, (forward, backward, inputs, weights, forward), strict=True))
        attention = dict(zip(OpKind, (seen, seen_back, halved, [0.0] * stages, seen), strict=True))
        held = None if costs.memory is None else stage_bytes(costs.memory, recompute, stages)
        overhead, again = per_stage("overhead", costs.overhead, stages), recompute is not Recompute.NONE
        return cls(table, held, attention, overhead, again)

    def seconds(self, piece: Piece) -> float:
        """Duration of an op, see ``OpCosts``."""
        seconds = self._alone(piece.kind, piece)
        if self.again and piece.repeats is not None:
            seconds += self._alone(piece.repeats, piece)
        return seconds + self.overhead[piece.stage]

    def _alone(self, kind: OpKind, piece: Piece) -> float:
        """Seconds of the work that an op of a kind does, without its overhead."""
        seconds = self.table[kind][piece.stage] * piece.work
        if piece.attention != piece.work:
            seconds += self.attention[kind][piece.stage] * (piece.attention - piece.work)
        return seconds

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """Bytes that an op adds, see ``OpCosts``."""
        if self.held is None:
            return 0.0, 0.0
        return self.held.of_piece(piece)
