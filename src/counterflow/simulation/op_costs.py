"""Costs of single ops: seconds, and the bytes that they add to their worker's memory.

The simulator asks once for each distinct piece of work, so any object can provide the costs (``OpCosts``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, Workload
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import Saved

from .layer_cost import LayerCost

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
        recomputed: True if stages are computed again by ops of their own, so that no backward does it.
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
            total, begin = sum(self.lengths), sum(self.lengths[: self.part])
            end = begin + self.lengths[self.part]
            work = self.micro_batches * (end - begin) / total
            attention = self.micro_batches * (end**2 - begin**2) / total**2
            before = begin / total
        object.__setattr__(self, "work", work)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "before", before)

    @property
    def sliced(self) -> bool:
        """True if it is of one of several slices."""
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


def per_stage(name: str, value: PerStage, stages: int) -> list[float]:
    """``value`` for each of ``stages`` stages.

    Raises:
        ConfigError: the list has another length.
    """
    if isinstance(value, (int, float)):
        return [float(value)] * stages
    if len(value) != stages:
        raise ConfigError(
            f"{name}: {plural(len(value), 'number')} for {plural(stages, 'stage')}; give one number, or "
            "one per stage"
        )
    return [float(v) for v in value]


_RECOMPUTED_BY = {kind.restores: kind for kind in OpKind if kind.restores and kind.again}
"""Kind of op by the tensors that it computes again."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage, after recomputation.

    Attributes:
        weights: one version of the weights, and its casts.
        fixed: gradients and optimiser state.
        tensors: bytes of one micro-batch that are saved from one op to a later one; their lives are facts of
            the kinds of ops. No entry: none.
        space: for each kind of op, further bytes while it runs; of a backward without those of a
            recomputation. No entry: none.
    """

    weights: float
    fixed: float
    tensors: Mapping[Saved, float]
    space: Mapping[OpKind, float]

    def of_piece(self, piece: Piece) -> tuple[float, float]:
        """Bytes that an op adds when it starts and when it has ended."""
        amounts = self.changes(piece.kind, recomputed=piece.recomputed)
        at_start, at_end = (amount * piece.work for amount in amounts)
        state_at_start, state_at_end = self.state_changes(piece)
        return at_start + state_at_start, at_end + state_at_end

    def state_changes(self, piece: Piece) -> tuple[float, float]:
        """The part of them that is the state of slices, as far as it is not among the saved activations.

        The state of a slice is an input of all later ones, and of itself it is an output that is computed
        again: it exists from its forward until the next slice's backward has ended. Its gradient exists from
        the last slice's backward until its own.
        """
        at_start = at_end = 0.0
        if not piece.sliced or Saved.STATE_GRADIENTS not in self.tensors:
            return at_start, at_end
        state, constant, gradients = (
            self.tensors.get(stored, 0.0) * piece.micro_batches
            for stored in (Saved.STATE, Saved.SLICE_STATE, Saved.STATE_GRADIENTS)
        )
        share = [length / sum(piece.lengths) for length in piece.lengths]
        last = piece.part == len(share) - 1
        if piece.kind.is_forward and not last:
            at_start += state * share[piece.part] + constant
        if piece.kind.carries < 0:
            at_end -= state * share[piece.part - 1] + constant if piece.part else 0.0
            at_start += gradients * piece.before if last else 0.0
            at_end -= 0.0 if last else gradients * share[piece.part]
        return at_start, at_end

    def changes(self, kind: OpKind, *, recomputed: bool) -> tuple[float, float]:
        """Bytes that an op on one micro-batch adds when it starts and when it has ended.

        Args:
            kind: kind of the op.
            recomputed: True if a recomputation precedes each backward; otherwise the backward recomputes.
        """
        tensors, space = self.tensors, self.space.get(kind, 0.0)
        saved = sum(tensors.get(stored, 0.0) for stored in (kind.saves, kind.restores) if stored)
        freed = sum(tensors.get(stored, 0.0) for stored in kind.frees)
        if kind.again is not None and kind.makes and not recomputed:
            for stored in kind.frees:
                if restorer := _RECOMPUTED_BY.get(stored):  # they begin and end with this op
                    restored = tensors.get(stored, 0.0)
                    space = restored + max(space, self.space.get(restorer, 0.0))
                    freed -= restored
        if kind.frees:  # what it saves is a part of what it frees
            return space, saved - freed - space
        return saved + space, -freed - space


@dataclass(frozen=True, slots=True)
class StageOps:
    """Costs of ops by the costs of their stages.

    Attributes:
        stages: costs of the stages.
        samples: samples of a micro-batch.
        recompute: what a backward computes again: only layers, in the same op or, complete stages, in one of
            its own.
        memory: bytes of the stages; None: not counted.
        slowness: factor of seconds by worker; empty: all workers are equal.
    """

    stages: Sequence[LayerCost]
    samples: float
    recompute: Recompute
    memory: Sequence[StageBytes] | None = None
    slowness: Sequence[float] = ()

    def seconds(self, piece: Piece) -> float:
        """Duration of an op, see ``OpCosts``."""
        stage, kind = self.stages[piece.stage], piece.kind
        if piece.sliced:
            share = stage.slice_share(kind, piece.work, piece.attention)
            seconds = stage.op_seconds(kind, self.samples, share)
        elif kind.is_forward:
            seconds = stage.op_seconds(
                kind, *forward_runs(self.samples, self.recompute, piece.micro_batches, piece.shares)
            )
        elif kind.makes and piece.work < 1:
            seconds = stage.op_seconds(kind, self.samples * piece.work)
        else:
            seconds = stage.op_seconds(kind, self.samples, piece.work)
        if self.recompute.recomputes and piece.repeats is not None:
            share_again = piece.work
            if piece.sliced:
                share_again = stage.slice_share(piece.repeats, piece.work, piece.attention)
            seconds += stage.seconds(piece.repeats, self.samples, share_again)
        return seconds * self.slowness[piece.worker] if self.slowness else seconds

    def bytes(self, piece: Piece) -> tuple[float, float]:
        """Bytes that an op adds, see ``OpCosts``."""
        return (0.0, 0.0) if self.memory is None else self.memory[piece.stage].of_piece(piece)


def forward_runs(
    samples: float, recompute: Recompute, micro_batches: int = 1, shares: int = 1
) -> tuple[float, float]:
    """Samples that a forward computes at once, and how often it does.

    The runtime computes all at once if their graph is made later; otherwise each share that a backward
    differentiates needs its own graph.

    Args:
        samples: samples of a micro-batch.
        recompute: what a backward computes again.
        micro_batches: micro-batches of the forward.
        shares: backwards that differentiate it.

    >>> forward_runs(4, Recompute.NONE, micro_batches=2), forward_runs(4, Recompute.NONE, shares=2)
    ((4.0, 2), (2.0, 2))
    >>> forward_runs(4, Recompute.STAGE, micro_batches=2)
    (8.0, 1)
    """
    graphs = 1 if recompute is Recompute.STAGE else max(micro_batches, shares)
    return samples * micro_batches / graphs, graphs
