"""Minimum times of ops in a schedule with given shares and splits.

Invariant: no schedule of the shape runs a micro-batch through a stage in less time, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.ir import OpKind
from counterflow.schedule.modes import Recompute
from counterflow.simulation import Piece
from counterflow.simulation.layer_cost import LayerCost
from counterflow.simulation.op_costs import forward_runs

from ..cost.stages import StageCosts
from .shape import WorkloadShape

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MinimumTimes:
    """Minimum seconds by stage: of a forward and a backward per micro-batch, and of a single backward op.

    ``forward`` and ``backward_op`` are those of the slice that takes least, if there are slices. If split,
    ``through`` is a forward and an input gradient per micro-batch, ``backward_op`` an input gradient;
    otherwise ``through`` is ``both``. A recomputation of a whole stage is in ``both`` and ``through``, but
    not in ``backward_op``, because it may run before the gradient exists that a backward takes.
    """

    forward: list[float]
    both: list[float]
    through: list[float]
    backward_op: list[float]

    def on(self, pipes: Sequence[Sequence[int]], slowness: Sequence[float]) -> PipeTimes:
        """The times on the workers that hold the stages of each pipe, multiplied by their slowness; empty:
        all are alike.
        """
        rows = np.array((self.forward, self.both, self.through, self.backward_op))[:, np.newaxis]
        slow = np.array(slowness)[np.array(pipes)] if slowness else np.ones((len(pipes), 1))
        return PipeTimes(*(rows * slow))


class PipeTimes(NamedTuple):
    """``MinimumTimes`` of each pipe, ``[pipe][stage]``."""

    forward: Floats
    both: Floats
    through: Floats
    backward_op: Floats


def least_times(
    shape: WorkloadShape, stages: StageCosts, recompute: Recompute, *, halves_alone: bool = False
) -> MinimumTimes:
    """Minimum times of each stage of a placement; with ``halves_alone`` no backward is of more than half a
    micro-batch.
    """
    inside = recompute is Recompute.LAYER
    recomputed, within = float(recompute.recomputes), float(inside)
    forward, both, through, backward_op = [], [], [], []
    samples, backwards = stages.samples, stages.seconds(OpKind.BACKWARD)
    firsts, seconds = stages.seconds(OpKind.INPUT_GRADIENT), stages.seconds(OpKind.WEIGHT_GRADIENTS)
    if shape.split:
        halves = zip(backwards, firsts, seconds, strict=True)
        backwards = [min(full, first + second) for full, first, second in halves]
    doubled_forwards = stages.seconds(OpKind.FORWARD, *forward_runs(samples, recompute, micro_batches=2))
    half_backwards = stages.seconds(OpKind.BACKWARD, samples / 2)
    halved_forwards = stages.seconds(OpKind.FORWARD, *forward_runs(samples, recompute, shares=2))
    # If no backward is of more than half a micro-batch, each forward runs in halves.
    forwards = halved_forwards if halves_alone else stages.seconds(OpKind.FORWARD)
    for f, layers, b, doubled, in_halves, half, first in zip(
        forwards,
        stages.recomputation,
        backwards,
        doubled_forwards,
        halved_forwards,
        half_backwards,
        firsts,
        strict=True,
    ):
        backward, half_backward = b + recomputed * layers, half + recomputed * layers / 2
        # Single ops, without what another op computes again.
        op, half_op = b + within * layers, half + within * layers / 2
        smallest = half_op if shape.parts == 2 else min(half_op, op / shape.parts)
        # A doubled forward serves two micro-batches, a half backward half of one, whose forward may then run
        # in halves.
        shared = max(shape.together) > 1
        halved = shape.parts > 1
        if halves_alone:
            backward, op = 2 * half_backward, 2 * half_op
        per_micro_batch = min(f, doubled / 2) if shared else min(f, in_halves) if halved else f
        forward.append(per_micro_batch)
        both.append(per_micro_batch + (min(backward, 2 * half_backward) if halved else backward))
        if shape.split and not halved:
            through.append(per_micro_batch + min(backward, first + recomputed * layers))
            backward_op.append(min(op, first + within * layers))
        else:
            through.append(both[-1])
            backward_op.append(min(op, smallest) if halved else op)
    if len(shape.lengths) > 1:
        forward, backward_op = _of_slices(shape, stages, recomputed=inside)
    return MinimumTimes(forward, both, through, backward_op)


def _of_slices(
    shape: WorkloadShape, stages: StageCosts, *, recomputed: bool
) -> tuple[list[float], list[float]]:
    """Minimum seconds of a slice's forward and of its backward op; all slices take as long as the whole, or
    longer.
    """
    kinds = [kind for kind in OpKind if kind.gives and (shape.split or not kind.half)]
    parts, forward, backward = len(shape.lengths), [], []
    slices = [Piece(kinds[0], 0, 0, parts=parts, part=part, lengths=shape.lengths) for part in range(parts)]

    def least_share(layers: LayerCost, kind: OpKind) -> float:
        return min(layers.slice_share(kind, piece.work, piece.attention) for piece in slices)

    for layers in stages.layers:
        seconds = {}
        for kind in kinds:
            seconds[kind] = layers.op_seconds(kind, stages.samples, least_share(layers, kind))
            if recomputed and kind.again is not None:
                seconds[kind] += layers.seconds(kind.again, stages.samples, least_share(layers, kind.again))
        forward.append(min(seconds[kind] for kind in kinds if kind.is_forward))
        backward.append(min(seconds[kind] for kind in kinds if not kind.is_forward))
    return forward, backward
