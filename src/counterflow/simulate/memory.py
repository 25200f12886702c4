"""A worker's memory over time, from byte costs and the times of its ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.schedule.ir import OpKind, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.residency import version_lives

from .costs import ByteCosts, Costs, per_stage


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one worker as steps: from ``times[i]`` on it holds ``amounts[i]`` (bytes, if so given)."""

    times: tuple[float, ...]
    amounts: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The largest amount."""
        return max(self.amounts)


def memory_use(
    schedule: Schedule, costs: Costs, start: Sequence[float], end: Sequence[float]
) -> tuple[MemoryUse, ...]:
    """Memory of every worker over time.

    A forward's stash is there from its start to the end of its backward; of a split one, what only the input
    gradient needs goes with it, the rest with the weight gradients. What recomputation needs besides is there
    while the backward runs. Weights, gradients and optimiser state of every copy are
    there throughout, a further weight version from its update until nothing needs it.

    Args:
        schedule: the schedule.
        costs: with ``memory`` set.
        start: start of each op, worker by worker in order, in seconds.
        end: end of each op.
    """
    assert costs.memory is not None
    parts = stage_bytes(costs.memory, Recompute(costs.recompute), schedule.stages)
    uses = []
    first = 0
    for worker, order in enumerate(schedule.orders):
        # (time, rank, change): at one time, what is freed goes first.
        changes: list[tuple[float, int, float]] = []

        def add(time: float, change: float, into: list[tuple[float, int, float]] = changes) -> None:
            into.append((time, 0 if change < 0 else 1, change))

        for index, op in enumerate(order):
            began, ended = start[first + index], end[first + index]
            at_start, at_end = parts.changes(op.kind, op.stage)
            if at_start:
                add(began, at_start * op.work)
            if at_end:
                add(ended, at_end * op.work)
        base = sum(parts.fixed[stage] for _, stage in schedule.placement.held(worker))
        for stage, version, born, dies in version_lives(schedule, worker):
            if version and born >= 0:
                add(end[first + born], parts.weights[stage])
            elif version == 0:
                base += parts.weights[stage]
            if dies is not None and dies >= 0:
                add(end[first + dies], -parts.weights[stage])
        uses.append(_steps(base, changes))
        first += len(order)
    return tuple(uses)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes by stage.

    Attributes:
        weights: one version of the weights.
        fixed: gradients and optimiser state.
        stash: of one micro-batch, what is kept from its forward to its backward.
        working: what is there besides while the backward, or its input gradient, runs.
        between: what is there between input gradient and weight gradients, where these are two ops.
    """

    weights: list[float]
    fixed: list[float]
    stash: list[float]
    working: list[float]
    between: list[float]

    def changes(self, kind: OpKind, stage: int) -> tuple[float, float]:
        """What an op on one micro-batch adds when it starts and when it has ended."""
        stash, working, between = self.stash[stage], self.working[stage], self.between[stage]
        match kind:
            case OpKind.FORWARD:
                return stash, 0.0
            case OpKind.BACKWARD:
                return working, -stash - working
            case OpKind.INPUT_GRADIENT:
                return working, between - stash - working
            case OpKind.WEIGHT_GRADIENTS:
                return 0.0, -between


def stage_bytes(costs: ByteCosts, recompute: Recompute, stages: int) -> StageBytes:
    """What a kind of recomputation makes of byte costs."""
    weights = per_stage("weights", costs.weights, stages)
    gradients = costs.weights if costs.gradients is None else costs.gradients
    full = per_stage("activations", costs.activations, stages)
    inputs = per_stage("inputs", costs.inputs, stages)
    layers = per_stage("layers", costs.layers, stages)
    if recompute is Recompute.NONE:
        stash, working = full, [0.0] * stages
    elif recompute is Recompute.STAGE:  # the input is there already
        stash, working = inputs, [max(f - i, 0.0) for f, i in zip(full, inputs, strict=True)]
    else:
        stash = [i * n for i, n in zip(inputs, layers, strict=True)]
        working = [max(f - s, 0.0) / n for f, s, n in zip(full, stash, layers, strict=True)]
        if costs.layer_inputs is not None:
            stash = per_stage("layer_inputs", costs.layer_inputs, stages)
        if costs.largest_layer is not None:
            working = per_stage("largest_layer", costs.largest_layer, stages)
    fixed = [
        g + o
        for g, o in zip(
            per_stage("gradients", gradients, stages),
            per_stage("optimizer", costs.optimizer, stages),
            strict=True,
        )
    ]
    between = (
        full
        if costs.kept_for_weights is None
        else per_stage("kept_for_weights", costs.kept_for_weights, stages)
    )
    return StageBytes(weights, fixed, stash, working, between)


def _steps(base: float, changes: list[tuple[float, int, float]]) -> MemoryUse:
    times, amounts = [0.0], [base]
    for time, _, change in sorted(changes):
        amount = amounts[-1] + change
        if time == times[-1]:
            amounts[-1] = amount
        else:
            times.append(time)
            amounts.append(amount)
    return MemoryUse(tuple(times), tuple(amounts))
