"""What each worker holds while it goes through its list: state, activations, workspace, messages.

The schedule's order is walked with the sends and receives that lowering puts between its ops, as the
interpreter runs them: a receive takes a buffer when it is posted, which is given back when the op after the
one that needs it begins; the buffers that were ever needed at once stay. What is sent to a worker is there
until the next message to it is sent, or the gradient of it has come. What a worker hands to itself is there
until the backward of the stage that takes it.

Invariant: every byte is in one part. Not walked: skips (``skips_on_their_way``), messages of other shapes
than the micro-batch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.program.actions import Action, Matching, Receive
from counterflow.program.lowering import messages, unit_times
from counterflow.schedule.ir import Op, Product, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.simulation.op_costs import StageBytes, per_stage
from counterflow.simulation.timed_schedule import timed

from .stages import StageCosts


@dataclass(frozen=True, slots=True)
class WorkerPeak:
    """What a worker holds when it holds most, in bytes, beside its state.

    Attributes:
        activations: what forwards keep for their backwards, inputs that came in messages too.
        workspace: what the op at hand, or the update, needs while it runs.
        buffers: of messages on their way, received ahead or used before.
        versions: further weight versions.
    """

    activations: float
    workspace: float
    buffers: float
    versions: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.workspace + self.buffers + self.versions


def walked(
    schedule: Schedule,
    stages: StageCosts,
    held: StageBytes,
    recompute: Recompute,
    *,
    versions: Sequence[float],
    updating: Sequence[float],
    matching: Matching,
) -> tuple[WorkerPeak, ...]:
    """Each worker's peak.

    Args:
        schedule: the order.
        stages: what its stages cost.
        held: their bytes, with what is recomputed.
        recompute: what that is.
        versions: by op, what weight versions add that are made, or freed, when it has ended.
        updating: by worker, what the gradient norm or the optimiser needs.
        matching: how messages are matched, which tells how early receives are posted.
    """
    graph = timed(schedule).graph
    ends = unit_times(graph)[1]
    bounds = [(0, len(order)) for order in schedule.orders]
    between: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.orders]
    for worker, before, _, action in messages(graph, ends, bounds, matching):
        between[worker][before].append(action)
    found = []
    for worker, order in enumerate(schedule.orders):
        walk = _Walk(schedule, worker, stages, held, recompute)
        for number, op in enumerate(order):
            walk.post(between[worker][number])
            walk.run(op)
            walk.versions += versions[graph.first[worker] + number]
        walk.post(between[worker][len(order)])
        found.append(walk.peak(updating[worker]))
    return tuple(found)


class _Walk:
    """One worker's list, action by action.

    A stage's input is counted apart from what its forward leaves: in a receive buffer, or as made here.
    """

    def __init__(
        self, schedule: Schedule, worker: int, stages: StageCosts, held: StageBytes, recompute: Recompute
    ) -> None:
        self.placement, self.worker = schedule.placement, worker
        self.held, self.outputs = held, stages.output_bytes
        self.last = count = schedule.stages - 1
        costs = stages.bytes
        self.entering = per_stage("inputs", costs.inputs, count + 1)
        full = per_stage("activations", costs.activations, count + 1)
        assert costs.beyond_inputs is not None
        beyond = per_stage("beyond_inputs", costs.beyond_inputs, count + 1)
        self.counted = needed = [a - b for a, b in zip(full, beyond, strict=True)]
        """Of what forwards leave, their inputs."""
        self.between = [kept - own for kept, own in zip(held.between, needed, strict=True)]
        """What split backwards leave, beside that."""
        self.kept = list(stages.kept_outputs) or [0.0] * (count + 1)
        """Of what forwards leave, their outputs."""
        if recompute is not Recompute.NONE:
            self.counted, self.kept = self.entering, [0.0] * (count + 1)
        self.stash = 0.0
        self.inputs = 0.0
        """Of stages, in receive buffers, while their micro-batches are in flight."""
        self.here = 0.0
        """What was made for another stage of this worker."""
        self.made = 0.0
        """For another worker, and not sent yet."""
        self.sent: dict[int, tuple[Op, float]] = {}
        """By worker the last message to it: whose output it is, and its bytes that nobody else keeps."""
        self.pool = self.most_pool = 0.0
        self.versions = 0.0
        self.over: list[tuple[float, float]] = []
        """Inputs and gradients in buffers that go back when the next op begins."""
        self.gone_here = 0.0
        self.best = (0.0,) * 6

    def post(self, actions: Sequence[Action]) -> None:
        """Sends, and receives that take their buffers."""
        for action in actions:
            if action.skip is not None:  # type: ignore[union-attr]
                continue
            if isinstance(action, Receive):
                op = action.output
                self.pool += self.outputs[op.boundary] * op.work
                self.most_pool = max(self.most_pool, self.pool)
            else:  # in place of the message before it
                self.sent[action.peer] = action.output, self.made  # type: ignore[union-attr]
                self.made = 0.0

    def _is_here(self, op: Op, stage: int) -> bool:
        return self.placement.worker(op.pipe, stage) == self.worker

    def _input(self, op: Op) -> float:
        return self.outputs[op.stage - 1] * op.work if op.stage else 0.0

    def run(self, op: Op) -> None:
        """An op, from the end of the one before to its own."""
        for size, of_input in self.over:
            self.pool -= size
            self.inputs -= of_input
        self.over.clear()
        self.here -= self.gone_here
        self.gone_here = 0.0
        at_start, at_end = (amount * op.work for amount in self.held.changes(op.kind, op.stage))
        if op.kind.whole:
            self._forward(op, at_start, at_end)
        else:
            self._backward(op, at_start, at_end)

    def _forward(self, op: Op, at_start: float, at_end: float) -> None:
        stage = op.stage
        stays = at_start + at_end - self.counted[stage] * op.work
        if stage and not self._is_here(op, stage - 1):
            self.inputs += self._input(op)
        self._note(max(stays, at_start - self.entering[stage] * op.work), stays)
        self.stash += stays
        if stage < self.last:
            self._lay(op, self._beyond_kept(stage) * op.work, stage + 1)

    def _beyond_kept(self, stage: int) -> float:
        """Of a stage's output, what its forward does not keep."""
        return max(0.0, self.outputs[stage] - self.kept[stage])

    def _backward(self, op: Op, at_start: float, at_end: float) -> None:
        stage, first = op.stage, op.kind.takes is not None
        ends = Product.WEIGHT_GRADIENTS in op.kind.makes
        if first and stage < self.last:
            self._answered(op)
        gradient = self.outputs[stage] * op.work if stage < self.last else 0.0
        own = self.counted[stage]
        whole = (self.held.stash[stage] - own) * op.work
        rest = max(0.0, self.between[stage] * op.work - gradient)
        del at_end
        self._note(at_start, 0.0)
        self.stash += (0.0 if ends else rest) - (whole if first else rest)
        if ends:
            self._give_back(op, gradient)
        if first and stage:
            self._lay(op, self._input(op), stage - 1)

    def _give_back(self, op: Op, gradient: float) -> None:
        """The input of an op's unit and its output's gradient, which nothing needs any more."""
        if op.stage < self.last:
            if self._is_here(op, op.stage + 1):
                self.gone_here += gradient
            else:
                self.over.append((gradient, 0.0))
        if op.stage:
            size = self._input(op)
            if self._is_here(op, op.stage - 1):
                self.gone_here += self._beyond_kept(op.stage - 1) * op.work
            else:
                self.over.append((size, size))

    def _answered(self, op: Op) -> None:
        """Let go of the message whose gradient a backward takes."""
        peer = self.placement.worker(op.pipe, op.stage + 1)
        if peer in self.sent:
            made, _ = self.sent[peer]
            about = made.kind.whole and made.stage == op.stage
            if about and op.micro_batches[0] in made.micro_batches:
                del self.sent[peer]

    def _in_flight(self) -> float:
        return self.made + sum(size for _, size in self.sent.values())

    def _lay(self, op: Op, size: float, stage: int) -> None:
        """What an op made for a stage, here or elsewhere."""
        if self._is_here(op, stage):
            self.here += size
        else:
            self.made = size

    def _note(self, during: float, stays: float) -> None:
        """The most so far, while an op runs; of ``during`` what ``stays``."""
        moving = self.here + self._in_flight()
        total = self.stash + during + moving + self.versions
        if total > self.best[0]:
            self.best = total, self.stash + stays, during - stays, moving, self.versions, self.inputs

    def peak(self, updating: float) -> WorkerPeak:
        """The most of all ops, or of the update after them."""
        moving = self._in_flight()
        if updating + moving + self.versions > self.best[0]:
            return WorkerPeak(0.0, updating, self.most_pool + moving, self.versions)
        _, stash, space, in_flight, versions, inputs = self.best
        return WorkerPeak(stash + inputs, space, self.most_pool - inputs + in_flight, versions)
